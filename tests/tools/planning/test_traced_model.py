"""Models traced without data and without values of weights: what is known of them, and what is refused."""

import keras
import numpy as np
import pytest
from training import mlp

from tfdist.tools.planning.equal_layers import FEWEST_ALIKE
from tfdist.tools.planning.traced_model import trace
from tfdist.tools.planning.work import work_of

LOSS = keras.losses.SparseCategoricalCrossentropy(from_logits=True)


@keras.saving.register_keras_serializable("planning")
class Block(keras.layers.Layer):
    """A residual block of two layers."""

    def __init__(self, width, **settings):
        super().__init__(**settings)
        self.width = width
        self.up = keras.layers.Dense(4 * width, "gelu")
        self.down = keras.layers.Dense(width)

    def build(self, shape):
        self.up.build(shape)
        self.down.build((*shape[:-1], 4 * self.width))

    def call(self, x):
        return x + self.down(self.up(x))

    def compute_output_shape(self, shape):
        return shape


def blocks(count=6, width=160, optimizer="adam"):
    def build():
        inputs = keras.Input((width,))
        x = inputs
        for index in range(count):
            x = Block(width, name=f"block_{index}")(x)
        model = keras.Model(inputs, keras.layers.Dense(7, name="head")(x))
        model.compile(optimizer, LOSS)
        return model

    return build


def huge():
    """A terabyte of weights."""
    inputs = keras.Input((2**19,))
    return keras.Model(inputs, keras.layers.Dense(2**19)(inputs))


def test_a_model_of_a_terabyte_is_traced():
    traced = trace(huge)
    assert traced.parameters == 2**38 + 2**19
    assert sum(slot.bytes for slot in traced.slots) == 8 * traced.parameters + 8 + 4  # Adam's moments, its counter and rate
    assert "not compiled" in traced.assumed[0]


def flops_of_calls(traced):
    """Returns the FLOPs of forward of one example, of each call that was traced or of the one in its place."""
    work = work_of(traced.traces)
    flops = (work.figures[1, 0] - work.figures[0, 0])[work.is_forward] / (work.batch_sizes[1] - work.batch_sizes[0])
    return np.bincount(work.calls[work.is_forward], flops, len(work.stands_for))[list(work.stands_for)]


def test_weights_slots_and_blocks_are_those_of_the_model():
    traced, model = trace(blocks()), blocks()()
    model.optimizer.build(model.trainable_variables)
    assert [weight.shape for weight in traced.weights] == [tuple(v.shape) for v in model.variables]
    assert [slot.shape for slot in traced.slots] == [tuple(v.shape) for v in model.optimizer.variables]
    assert {slot.of for slot in traced.slots} == {None, *range(len(traced.trained))}
    names = [f"block_{index}" for index in range(6)]
    assert [call.layer and call.layer.name for call in traced.calls] == [None, *names, "head"]
    assert [traced.calls[place].layer.name for place in traced.recomputed_calls] == names
    assert sum(weight.bytes for weight in traced.weights) == 4 * model.count_params()
    assert flops_of_calls(traced)[1] == pytest.approx(2 * 8 * 160**2, rel=0.02) and traced.output_bytes(1, 8) == 8 * 160 * 4


def test_layers_passed_over_count_as_if_they_were_traced(monkeypatch):
    """With two blocks of six passed over, the step takes what it takes with all of them traced."""
    few = trace(blocks())
    assert sum(call.stands_for is not None for call in few.calls) == 6 - 4
    monkeypatch.setattr("tfdist.tools.planning.equal_layers.FEWEST_ALIKE", 99)
    every = trace(blocks())
    assert FEWEST_ALIKE < 6 and all(call.stands_for is None for call in every.calls)
    ours, theirs = few.profile(256), every.profile(256)
    assert ours.kept.sum() == pytest.approx(theirs.kept.sum(), rel=0.03)
    assert ours.activations.max() == pytest.approx(theirs.activations.max(), rel=0.05)
    assert (ours.gradients >= 0).all() and len(ours.gradients) == len(theirs.gradients)
    assert few.recomputed_calls == every.recomputed_calls and few.weights == every.weights
    assert flops_of_calls(few) == pytest.approx(flops_of_calls(every))
    assert few.profile(64).kept == pytest.approx(every.profile(64).kept, rel=0.03)


def test_what_forward_keeps_is_linear_in_the_batch():
    """Of each Dense its input is kept, and what its activation needs of its own."""
    traced = trace(lambda: keras.Sequential([keras.Input((300,)), keras.layers.Dense(500, "relu"), keras.layers.Dense(200)]))
    kept = traced.profile(100).kept
    assert kept[1] == pytest.approx(100 * 500 * 4, rel=0.01)  # what ReLU returns, which the next layer takes, too
    assert traced.output_bytes(2, 100) == 100 * 200 * 4
    assert traced.profile(200).kept.sum() == pytest.approx(2 * kept.sum(), rel=0.02)


def not_a_model():
    return keras.layers.Dense(3)


def not_built():
    return keras.Sequential([keras.layers.Dense(3)])


def fails():
    raise OSError("no such file")


def needs_values():
    model = keras.Sequential([keras.Input((600,)), keras.layers.Dense(3)])
    model(np.ones((1, 600), "float32"))
    return model


def open_size():
    inputs = keras.Input((None, 5))
    return keras.Model(inputs, keras.layers.Dense(3)(inputs))


class Eager(keras.layers.Layer):
    def call(self, x):
        return x * float(x.numpy().mean())

    def compute_output_spec(self, x):
        return keras.KerasTensor(x.shape, x.dtype)


def needs_data():
    inputs = keras.Input((5,))
    return keras.Model(inputs, keras.layers.Dense(3)(Eager()(inputs)))


@pytest.mark.parametrize(
    "build, said",
    [
        (not_a_model, "must return a Keras model"),
        (not_built, "without weights"),
        (fails, "no such file"),
        (needs_values, "values of weights"),
        (open_size, "`?sequence_length"),
        (needs_data, "without data"),
        (3, "must be a function"),
    ],
)
def test_builds_that_cannot_be_traced(build, said):
    with pytest.raises(ValueError, match=said):
        trace(build)


def test_open_sizes_are_given():
    traced = trace(open_size, sequence_length=11)
    assert traced.output_bytes(1, 2) == 2 * 11 * 3 * 4


def test_unknown_optimizers_are_refused():
    with pytest.raises(ValueError, match="`optimizer`"):
        trace(mlp, "adamm")


def test_tracing_leaves_nothing_behind():
    """The next model is made with values, and names its layers as if none had been planned."""
    trace(blocks())
    model = mlp()
    assert np.isfinite(model(np.ones((2, 15), "float32"))).all()
    first = [weight.path for weight in trace(blocks()).weights]
    assert first == [weight.path for weight in trace(blocks()).weights]
