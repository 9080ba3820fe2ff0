"""The host is held back behind the device, and collectives begin in no order among each other: as over NCCL. Between processes
they stand on a chain.

Here TensorFlow's ring does so, on logical CPUs, where numbers can be compared.
"""

import collections
import itertools

import keras
import numpy as np
import pytest
import tensorflow as tf

import tfdist
from tests import training
from tfdist.collectives import RING
from tfdist.extensions.ordering import host_run_ahead
from tfdist.extensions.pipeline.stages import stage_functions
from tfdist.graphs import tape

GROUPS, BUCKETS = 5, 7  # of the model's parameters, and of its gradients, in the sizes below


@pytest.fixture
def as_over_nccl(monkeypatch):
    monkeypatch.setattr(type(RING), "has_own_turns", True)
    monkeypatch.setattr(type(RING), "waits_for_queue", True)


@pytest.fixture
def as_between_processes(monkeypatch):
    monkeypatch.setattr(type(RING), "waits_for_queue", True)


@pytest.fixture
def holds(monkeypatch):
    """Returns, per call, the names of what is held back and of what it waits for."""
    found = []
    held_back = host_run_ahead.run_when_done

    def note(held, operations, program, kind):
        found.append(([one.name for one in held], [one.name for one in operations], kind))
        held_back(held, operations, program, kind)

    monkeypatch.setattr(host_run_ahead, "run_when_done", note)
    return found


def fit_and_compare(zero_stage, model=None, devices=2, **settings):
    """Trains on several devices and compares with one, two steps in each call of TensorFlow; returns the strategy."""
    model = model or dense_model
    expected = training.fit(training.one_device(), model, keras.optimizers.Adam, epochs=2)
    expected.losses = expected.losses[1::2]
    strategy = training.strategy_for(devices, zero_stage, bucket_bytes=600, group_bytes=600, **settings)
    actual = training.fit(strategy, model, keras.optimizers.Adam, epochs=2, steps_per_execution=2)
    training.assert_same(actual, expected, rtol=1e-4)
    return strategy


def dense_model():
    widths = (17, 13, 11, 9)
    layers = [keras.layers.Dense(width, activation="tanh", name=f"hidden_{width}") for width in widths]
    return keras.Sequential([keras.Input((training.FEATURES,)), *layers, keras.layers.Dense(training.CLASSES)])


def has_collective(names):
    return any(name.rpartition("/")[2].startswith("Collective") for name in names)


PAIRS = 4


def tensor_parallel_model():
    """Pairs of tensor-parallel layers between two whole ones: each pair but the first sends activations in backward, too."""
    layers = [keras.layers.Dense(9, name="stem")]
    for place in range(PAIRS):
        layers += [
            tfdist.layers.ColumnParallelDense(14, activation="tanh", gather_output=False, name=f"column_{place}"),
            tfdist.layers.RowParallelDense(9, input_is_parallel=True, name=f"row_{place}"),
        ]
    return keras.Sequential([keras.Input((training.FEATURES,)), *layers, keras.layers.Dense(training.CLASSES, name="head")])


@pytest.mark.parametrize(
    ("zero_stage", "prefetch"),
    [(3, 1), *(pytest.param(*case, marks=pytest.mark.exhaustive) for case in ((0, 1), (1, 1), (2, 1), (3, 0), (3, 2)))],
)
def test_activations_go_first_in_backward_and_gradients_of_weights_behind_them(as_over_nccl, holds, zero_stage, prefetch):
    strategy = fit_and_compare(zero_stage, tensor_parallel_model, 4, tensor_parallel_size=2, prefetch=prefetch)
    ranks = strategy.mesh.world_size
    held = [(names, after) for names, after, kind in holds if kind == "activations" and names]
    assert len(held) == ranks * PAIRS
    for names, after in held:  # those of the kernels of its pair, and of what has no part in what is sent
        assert any("MatMul" in name for name in names) and not any("Collective" in name for name in names)
        assert all("gradient_tape" in name for name in names), (names, after)
    records = strategy.last_plan.records[0]
    if zero_stage == 3 and prefetch:
        # Nothing of stage 3 stands before activations any more: all is emitted at once, and a gather knows what comes later.
        sent = [record.label for record in records]
        last = max(place for place, label in enumerate(sent) if label.endswith("copy_to/gradient"))
        backward = [place for place, label in enumerate(sent) if label.endswith("/backward")]
        assert backward and last < min(backward)
        marks = strategy.extended.communicator._marks
        assert len(marks["behind activations"]) == ranks
        assert not any(kind == "behind activations" for _, _, kind in holds)  # no product waits for those


@pytest.mark.exhaustive
@pytest.mark.parametrize("zero_stage", [0, 3])
def test_what_is_computed_again_has_its_place_among_activations(as_over_nccl, holds, zero_stage):
    """Between two collectives several layers are computed again, each when backward has read the one before: what only gradients
    of weights read, too. Held back behind the second collective, which needs all of them, they would wait for each other."""

    class Again(keras.layers.Layer):
        def __init__(self, width, **settings):
            super().__init__(**settings)
            self.first = keras.layers.Dense(width, activation="tanh")
            self.second = keras.layers.Dense(width, activation="tanh")

        def call(self, x):
            return self.second(self.first(x))

    def model():
        def pair(name):
            column = tfdist.layers.ColumnParallelDense(14, activation="tanh", gather_output=False, name=f"column_{name}")
            return [column, tfdist.layers.RowParallelDense(9, input_is_parallel=True, name=f"row_{name}")]

        inner = [Again(9, name=f"again_{place}") for place in range(3)]
        parts = [keras.layers.Dense(9, name="stem"), *pair("first"), *inner, *pair("last"), keras.layers.Dense(training.CLASSES)]
        made = keras.Sequential([keras.Input((training.FEATURES,)), *parts])
        return tfdist.recompute(made, "again") if tf.distribute.has_strategy() else made

    fit_and_compare(zero_stage, model, 4, tensor_parallel_size=2)
    assert [names for names, _, kind in holds if kind == "activations" and any("again" in name for name in names)]


@pytest.mark.exhaustive
@pytest.mark.parametrize(
    ("zero_stage", "schedule"), [(0, "1f1b"), (1, "gpipe"), (2, "zero_bubble"), (3, "interleaved"), (3, "1f1b")]
)
def test_in_a_pipeline_a_call_waits_for_the_message_before(as_over_nccl, holds, monkeypatch, zero_stage, schedule):
    """Of the last microbatch: nothing else of a gradient is left to hide behind. And the first one's forward is in runs, which
    wait for the gathers of their own layers."""
    runs, in_runs = [], stage_functions._Functions.forward_in_runs

    def note(functions, has_backward):
        runs.append(found := in_runs(functions, has_backward))
        return found

    monkeypatch.setattr(stage_functions._Functions, "forward_in_runs", note)

    def model():
        stages = 2 if schedule == "interleaved" else 1
        return tfdist.PipelineModel(dense_model(), num_microbatches=4, schedule=schedule, stages_per_rank=stages)

    fit_and_compare(zero_stage, model, 4, pipeline_parallel_size=2)
    lead = [(names, after) for names, after, kind in holds if kind == "lead" and names]
    assert lead
    for names, after in lead:
        assert all("PartitionedCall" in name for name in (*names, *after))
        assert any("PP/" in name and "3/" in name for name in names)
    stages = 4 if schedule == "interleaved" else 2
    assert len(runs) == (2 * stages if zero_stage == 3 else 0)  # two ranks have each stage
    assert all(2 <= len(parts) <= 4 for parts in runs if stages == 2)


@pytest.mark.parametrize("zero_stage", [3, *(pytest.param(stage, marks=pytest.mark.exhaustive) for stage in range(3))])
def test_on_a_chain_gradients_stand_among_activations(as_between_processes, holds, zero_stage):
    """Behind those of their own layers. At stages 0 to 2 they stood behind all of backward. At stage 3 gathers stand there, too:
    held back behind what needs them, as they were, they closed a circle, and the step failed."""
    strategy = fit_and_compare(zero_stage, tensor_parallel_model, 4, tensor_parallel_size=2)
    labels = [record.label for record in strategy.last_plan.records[0]]
    activations = [place for place, label in enumerate(labels) if label.endswith("copy_to/gradient")]
    assert len(activations) == PAIRS
    gradients = [place for place, label in enumerate(labels) if label.startswith(("all_reduce/", "reduce_scatter/"))]
    assert activations[0] < gradients[0] and all(
        any(before < place < after for place in gradients) for before, after in itertools.pairwise(activations)
    )
    held = [name for names, _, kind in holds if kind == "lead" for name in names]
    assert held and not any("unshard" in name or "Collective" in name for name in held)
    # What reads activations is queued behind the collective that follows theirs: else this waited for it. The first of all waits
    # for the sums of the loss.
    readers = [names for names, after, kind in holds if kind == "lead" and has_collective(after)]
    products = [names for names in readers if any("gradient_tape" in name and "MatMul" in name for name in names)]
    assert len(products) >= strategy.mesh.world_size * (PAIRS - 1)
    assert sum(has_collective(after) for _, after, kind in holds if kind == "activations") == strategy.mesh.world_size


@pytest.mark.parametrize("prefetch", [1, *(pytest.param(prefetch, marks=pytest.mark.exhaustive) for prefetch in (0, 2))])
def test_on_a_chain_gathers_of_forward_stand_before_activations_that_they_need_not(as_between_processes, holds, prefetch):
    """A group's gather begins when the products before last are done, and passes behind those of the last group, which read
    activations. It stood behind these products' own, and nothing passed behind it."""
    strategy = fit_and_compare(3, tensor_parallel_model, 4, tensor_parallel_size=2, prefetch=prefetch)
    labels = [record.label for record in strategy.last_plan.records[0]]
    forward = [label for label in labels[: labels.index("loss/divisor")] if label.endswith("/reduce_from") or "unshard/" in label]
    gathers = [f"unshard/{name}" for name in ("stem", *(f"column_{place}" for place in range(PAIRS)), "head")]
    activations = [f"row_{place}/reduce_from" for place in range(PAIRS)]
    expected = gathers[: prefetch + 1]
    for place, gather in enumerate(gathers[prefetch + 1 :]):  # of group `place + prefetch + 1`, behind the activations of `place`
        expected += [*activations[place - 1 : place], gather] if place else [gather]
    assert forward == [*expected, *activations[len(gathers) - prefetch - 2 :]]
    readers = [after for _, after, kind in holds if kind == "forward" and has_collective(after)]
    assert len(readers) >= (strategy.mesh.world_size * PAIRS if prefetch else 0)


def test_on_a_chain_backward_may_begin_with_what_activations_need_not(as_between_processes):
    """The penalty of what LoRA adds to is held back behind them, and reads parameters first. The step could not be traced."""

    def model():
        stem = keras.layers.Dense(9, "tanh")
        head = tfdist.layers.ColumnParallelDense(training.CLASSES + 1, kernel_regularizer="l2")
        made = keras.Sequential([keras.Input((training.FEATURES,)), stem, head])
        for layer in made.layers:
            layer.enable_lora(2)
            layer.lora_kernel_b.assign(np.full(layer.lora_kernel_b.shape, 0.1))
        return made

    fit_and_compare(3, model, 4, tensor_parallel_size=2)


@pytest.mark.parametrize(
    ("zero_stage", "schedule"),
    [
        (3, "1f1b"),
        *(
            pytest.param(*case, marks=pytest.mark.exhaustive)
            for case in ((0, "1f1b"), (1, "gpipe"), (2, "zero_bubble"), (2, "interleaved"), (3, "interleaved"))
        ),
    ],
)
def test_in_a_pipeline_on_a_chain_calls_wait_too(as_between_processes, holds, zero_stage, schedule):
    """In backward for the message before, in the first microbatch's forward for their own gathers. Sums of the loss stand behind
    those of gradients, which had waited for them."""

    def model():
        stages = 2 if schedule == "interleaved" else 1
        return tfdist.PipelineModel(dense_model(), num_microbatches=4, schedule=schedule, stages_per_rank=stages)

    strategy = fit_and_compare(zero_stage, model, 4, pipeline_parallel_size=2)
    assert any("PartitionedCall" in name for names, _, kind in holds if kind == "lead" for name in names)
    runs = [(names, after) for names, after, kind in holds if kind == "forward" and names]
    assert bool(runs) == (zero_stage == 3)
    for names, after in runs:
        assert len(names) == 1 and "PartitionedCall" in names[0] and any("unshard" in name for name in after)
    for records in strategy.last_plan.records:
        labels = [record.label for record in records]
        reduced = [place for place, label in enumerate(labels) if label.startswith(("all_reduce/", "reduce_scatter/"))]
        assert reduced and max(reduced) < labels.index("pipe/loss") < labels.index("loss/value")


@pytest.mark.parametrize(
    "schedule", ["1f1b", *(pytest.param(one, marks=pytest.mark.exhaustive) for one in ("gpipe", "zero_bubble"))]
)
def test_in_a_pipeline_actions_are_queued_one_by_one(as_over_nccl, monkeypatch, schedule):
    """A message waits for what both GPUs have queued. So an action waits for the one before it, by way of the host, and gradients
    of weights for those of inputs."""
    marks, on_device = [], host_run_ahead.on_device

    def note(program, operations, kind):
        marks.append((on_device(program, operations, kind), list(operations), kind))
        return marks[-1][0]

    monkeypatch.setattr(host_run_ahead, "on_device", note)
    fit_and_compare(
        0, lambda: tfdist.PipelineModel(dense_model(), num_microbatches=4, schedule=schedule), 4, pipeline_parallel_size=2
    )
    graph = marks[-1][0].graph
    of_actions = {mark for mark, _, kind in marks if kind == "actions" and mark.graph is graph}
    calls = collections.defaultdict(list)  # by rank and action
    for operation in graph.get_operations():
        if operation.type in tape.CALLS and "PP/" in operation.name:
            action = operation.name.partition("PP/")[2].partition("/")[0]
            calls[operation.device, action].append(operation)
    assert len(calls) == 2 * 2 * 4 * 2
    not_held = [
        action
        for (_, action), ones in calls.items()
        if not of_actions.intersection(one for call in ones for one in call.control_inputs)
    ]
    assert sorted(not_held) == ["0F0", "0F0", "1F0", "1F0"]
    if schedule != "zero_bubble":  # whose actions these are
        of_inputs, *of_weights = calls[next(key for key in calls if key[1] == "1B0")]
        assert of_weights
        for call in of_weights:
            ended = {one for mark in of_actions.intersection(call.control_inputs) for one in mark.control_inputs}
            assert any(of_inputs in (one, *one.control_inputs) for one in ended)


@pytest.mark.parametrize("zero_stage", [2, *(pytest.param(stage, marks=pytest.mark.exhaustive) for stage in (0, 1, 3))])
def test_numbers_are_those_of_one_device(as_over_nccl, holds, zero_stage):
    strategy = fit_and_compare(zero_stage)
    assert any("gradient_tape" in name for held, _, _ in holds for name in held)
    # One chain for each key, and none for all: else each collective would begin when the one before it is over.
    keys = strategy.extended.communicator._turns
    assert len(keys) >= 10 and {rank for rank, _ in keys} == {0, 1}


@pytest.mark.parametrize(
    ("zero_stage", "prefetch"),
    [(3, 1), *(pytest.param(*case, marks=pytest.mark.exhaustive) for case in ((0, 1), (1, 1), (2, 1), (3, 0), (3, 2)))],
)
def test_on_a_chain_products_are_queued_in_parts(as_between_processes, holds, zero_stage, prefetch):
    """A part of backward for each collective behind it; in forward, what reads a gather when that is over."""
    strategy = fit_and_compare(zero_stage, prefetch=prefetch)
    assert not strategy.extended.communicator._turns
    sent = [record.op for record in strategy.last_plan.records[0] if record.sent_bytes > 64]
    assert zero_stage not in (1, 2) or sent.index("all_gather") < BUCKETS - 1, sent  # the first new parameters between reductions
    kinds = collections.Counter(kind for _, _, kind in holds)
    ranks, gaps = 2, (GROUPS if zero_stage == 3 else BUCKETS) - 1  # between the messages of backward
    if zero_stage == 0:
        assert kinds["lead"] == ranks * gaps
    else:  # what a single operation computes has no two parts
        assert ranks * gaps < kinds["lead"] <= ranks * gaps * 2
    assert kinds["forward"] == (ranks * GROUPS if zero_stage == 3 and prefetch else 0)
    # The last is kept, and nobody asks for the gradient of what the first reads.
    assert kinds["gathers of backward"] == (ranks * (GROUPS - 2) if zero_stage == 3 else 0)


def test_in_a_vectorized_map_nothing_is_held_back(as_over_nccl):
    """TensorFlow makes all rows of it at once, and has no way to do so with what is done on the host."""
    strategy = training.strategy_for(2, 3, group_bytes=600)
    with strategy.scope():
        built = dense_model()
    rows = tf.ones([3, training.FEATURES])

    def each() -> tf.Tensor:
        return tf.vectorized_map(lambda row: tf.reduce_sum(built(row[tf.newaxis])), rows)

    found = tf.function(lambda: strategy.run(each), autograph=False)()
    expected = tf.reduce_sum(built(rows), axis=1)
    for local in strategy.experimental_local_results(found):
        np.testing.assert_allclose(local, expected, rtol=1e-5)


def test_nothing_is_held_back_where_collectives_wait_for_their_input_alone(holds):
    training.fit(training.strategy_for(2, 2, bucket_bytes=600), dense_model, keras.optimizers.Adam)
    assert holds == []
