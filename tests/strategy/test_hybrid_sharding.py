"""`sharding_group_size`: one device's numbers, copies that are the same to the bit, and what travels where, to the byte."""

import functools
import math

import keras
import numpy as np
import pytest
import tensorflow as tf
from compressed_training import adam, batches, is_compressed, plan_of, sgd, sharded
from grids import exhaustive
from training import Trained, assert_same, custom_loop, fit, mlp, one_device, small, strategy_for, vectors

import tfdist
from tests import workers
from tests.parity import optimizer_cases
from tests.parity.comparison import assert_same_tree
from tests.strategy import worker_cases

pytestmark = pytest.mark.as_traced


def hybrid(zero_stage, group_size=2, check_drift_every=1, **settings):
    """Returns a strategy of 4 devices, with a host for each sharding group, whose copies are compared after every step."""
    of_model = settings.get("tensor_parallel_size", 1) * settings.get("pipeline_parallel_size", 1)
    settings = {"ranks_per_host": group_size * of_model, "check_drift_every": check_drift_every, **settings}
    return strategy_for(4, zero_stage, sharding_group_size=group_size, **settings)


@functools.cache
def on_one_device(name, loop):
    trained = optimizer_cases.train(name, loop, one_device())
    trained.model = trained.strategy = None
    return trained


def _cases():
    """Every row of the optimizers' table at every stage; in the default suite a step on shards and one of owners."""
    default = {("global_clipnorm", 3), ("adafactor", 2)}
    for place, (name, case) in enumerate(optimizer_cases.CASES.items()):
        for stage in range(4):
            loop = "fit" if case.scales_loss or (place + stage) % 2 else "custom_loop"
            yield (name, stage, loop) if (name, stage) in default else exhaustive(name, stage, loop)


@pytest.mark.parametrize(("name", "zero_stage", "loop"), list(_cases()))
def test_training_is_that_of_one_device(name, zero_stage, loop):
    strategy = hybrid(zero_stage)
    assert_same(optimizer_cases.train(name, loop, strategy), on_one_device(name, loop))
    assert 0 < strategy.last_plan.sent_bytes(between_hosts=True) < strategy.last_plan.sent_bytes()


@pytest.mark.exhaustive
@pytest.mark.parametrize("zero_stage", range(4))
@pytest.mark.parametrize("train", [fit, custom_loop])
def test_groups_of_one(zero_stage, train):
    """Each rank has all: as without sharding."""

    def rmsprop():
        return keras.optimizers.RMSprop(0.01, global_clipnorm=0.05, weight_decay=0.01)

    assert_same(train(hybrid(zero_stage, 1), mlp, rmsprop), train(one_device(), mlp, rmsprop))


@pytest.mark.exhaustive
@pytest.mark.parametrize("zero_stage", range(4))
def test_an_overflow_of_one_rank_is_seen_by_all(zero_stage):
    for accumulates in (False, True):
        trained = optimizer_cases.train_overflowing(hybrid(zero_stage), accumulates)
        assert_same(trained, optimizer_cases.train_overflowing(one_device(), accumulates))


@pytest.mark.exhaustive
@pytest.mark.parametrize("zero_stage", range(4))
def test_eager_runs(zero_stage):
    data = batches(rows=11)
    (ours, states), (expected, theirs) = (sharded(s, sgd, data, eagerly=True) for s in (hybrid(zero_stage), one_device()))
    np.testing.assert_allclose(ours, expected, rtol=1e-5)
    for mine, other in zip(states[-1], theirs[-1], strict=True):
        np.testing.assert_allclose(mine, other, rtol=0, atol=1e-5 * max(np.abs(other).max(initial=0.0), 1e-2))


@pytest.mark.parametrize("zero_stage", [3, *map(exhaustive, range(3))])
def test_bytes(zero_stage):
    assert_bytes(zero_stage)


def assert_bytes(zero_stage, compression=None, bytes_of=None):
    """Of n numbers of a rank's shard, hosts send each other 2 n (H-1)/H and nothing else; all else stays within a host.

    What is compressed they send row by row, each in `bytes_of` its numbers.
    """
    hosts, group_size = 2, 2
    strategy = hybrid(zero_stage, check_drift_every=0, gradient_compression=compression)
    model, plan = plan_of(strategy)
    between = within = 0
    for variable in model.trainable_variables:
        shard = -(-math.prod(variable.shape) // group_size)
        row = -(-shard // hosts)
        if compression is None:
            between += 4 * 2 * shard * (hosts - 1) / hosts
        else:
            between += 2 * (hosts - 1) * (bytes_of(row) if is_compressed(variable) else 4 * row)
        within += 4 * (group_size - 1) * shard
    assert plan.sent_bytes(between_hosts=True) == between
    records = plan.records[0]
    assert all("between_groups" in record.label for record in records if strategy.mesh.spans_hosts(record.ranks))
    gathers = [record for record in records if record.op == "all_gather" and "between_groups" not in record.label]
    assert gathers and not any(strategy.mesh.spans_hosts(record.ranks) for record in gathers)
    if zero_stage < 3:
        assert plan.sent_bytes() == between + 2 * within
    else:
        gathered = sum(record.sent_bytes for record in gathers)
        assert within <= gathered <= 2 * within and plan.sent_bytes() == between + within + gathered


@pytest.mark.exhaustive
def test_without_groups_all_bytes_are_between_hosts():
    """And where no other host is known, none: the counts tell where it pays."""
    counts = []
    for settings in ({"ranks_per_host": 2}, {}):
        plan = plan_of(strategy_for(4, 2, **settings))[1]
        counts.append((plan.sent_bytes(), plan.sent_bytes(between_hosts=True)))
    (sent, between), (same, none) = counts
    assert sent == between == same > 0 and none == 0


@pytest.mark.exhaustive
@pytest.mark.parametrize("policy", ["mixed_bfloat16", "float32"])
@pytest.mark.parametrize("zero_stage", range(4))
def test_gradients_travel_in_another_dtype(zero_stage, policy):
    """Both levels send what `reduce_dtype` says, and copies stay the same: the step compares them."""
    keras.config.set_dtype_policy(policy)
    try:
        exact, ours = (fit(hybrid(zero_stage, reduce_dtype=dtype), mlp, adam) for dtype in (None, "float16"))
    finally:
        keras.config.set_dtype_policy("float32")
    np.testing.assert_allclose(ours.losses, exact.losses, rtol=2e-2)
    assert ours.losses != exact.losses
    assert {r.dtype for r in ours.strategy.last_plan.records[0] if "between_groups" in r.label} == {"float16"}


def test_copies_that_differ_are_named():
    strategy = hybrid(3)
    with strategy.scope():
        model = keras.Sequential([keras.Input((3,)), keras.layers.Dense(5, name="head")])
        model.compile("sgd", "mse")
    x, y = np.ones((8, 3), "float32"), np.ones((8, 5), "float32")
    model.train_on_batch(x, y)
    component = model.layers[0].kernel.value.component(2)
    component.assign(component + 1e-6)
    with pytest.raises(tf.errors.InvalidArgumentError, match="several sharding groups.*head/kernel"):
        model.train_on_batch(x, y)


@pytest.mark.exhaustive
@pytest.mark.parametrize("kind", ["keras", "checkpoint"])
def test_what_is_saved_goes_on_in_other_groups(tmp_path, kind):
    def rmsprop():
        return keras.optimizers.RMSprop(0.01, momentum=0.9)

    def made(strategy):
        keras.backend.clear_session()
        keras.utils.set_random_seed(3)
        with strategy.scope():
            model = mlp()
            model.compile(rmsprop(), keras.losses.SparseCategoricalCrossentropy(from_logits=True))
            model.optimizer.build(model.trainable_variables)
        return model

    def steps(model):
        model.fit(*vectors(), batch_size=12, verbose=0, shuffle=False)

    def numbers(model):
        return [variable.numpy() for variable in (*model.variables, *model.optimizer.variables)]

    expected = made(one_device())
    steps(expected)
    steps(expected)
    saving = made(hybrid(3))
    steps(saving)
    path = tmp_path / ("model.keras" if kind == "keras" else "checkpoint")
    saving.save(path) if kind == "keras" else tf.train.Checkpoint(model=saving, optimizer=saving.optimizer).write(str(path))
    before = numbers(saving)
    for strategy in (hybrid(3, 1), hybrid(1), strategy_for(4, 3), strategy_for(3, 2)):
        if kind == "keras":
            with strategy.scope():
                model = keras.models.load_model(path, custom_objects={"ScaleAndShift": type(saving.layers[1])})
        else:
            model = made(strategy)
            tf.train.Checkpoint(model=model, optimizer=model.optimizer).read(str(path)).assert_consumed()
        assert_same_tree(numbers(model), before, rtol=0)
        steps(model)
        assert_same_tree(numbers(model), numbers(expected))


@pytest.mark.parametrize("zero_stage", [2, exhaustive(3), exhaustive(1), exhaustive(0)])
def test_the_report_of_memory_is_that_of_a_group(zero_stage):
    reports = []
    for strategy in (hybrid(zero_stage), strategy_for(2, zero_stage)):
        with strategy.scope():
            model = mlp()
            model.compile(keras.optimizers.Adam(), "mse")
            model.optimizer.build(model.trainable_variables)
        reports.append(tfdist.memory_report(model))
    ours, of_two = reports
    assert "sharding_group_size=2" in str(ours) and "sharding_group_size" not in str(of_two)
    assert [memory.total_bytes for memory in ours.devices] == [of_two.devices[0].total_bytes] * 4


@pytest.mark.parametrize(
    ("settings", "expected"),
    [
        ({"sharding_group_size": 3}, r"`sharding_group_size` must divide the number of data ranks, 4.*Sizes that work: 1, 2, 4"),
        ({"sharding_group_size": 4, "tensor_parallel_size": 2}, "must divide the number of data ranks, 2"),
        ({"sharding_group_size": 0}, "`sharding_group_size` must be a positive integer"),
        ({"ranks_per_host": 3}, "`ranks_per_host` must divide the number of devices, 4"),
        ({"ranks_per_host": "2"}, "`ranks_per_host` must be a positive integer"),
    ],
)
def test_what_cannot_be_is_refused_at_construction(settings, expected):
    with pytest.raises(ValueError, match=expected) as error:
        strategy_for(4, 3, **settings)
    for name, value in settings.items():
        assert name == "tensor_parallel_size" or f"{name}={value!r}" in str(error.value)


# workers, devices of each, the size of a group
@pytest.mark.exhaustive
@pytest.mark.timeout(500)
@pytest.mark.parametrize(("number", "devices", "group_size"), [(4, 1, 2), (2, 4, 4), (4, 2, 2)])
def test_workers(tmp_path, number, devices, group_size):
    """Hosts of two workers, and of one, which are given: here all are on one."""
    settings = {"sharding_group_size": group_size, "ranks_per_host": group_size, "check_drift_every": 2}
    loops = {0: ["custom_loop"], 1: ["fit"], 2: ["custom_loop"], 3: ["fit", "custom_loop"]}
    target = "tests.strategy.worker_cases:train_in_groups"
    with workers.job(tmp_path, number, target, loops, settings, devices_per_worker=devices) as job:
        expected = {loop.__name__: loop(one_device(), small, worker_cases.adam) for loop in (fit, custom_loop)}
        for found in job.results(450):
            assert len(found) == 5
            for (_, loop), (numbers, sent, between) in found.items():
                assert_same(Trained(**numbers), expected[loop])
                assert 0 < between < sent
