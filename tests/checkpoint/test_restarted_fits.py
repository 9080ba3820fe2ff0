"""A `fit` that goes on from the middle of an epoch and of an accumulation ends as if it had never stopped, bit by bit."""

import warnings

import keras
import pytest
import tensorflow as tf
from grids import exhaustive

from tests.checkpoint import restarted_fits
from tests.checkpoint.restarted_fits import MODELS, OPTIMIZERS, Pair, assert_no_differences, on

pytestmark = [pytest.mark.as_traced, pytest.mark.timeout(300)]

SETTINGS = {
    "layers": [{"zero_stage": stage} for stage in range(4)],
    "lora": [{"zero_stage": 0}, {"zero_stage": 3}],
}
BY_DEFAULT = ("layers", "scaled", SETTINGS["layers"][3])
CASES = [(model, optimizer, settings) for model in SETTINGS for optimizer in OPTIMIZERS for settings in SETTINGS[model]]
GRID = [case if case == BY_DEFAULT else exhaustive(*case) for case in CASES]


@pytest.mark.parametrize(("model", "optimizer", "settings"), GRID, ids=str)
def test_models_and_optimizers(model, optimizer, settings, tmp_path, cpus):
    assert restarted_fits.differences(on(cpus, settings), MODELS[model], optimizer, tmp_path) == []


@pytest.mark.parametrize(("save_freq", "zero_stage"), [("epoch", 0), exhaustive("epoch", 3), exhaustive(2, 3)])
def test_averages_that_are_swapped(save_freq, zero_stage, tmp_path, cpus):
    def swap():
        return keras.callbacks.SwapEMAWeights(swap_on_epoch=True)

    strategy = on(cpus, {"zero_stage": zero_stage})
    assert restarted_fits.differences(strategy, MODELS["layers"], "averages", tmp_path, save_freq, [swap], step=7) == []


@pytest.mark.parametrize("zero_stage", [3, exhaustive(0), exhaustive(1)])
def test_optimizers_beside_that_of_the_model(zero_stage, tmp_path, cpus):
    """They began anew: Keras builds `model.optimizer` alone, and loads no state into one that is not built."""
    with warnings.catch_warnings(action="error", category=UserWarning):
        assert restarted_fits.differences(on(cpus, {"zero_stage": zero_stage}), Pair, "momentum", tmp_path) == []


class Closed(keras.Model):
    """Its step trains the kernels with an optimizer that only the step knows."""

    def __init__(self, second):
        super().__init__()
        self.head = keras.layers.Dense(3)
        self._second = lambda: second
        self.build((None, 8))

    def build(self, shape):
        self.head.build(shape)
        super().build(shape)

    def call(self, x):
        return self.head(x)

    def train_step(self, data):
        x, y = data
        with tf.GradientTape() as tape:
            loss = self.compute_loss(x, y, self(x))
        kernel, bias = tape.gradient(loss, [self.head.kernel, self.head.bias])
        self._second().apply([kernel], [self.head.kernel])
        self.optimizer.apply([bias], [self.head.bias])
        return {"loss": loss}


@pytest.mark.parametrize("is_attribute", [False, True])
def test_an_optimizer_that_is_in_no_backup_is_told_of_once(is_attribute, tmp_path, cpus):
    """Its momentum began anew without a word. One that has trained the model before this `fit` is not meant."""
    strategy = on(cpus, {"zero_stage": 1})
    with strategy.scope():
        second = keras.optimizers.LossScaleOptimizer(keras.optimizers.SGD(0.1, momentum=0.9, name="own"))
        model = Closed(second)
        earlier = keras.optimizers.SGD(0.1, name="earlier")
        model.compile(earlier, keras.losses.SparseCategoricalCrossentropy(from_logits=True))
        model.fit(restarted_fits.X, restarted_fits.Y, batch_size=8, verbose=0)
        model.compile("sgd", keras.losses.SparseCategoricalCrossentropy(from_logits=True))
        if is_attribute:
            model.second_optimizer = second
    with warnings.catch_warnings(record=True, action="always") as caught:
        backup = keras.callbacks.BackupAndRestore(tmp_path, save_freq=1)
        model.fit(restarted_fits.X, restarted_fits.Y, batch_size=8, epochs=2, verbose=0, callbacks=[backup])
    told = [str(warning.message) for warning in caught if "is in no backup" in str(warning.message)]
    assert len(told) == (0 if is_attribute else 1), told
    if told:
        assert f"The state of the optimizer {second.name!r} (LossScaleOptimizer) is in no backup" in told[0]
        assert "model.second_optimizer = optimizer" in told[0]


# Two workers: many in one job, because its start takes longest.

JOBS = [
    (model, optimizer, settings)
    for model, optimizer in [("layers", "scaled"), ("layers", "several"), ("layers", "muon"), ("lora", "accumulating")]
    for settings in SETTINGS[model]
]


@pytest.mark.exhaustive
@pytest.mark.parametrize("cases", [JOBS[start::4] for start in range(4)], ids=map("part {}".format, range(1, 5)))
def test_workers(cases, tmp_path):
    assert_no_differences(tmp_path, "tests.checkpoint.restarted_fits:restarted_together", 2, cases)
