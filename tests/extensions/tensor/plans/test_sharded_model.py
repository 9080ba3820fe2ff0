"""A plan applied to models that exist: they train as on one device, and say what cannot be done."""

import functools

import keras
import numpy as np
import pytest
from grids import exhaustive
from ranks import strategy_on
from training import one_device

import tfdist
from tests.parity.comparison import assert_same_tree, losses_of_fit, state

pytestmark = pytest.mark.usefixtures("float64")

LENGTH, VOCABULARY = 6, 11


class Gated(keras.layers.Layer):
    """A gated MLP of layers of two kinds."""

    def __init__(self, **kwargs):
        super().__init__(**kwargs)
        self.up = keras.layers.Dense(8, name="up")
        self.gate = keras.layers.Dense(8, activation="silu", name="gate")
        self.down = keras.layers.EinsumDense("abc,cd->abd", (None, 12), bias_axes="d", name="down")

    def build(self, shape):
        self.up.build(shape)
        self.gate.build(shape)
        self.down.build((*shape[:-1], 8))

    def call(self, x):
        return x + self.down(self.gate(x) * self.up(x))


class Decoder(keras.Model):
    """A subclassed model with an attention and a head that is no Dense of Keras, but inherits its computation."""

    def __init__(self, **kwargs):
        super().__init__(**kwargs)
        self.table = keras.layers.Embedding(VOCABULARY, 12, name="table")
        self.attention = keras.layers.GroupQueryAttention(3, 8, 4, name="attention")
        self.mlp = Gated(name="mlp")
        self.head = Head(VOCABULARY + 1, name="head")

    def build(self, shape):
        self.table.build(shape)
        inner = (*shape, 12)
        self.attention.build(inner, inner)
        self.mlp.build(inner)
        self.head.build(inner)
        self.built = True

    def call(self, tokens):
        x = self.table(tokens)
        return self.head(self.mlp(x + self.attention(x, x, use_causal_mask=True)))


class Head(keras.layers.Dense):
    """A Dense by another name."""


PLAN = {
    r"table$": "vocab",
    r"attention$": "column",
    r"mlp/(up|gate)": "column",
    r"mlp/down": "row",
    r"head/kernel": "column",
}


def decoder():
    model = Decoder(name="decoder")
    model.build((None, LENGTH))
    return model


def train(strategy, plan=None, report=None):
    rng = np.random.default_rng(6)
    tokens, labels = (rng.integers(0, VOCABULARY, (24, LENGTH)) for _ in range(2))
    keras.backend.clear_session()
    keras.utils.set_random_seed(8)
    with strategy.scope():
        model = decoder()
        if plan is not None:
            before = model.get_weights()
            assert tfdist.parallelize(model, plan, print_fn=report) is model
            for mine, theirs in zip(model.get_weights(), before, strict=True):
                np.testing.assert_array_equal(mine, theirs)
        loss = keras.losses.SparseCategoricalCrossentropy(from_logits=True)
        model.compile(keras.optimizers.SGD(0.1, momentum=0.9), loss)
    losses, _ = losses_of_fit(model, tokens, labels, batch_size=4, shuffle=False)
    assert len(losses) == 6 and max(losses) > min(losses)
    return model, {"losses": losses, **state(model)}


def predicted(model):
    return model.predict(np.arange(3 * LENGTH).reshape(3, LENGTH) % VOCABULARY, verbose=0)


@functools.cache
def on_one_device():
    model, found = train(one_device())
    return found, predicted(model)


@pytest.mark.filterwarnings("error:The layer .* contains rows that meet:UserWarning")  # a false alarm
@pytest.mark.as_traced
@pytest.mark.parametrize(("tensor", "data", "zero_stage", "infers"), [(2, 2, 3, True), exhaustive(4, 1, 1, False)])
def test_it_trains_as_on_one_device(tensor, data, zero_stage, infers, tmp_path):
    printed = []
    strategy = strategy_on(tensor * data, tensor_parallel_size=tensor, zero_stage=zero_stage)
    model, found = train(strategy, PLAN, printed.append)
    expected, predictions = on_one_device()
    assert_same_tree(found, expected)
    if infers:
        assert_same_tree(predicted(model), predictions)
    (table,) = printed
    assert table.splitlines()[0] == f"6 layers are sharded over {tensor} tensor ranks"
    for path, output in (("mlp/up", "sharded"), ("mlp/down", "whole"), ("head", "whole"), ("attention", "whole")):
        assert any(path in line and line.endswith(output) for line in table.splitlines()), table
    assert isinstance(model.head, tfdist.layers.ColumnParallelDense) and isinstance(model.head, Head)
    model.save_weights(tmp_path / "it.weights.h5")
    plain = decoder()
    plain.load_weights(tmp_path / "it.weights.h5")
    for mine, theirs in zip(plain.get_weights(), found["weights"], strict=True):
        np.testing.assert_array_equal(mine, theirs)


def test_a_suggested_plan_is_a_plan():
    strategy = strategy_on(2, tensor_parallel_size=2)
    with strategy.scope():
        model = keras.Sequential([keras.Input((256,)), keras.layers.Dense(512, "relu"), keras.layers.Dense(4)])
        tfdist.parallelize(model, tfdist.suggest_plan(model, 2), print_fn=None)
    assert [type(layer) for layer in model.layers] == [tfdist.layers.ColumnParallelDense, tfdist.layers.RowParallelDense]
    assert (model.layers[0].gather_output, model.layers[1].input_is_parallel) == (False, True)
    with pytest.raises(ValueError, match="sharded already"):
        tfdist.parallelize(model, {"dense": "column"}, print_fn=None)
    whole = sum(weight.value.numpy().nbytes for weight in model.weights)
    assert tfdist.memory_report(model).devices[0].parameter_bytes < 0.51 * whole


def test_without_a_tensor_axis_nothing_changes():
    strategy = strategy_on(2)
    with strategy.scope():
        model = decoder()
        tfdist.parallelize(model, PLAN, print_fn=None)
    assert type(model.mlp.up) is keras.layers.Dense


@pytest.mark.parametrize(
    ("plan", "words"),
    [
        ({"mpl": "column"}, ["match a layer", "mpl"]),
        ({"mlp/up": "sideways"}, ["sideways"]),
        ({"mlp/up": "vocab"}, ["mlp/up", "vocab"]),
        ({"attention/query": "column"}, ["attention", "whole"]),
    ],
)
def test_plans_that_are_refused(plan, words):
    strategy = strategy_on(2, tensor_parallel_size=2)
    with strategy.scope():
        model = decoder()
    with pytest.raises(ValueError) as error:
        tfdist.parallelize(model, plan, print_fn=None)
    assert all(word in str(error.value) for word in words), error.value


def test_a_cut_that_does_not_divide():
    strategy = strategy_on(3, tensor_parallel_size=3)
    with strategy.scope():
        model = decoder()
    with pytest.raises(ValueError, match="num_query_heads|num_key_value_heads"):
        tfdist.parallelize(model, {"attention$": "column"}, print_fn=None)


def test_models_that_are_refused():
    with pytest.raises(ValueError, match="built in the scope of one tfdist strategy"):
        tfdist.parallelize(decoder(), PLAN)
    with pytest.raises(ValueError, match="must be a built"):
        tfdist.parallelize(Decoder(), PLAN)
    strategy = strategy_on(2, tensor_parallel_size=2)
    with strategy.scope():
        model = decoder()
        model.compile("adam", "mse")
        model.optimizer.build(model.trainable_variables)
    with pytest.raises(ValueError, match="before `compile`"):
        tfdist.parallelize(model, PLAN)
    assert isinstance(model.head, keras.layers.Dense) and not isinstance(model.head, tfdist.layers.ColumnParallelDense)


def test_a_model_is_sharded_before_it_is_in_a_pipeline_and_not_after():
    """Before, its weights are not made yet; later they are on the ranks of their stages."""
    with strategy_on(4, tensor_parallel_size=2, pipeline_parallel_size=2).scope():
        tokens = keras.Input((4,))
        model = keras.Model(tokens, keras.layers.Dense(6, name="out")(keras.layers.Dense(8)(tokens)))
        told = []
        tfdist.parallelize(model, {"out": "column"}, print_fn=told.append)
        assert told[0].splitlines()[-1].split() == ["out", "column", "54", "27", "whole"]
        pipelined = tfdist.PipelineModel(model, num_microbatches=2)
    for wrapped in (pipelined, model):
        with pytest.raises(ValueError, match="must not be in a `PipelineModel` yet"):
            tfdist.parallelize(wrapped, {"out": "column"})
