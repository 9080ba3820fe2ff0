"""Optimizers on an embedding whose rows are read several times in a batch: which agree with one device, and which cannot.

Keras's optimizers square the gradient of an embedding as it is on one device: a list of rows in which a row stands as often as it
was read. Its parts are squared one by one, where the square of their sum is meant. Under a tfdist strategy the sum is squared, as
in the gradient of a Dense layer. Optimizers that square nothing agree.
"""

import pathlib

import keras
import numpy as np
import pytest
from grids import exhaustive
from training import one_device, strategy_for

from tests.parity.comparison import assert_same_tree, state
from tests.programs.comparing import run

pytestmark = pytest.mark.as_traced

OPTIMIZERS = {
    name: getattr(keras.optimizers, name)
    for name in (
        "Adadelta Adafactor Adagrad Adam AdamW Adamax Ftrl Lamb Lion LossScaleOptimizer Muon Nadam RMSprop SGD ScheduleFreeAdamW"
    ).split()
}
DIFFER = OPTIMIZERS.keys() - {"SGD", "Lion", "LossScaleOptimizer"}
LIMITS = pathlib.Path(__file__).resolve().parents[3] / "docs" / "limits.md"


class OneHot(keras.layers.Embedding):
    """Reads its table by a product with one-hot rows: its gradient is dense, and repeated rows are summed in it."""

    def call(self, ids):
        return keras.ops.one_hot(ids, self.input_dim) @ self.embeddings


def training(name, embedding=keras.layers.Embedding):
    def program(strategy):
        ids = np.array([[1, 1, 2, 3], [2, 2, 2, 0], [3, 1, 0, 0], [1, 2, 3, 3]] * 2)
        with strategy.scope():
            layers = [embedding(5, 3, name="embedding"), keras.layers.Flatten(), keras.layers.Dense(2)]
            model = keras.Sequential([keras.Input((4,), dtype="int32"), *layers])
            inner = (keras.optimizers.SGD(0.01),) if name == "LossScaleOptimizer" else (0.01,)
            model.compile(OPTIMIZERS[name](*inner), "mse")
            # ScheduleFreeAdamW copies the weights when it is built; on one device Keras builds it in a trace that never runs.
            model.optimizer.build(model.trainable_variables)
        model.fit(ids, np.ones((8, 2), "float32"), batch_size=4, epochs=2, verbose=0, shuffle=False)
        return state(model)

    return program


@pytest.mark.parametrize("name", [name if name in ("Adam", "Lion") else exhaustive(name) for name in OPTIMIZERS])
def test_which_agree(name):
    program = training(name)
    expected, found = run(program, one_device()), run(program, strategy_for(2, 0))
    if name not in DIFFER:
        assert_same_tree(found, expected, name, rtol=1e-4)
    else:
        with pytest.raises(AssertionError):
            assert_same_tree(found, expected, name, rtol=1e-4)
    # All are what one device does with the dense gradient.
    assert_same_tree(found, run(training(name, OneHot), one_device()), name, rtol=1e-4)


def test_the_page_names_them():
    (row,) = [line for line in LIMITS.read_text("utf-8").splitlines() if line.startswith("| an embedding")]
    assert {name for name in OPTIMIZERS if f"`{name}`" in row} == DIFFER


def test_the_list_has_every_optimizer():
    kinds = {kind for kind in vars(keras.optimizers).values() if isinstance(kind, type)}
    own = {kind.__name__ for kind in kinds if issubclass(kind, keras.optimizers.Optimizer)}
    assert own - {"Optimizer", "MultiOptimizer", "LossScaleOptimizer"} == OPTIMIZERS.keys() - {"LossScaleOptimizer"}
