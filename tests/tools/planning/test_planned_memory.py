"""Planned state against what `memory_report` finds on the devices, to the byte, for every stage, tensor ranks and pipelines."""

import functools

import keras
import pytest
from test_traced_model import blocks
from training import mlp

import tfdist
from tests.devices import names
from tests.tools.planning.spreading import spread
from tfdist.extensions.tensor.plans.layer_kinds import ROW
from tfdist.extensions.tensor.plans.layer_shardings import LayerSharding
from tfdist.tools.planning import Candidate
from tfdist.tools.planning.memory import memory_of, state_of
from tfdist.tools.planning.tensor_regions import on_tensor_rank
from tfdist.tools.planning.traced_model import trace

LOSS = keras.losses.SparseCategoricalCrossentropy(from_logits=True)


def mixed():
    """Odd sizes, statistics that are not trained, random seeds, a frozen layer, and a scalar."""
    inputs = keras.Input((15,))
    x = keras.layers.Dense(33, activation="tanh", name="hidden")(inputs)
    x = keras.layers.BatchNormalization()(x)
    frozen = keras.layers.Dense(5, name="frozen")
    x = keras.layers.Dropout(0.1)(frozen(x))
    frozen.trainable = False
    model = keras.Model(inputs, keras.layers.Dense(7, name="head")(x))
    model.compile("adam", LOSS)
    return model


def text():
    """Attention, an MLP and embeddings, for the tensor axis; a table of an odd number of rows."""
    tokens = keras.Input((6,), dtype="int32")
    x = keras.layers.Embedding(301, 32)(tokens)
    x = x + keras.layers.MultiHeadAttention(4, 8)(x, x)
    x = keras.layers.LayerNormalization()(x)
    x = x + keras.layers.Dense(32)(keras.layers.Dense(640, "gelu")(x))
    model = keras.Model(tokens, keras.layers.Dense(512)(x))
    model.compile("adam", LOSS)
    return model


@functools.cache
def traced(build, optimizer=None):
    return trace(build, optimizer)


def reported(build, candidate, optimizer=None):
    """Returns the most that a device holds of each kind of state, as the report of a real model says."""
    settings = {
        "tensor_parallel_size": candidate.tensor,
        "pipeline_parallel_size": candidate.pipeline,
        "sharding_group_size": candidate.sharding_group_size,
        "parameter_compression": candidate.parameter_compression,
    }
    strategy = tfdist.ShardedStrategy(names(candidate.devices), zero_stage=candidate.zero_stage, **settings)
    with strategy.scope():
        model = spread(build, candidate)
        if optimizer is not None:
            model.compile(optimizer, LOSS)
        model.optimizer.build(model.trainable_variables)
    report = tfdist.memory_report(model)
    return [
        (device.parameter_bytes + device.exact_bytes, device.gradient_bytes, device.optimizer_bytes) for device in report.devices
    ]


def planned(build, candidate, pipe=0, optimizer=None):
    state = state_of(traced(build, optimizer), candidate, pipe)
    return state.parameters, state.gradients, state.optimizer


EXHAUSTIVE = pytest.mark.exhaustive
PIPELINE = {"zero_stage": 0, "pipeline": 2, "microbatches": 4}


@pytest.mark.parametrize("data", [2, pytest.param(4, marks=EXHAUSTIVE)])
@pytest.mark.parametrize("zero_stage", [pytest.param(0, marks=EXHAUSTIVE), 1, pytest.param(2, marks=EXHAUSTIVE), 3])
@pytest.mark.parametrize("build", [pytest.param(mlp, marks=EXHAUSTIVE), mixed])
def test_state_of_stages(build, zero_stage, data):
    candidate = Candidate(zero_stage=zero_stage, data=data)
    assert reported(build, candidate, "adam") == [planned(build, candidate, optimizer="adam")] * data


@pytest.mark.parametrize("zero_stage", [pytest.param(1, marks=EXHAUSTIVE), 2, pytest.param(3, marks=EXHAUSTIVE)])
@pytest.mark.parametrize("compression", [None, "int8"])
def test_state_in_sharding_groups_and_of_rounded_copies(zero_stage, compression):
    sizes = {"data": 4, "sharding_group_size": 2} if compression is None else {"data": 2}
    candidate = Candidate(zero_stage=zero_stage, parameter_compression=compression, **sizes)
    found = planned(text, candidate)
    assert set(reported(text, candidate)) == {found}
    apart = planned(text, Candidate(zero_stage=zero_stage, data=candidate.shards))
    assert (found > apart) is (compression is not None and zero_stage < 3)  # exact shards of rounded copies


@pytest.mark.parametrize("optimizer", ["adafactor", pytest.param("muon", marks=EXHAUSTIVE)])
@pytest.mark.parametrize("zero_stage", [pytest.param(0, marks=EXHAUSTIVE), 2])
def test_state_of_optimizers_that_look_at_whole_tensors(zero_stage, optimizer):
    candidate = Candidate(zero_stage=zero_stage, data=2)
    found = reported(mixed, candidate, optimizer)
    assert max(found, key=sum) == planned(mixed, candidate, optimizer=optimizer)


@pytest.mark.parametrize("zero_stage, data", [pytest.param(0, 1, marks=EXHAUSTIVE), pytest.param(2, 2, marks=EXHAUSTIVE), (3, 2)])
def test_state_of_tensor_ranks(zero_stage, data):
    candidate = Candidate(zero_stage=zero_stage, data=data, tensor=2)
    assert set(reported(text, candidate)) == {planned(text, candidate)}


@pytest.mark.parametrize(
    "zero_stage, data, schedule",
    [(0, 1, "1f1b"), pytest.param(2, 2, "gpipe", marks=EXHAUSTIVE), pytest.param(3, 2, "1f1b", marks=EXHAUSTIVE)],
)
def test_state_of_pipelines(zero_stage, data, schedule):
    candidate = Candidate(zero_stage=zero_stage, data=data, pipeline=2, schedule=schedule, microbatches=4)
    found = reported(blocks(), candidate)
    assert found[0] != found[-1]
    assert found == [planned(BLOCKS, candidate, pipe) for _ in range(data) for pipe in range(2)]


BLOCKS = blocks()


def test_a_gpu_holds_temporary_tensors_of_updates_and_the_next_batches():
    model = traced(mlp)
    for candidate in (Candidate(zero_stage=0), Candidate(zero_stage=1, data=2)):
        cpu, gpu = (memory_of(model, candidate, 2048, on_gpu=on_gpu) for on_gpu in (False, True))
        given = 2 * model.input_bytes(2048 // candidate.data)
        assert gpu.together - cpu.together == gpu.activations - cpu.activations == gpu.optimizer // 2 + given > given


def test_what_a_step_takes_falls_with_the_stage_and_with_recomputation():
    model = traced(BLOCKS)
    one = memory_of(model, Candidate(zero_stage=0), 64)
    assert one.buffers == 0 and one.activations > 64 * 6 * 160 * 4
    together = [memory_of(model, Candidate(zero_stage=stage, data=4), 4 * 64).together for stage in range(4)]
    assert together == sorted(together, reverse=True) and together[0] > one.together
    again = memory_of(model, Candidate(zero_stage=0, recompute=True), 4096)
    assert again.activations < 0.6 * memory_of(model, Candidate(zero_stage=0), 4096).activations
    assert model.block_pattern == "block"


def test_a_pipeline_holds_more_microbatches_with_gpipe():
    model = traced(BLOCKS)
    sizes = {"data": 1, "pipeline": 2, "microbatches": 8, "zero_stage": 0}
    gpipe, one_forward_one_backward = (memory_of(model, Candidate(schedule=name, **sizes), 2048) for name in ("gpipe", "1f1b"))
    assert gpipe.activations > 2 * one_forward_one_backward.activations


def chain(width, layers, activation):
    """Dense layers of one width."""
    hidden = [keras.layers.Dense(width, activation, name=f"hidden_{place}") for place in range(layers)]
    model = keras.Sequential([keras.Input((width,)), *hidden])
    model.compile("sgd", "mse")
    return model


def test_what_only_the_next_stage_reads_in_backward_a_stage_does_not_keep():
    """The gradient of a relu reads what it has returned, that of a bias nothing: its layer's output is the next one's input."""
    rows, width = 1024, 64
    output = 4 * rows * width
    for activation, of_last in (("relu", output), (None, 0)):
        profile = traced(functools.partial(chain, width, 4, activation)).profile(rows, is_one_graph=False)
        assert list(profile.kept[1:4]) == pytest.approx([output] * 3, rel=0.01)
        assert list(profile.kept[1:4] - profile.kept_for_later[1:4]) == pytest.approx([of_last] * 3, rel=0.01, abs=64)


def test_an_output_that_no_layer_reads_begins_backward():
    """Of two outputs, each one's loss. The gradient of the first is not kept: it does not need the second."""
    inputs = keras.Input((32,))
    x = keras.layers.Dense(512, "relu", name="hidden")(inputs)
    model = keras.Model(inputs, [keras.layers.Dense(1, name="first")(x), keras.layers.Dense(1, name="second")(x)])
    model.compile("sgd", ["mse", "mse"])
    found = trace(lambda: model)
    profile = found.profile(1024, is_one_graph=False)
    kept = {call.layer.name: kept for call, kept in zip(found.calls, profile.kept, strict=True) if call.layer is not None}
    assert kept["hidden"] == pytest.approx(4 * 1024 * 512, rel=0.01) and kept["first"] < 4 * 1024 * 512 / 16


def test_a_stage_adds_up_gradients_as_they_are_made():
    """Of many layers, on top of the sums and of what is kept: the gradients of two, not of all."""
    width, layers = 256, 16
    weights, output = 4 * (width * width + width), 4 * 8 * width
    memory = memory_of(traced(functools.partial(chain, width, layers, "relu")), Candidate(**PIPELINE, schedule="gpipe"), 32)
    kept = 4 * (layers // 2 + 1) * output
    assert memory.gradients == layers // 2 * weights
    assert memory.activations + memory.buffers == pytest.approx(kept + 2 * weights, abs=12 * output)


@pytest.mark.parametrize("activation", [None, "relu"])
def test_a_row_layer_that_is_given_its_input_whole_keeps_its_part(activation):
    """Unless another layer's backward reads it whole: the gradient of a relu does."""

    def build():
        hidden = keras.layers.Dense(1024, activation, name="hidden")
        model = keras.Sequential([keras.Input((16,)), hidden, keras.layers.Dense(8, name="row")])
        model.compile("sgd", "mse")
        return model

    found, rows, tensor = trace(build), 256, 4
    sharding = LayerSharding(found.model.layers[1], "row", ROW, gather_output=False, input_is_parallel=False)
    whole = found._buffers(rows)
    of_rank = on_tensor_rank(whole, found.traces[0], found._sweep(True), [sharding], tensor)
    begin = found.profile(rows).forward
    alive = [one.sizes[(one.births < begin) & (one.deaths >= begin)].max() for one in (whole, of_rank)]
    size = 4 * rows * 1024
    assert alive == [size, size // tensor if activation is None else size]


def test_tensor_ranks_divide_what_is_between_their_layers():
    model = traced(text)
    whole, divided = (memory_of(model, Candidate(zero_stage=0, tensor=size), 64).activations for size in (1, 2))
    assert 0.5 < divided / whole < 0.9


def test_batches_that_are_too_small_are_refused():
    with pytest.raises(ValueError, match="`batch_size` must be at least 4"):
        memory_of(traced(BLOCKS), Candidate(data=4), 3)
    with pytest.raises(ValueError, match="sharded over so many"):
        memory_of(traced(mlp), Candidate(tensor=64), 8)
