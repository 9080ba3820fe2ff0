"""`gradient_compression`: how many bytes a step sends, exactly; what travels exactly; what is refused; the same on all ranks."""

import math

import keras
import numpy as np
import pytest
import tensorflow as tf
from compressed_training import STEPS, adam, batches, build, exact_values, is_compressed, plan_of, sharded
from grids import exhaustive
from training import one_device, strategy_for

import tfdist
from tests import workers
from tests.devices import kind, names
from tfdist.collectives import NCCL, RING, Communicator
from tfdist.extensions.compression import NAMES, Compressor, Int4, Int8, TopK
from tfdist.extensions.compression.compressed import check_it_pays
from tfdist.extensions.compression.exact_shards import complete_copies
from tfdist.mesh import DeviceMesh

pytestmark = pytest.mark.as_traced

WORDS = "int32" if kind() == "CPU" else "float32"  # TensorFlow keeps int32 on the host


def records_of_gradients(plan):
    """Returns the messages of rank 0 in which gradients travel."""
    return [record for record in plan.records[0] if "reduce" in record.label]


def fresh(strategy, make, loss):
    """Returns a compiled model and its weights."""
    keras.backend.clear_session()
    keras.utils.set_random_seed(3)
    with strategy.scope():
        model = make()
        model.compile(keras.optimizers.SGD(1.0), loss)
    return model, [variable.numpy() for variable in model.trainable_variables]


def bytes_of_gradients(variables, compressor, size, zero_stage):
    """Returns what a rank sends of gradients: (N-1)/N of N rows of words, and at stage 0 (N-1) times the words of its sum."""
    sent = 0
    for variable in variables:
        length = -(-math.prod(variable.shape) // size)
        words = compressor.bytes_of(length) if is_compressed(variable) else 4 * length
        sent += (size - 1) * words * (2 if zero_stage == 0 else 1)
    return sent


@pytest.mark.parametrize(
    ("name", "zero_stage", "size"),
    [
        ("int8", 0, 2),
        ("int4", 2, 3),
        *(exhaustive(name, stage, size) for name in NAMES for stage in range(4) for size in (2, 3, 4)),
    ],
)
def test_bytes(name, zero_stage, size):
    model, plan = plan_of(strategy_for(size, zero_stage, gradient_compression=name))
    variables = model.trainable_variables
    gradients = records_of_gradients(plan)
    expected = bytes_of_gradients(variables, NAMES[name], size, zero_stage)
    assert sum(record.sent_bytes for record in gradients) == expected
    if zero_stage < 3:
        gathered = min(zero_stage, 1) * sum(4 * (size - 1) * -(-math.prod(x.shape) // size) for x in variables)
        assert plan.sent_bytes() == expected + gathered
    assert {record.op for record in gradients} == {"all_to_all", "all_gather"} if zero_stage == 0 else {"all_to_all"}
    assert sorted(map(repr, plan.gradients[0].values())) == sorted(
        repr(NAMES[name]) if is_compressed(variable) else "Exact()" for variable in variables
    )


@pytest.mark.parametrize("size", [2, exhaustive(4)])
def test_bytes_of_gathered_parameters(size):
    """Every gather, for forward or backward, has a code where it had a number, and a scale for 256 of them."""

    def make():
        return keras.Sequential([keras.Input((64,)), *(keras.layers.Dense(64, use_bias=False) for _ in range(3))])

    exact, ours = (plan_of(strategy_for(size, 3, parameter_compression=name), make)[1] for name in (None, "int8"))
    numbers = [record.shape[0] for record in exact.records[0] if record.op == "all_gather"]
    words = [record.input_bytes for record in ours.records[0] if record.op == "all_gather"]
    assert words == [number // 256 * (256 + 4) for number in numbers] and sum(numbers) > 3 * 64 * 64 / size
    assert set(ours.parameters[0].values()) == {Int8()} and len(ours.parameters[0]) == 3
    assert not ours.gradients[0] and not exact.parameters[0]


@pytest.mark.parametrize(
    ("name", "zero_stage", "size"),
    [
        ("int4", 2, 3),
        *(exhaustive(name, stage, size) for name in ("int8", "bfloat16", "top_k") for stage in (1, 2) for size in (2, 4)),
    ],
)
def test_bytes_of_differences(name, zero_stage, size):
    """Stages 1 and 2 send what a step has changed: (N-1) times the words of a shard, and shards of small variables."""
    model, plan = plan_of(strategy_for(size, zero_stage, parameter_compression=name, gradient_compression="int4"))
    variables = model.trainable_variables
    gradients = bytes_of_gradients(variables, Int4(), size, zero_stage)
    differences = bytes_of_gradients(variables, NAMES[name], size, zero_stage)
    assert plan.sent_bytes() == gradients + differences
    assert sorted(map(repr, plan.parameters[0].values())) == sorted(
        repr(NAMES[name]) if is_compressed(variable) else "Exact()" for variable in variables
    )


def test_bytes_of_a_parameter():
    """Of the largest kind of layer; up to (N-1)/N, stages 1 and 2 send 4 bytes of an exact parameter more, stage 3 8."""

    def wide():
        return keras.Sequential([keras.Input((512,)), keras.layers.Dense(1024, use_bias=False)])

    for compressor, each in ((Int8(), 1.015625), (Int4(), 0.5625), (TopK(), 0.0600586 + 1.015625)):
        _, plan = plan_of(strategy_for(2, 2, gradient_compression=compressor), wide)
        np.testing.assert_allclose(plan.sent_bytes() / (512 * 1024 / 2), each + 4, rtol=1e-6)
    for compressor, each in ((Int8(), 2.03125), (Int4(), 1.125)):
        _, plan = plan_of(strategy_for(2, 2, gradient_compression=compressor, parameter_compression=compressor), wide)
        assert plan.sent_bytes() / (512 * 1024 / 2) == each


@pytest.mark.parametrize("zero_stage", [exhaustive(0), 2, exhaustive(3)])
def test_reduce_dtype_bfloat16_is_another_name(zero_stage):
    """The same messages; given twice, as well. It is one setting: what replaces it turns it off."""
    given = [{"gradient_compression": "bfloat16"}, {"reduce_dtype": "bfloat16"}]
    given.append(given[0] | given[1])
    first, *others = [plan_of(strategy_for(2, zero_stage, **settings))[1] for settings in given]
    for plan in others:
        of_one, of_other = ([(x.op, x.shape, x.dtype) for x in one.records[0]] for one in (plan, first))
        assert of_one == of_other and plan.sent_bytes() == first.sent_bytes()
    config = tfdist.ShardingConfig(reduce_dtype="bfloat16")
    strategy = tfdist.ShardedStrategy(names(2), config=config, reduce_dtype=None)
    assert strategy.sharding_config.compressor is None


@pytest.mark.exhaustive
def test_a_group_of_one_compresses_nothing():
    data = batches()
    alone, exact = (sharded(strategy_for(1, 2, gradient_compression=name), adam, data) for name in ("int4", None))
    for one, other in zip(alone[1][-1], exact[1][-1], strict=True):
        np.testing.assert_array_equal(one, other)


@pytest.mark.parametrize(
    ("sizes", "zero_stage", "settings"),
    [
        *(exhaustive({"tensor_parallel_size": 2}, stage, {}) for stage in (0, 2, 3)),
        *(exhaustive({"pipeline_parallel_size": 2}, stage, {}) for stage in range(3)),
        ({"pipeline_parallel_size": 2}, 3, {}),
        exhaustive({"pipeline_parallel_size": 2}, 3, {"reshard_after_microbatch": True}),
    ],
    ids=str,
)
def test_other_axes_travel_exactly(sizes, zero_stage, settings):
    """The messages of tensor and pipeline ranks are the same ones; gradients are one device's, but for the error of codes."""

    def make():
        wide = tfdist.layers.ColumnParallelDense(256, "tanh", gather_output=True) if "tensor" in str(sizes) else None
        first, second = wide or keras.layers.Dense(256, "tanh"), keras.layers.Dense(64)
        model = keras.Sequential([keras.Input((64,)), first, second, keras.layers.Dense(7)])
        return tfdist.PipelineModel(model, num_microbatches=2, **settings) if "pipeline" in str(sizes) else model

    def trained(name):
        of_parameters = name if zero_stage else None
        how = {"gradient_compression": name, "parameter_compression": of_parameters}
        strategy = strategy_for(4, zero_stage, **how, **sizes)
        rng = np.random.default_rng(5)
        loss = keras.losses.SparseCategoricalCrossentropy(from_logits=True)
        model, before = fresh(strategy, make, loss)
        model.train_on_batch(rng.normal(size=(8, 64)).astype("float32"), rng.integers(0, 7, 8))
        data, records = strategy.mesh.group_ranks("data", 0), strategy.last_plan.records[0]
        changes = [variable.numpy() - old for variable, old in zip(model.trainable_variables, before, strict=True)]
        return [x for x in records if x.ranks != data], [x for x in records if x.ranks == data], changes

    (expected, numbers, exact), (found, encoded, ours) = trained(None), trained("int8")
    words = [record for record in encoded if record not in numbers]
    assert found == expected
    assert {(record.op, record.dtype) for record in words} == {("all_to_all", WORDS), ("all_gather", WORDS)}
    for one, other in zip(ours, exact, strict=True):
        np.testing.assert_allclose(one, other, rtol=0, atol=0.05 * np.abs(other).max())


@pytest.mark.exhaustive
def test_stages_and_sizes_of_messages_change_no_bit():
    found = []
    for stage, settings in ((2, {}), (2, {"bucket_bytes": 1}), (1, {})):
        found.append(sharded(strategy_for(2, stage, gradient_compression="top_k", **settings), adam, batches())[1][-1])
    for other in found[1:]:
        for one, theirs in zip(found[0], other, strict=True):
            np.testing.assert_array_equal(one, theirs)


@pytest.mark.exhaustive
@pytest.mark.parametrize("zero_stage", range(3))
def test_ranks_hold_the_same_weights(zero_stage):
    strategy = strategy_for(4, zero_stage, gradient_compression="int4")
    keras.utils.set_random_seed(3)
    with strategy.scope():
        model = build()
        model.compile("adam", keras.losses.SparseCategoricalCrossentropy(from_logits=True))
    for features, labels in batches():
        model.train_on_batch(features, labels)
    for variable in model.trainable_variables:
        first, *others = (value.numpy() for value in variable.value.values)
        for other in others:
            np.testing.assert_array_equal(first, other)


@pytest.mark.exhaustive
@pytest.mark.parametrize("zero_stage", range(4))
@pytest.mark.parametrize("rows", [3, 11])
def test_rows_are_weights_and_a_rank_may_have_none(zero_stage, rows):
    """In a step of Keras's trainer. The gradient of a large layer is one device's, but for the error of codes."""
    features, labels = (part[:rows] for part in batches()[0])

    def trained(strategy):
        model, before = fresh(strategy, build, keras.losses.SparseCategoricalCrossentropy(from_logits=True))
        model.train_on_batch(features, labels)
        return [variable.numpy() - old for variable, old in zip(model.trainable_variables, before, strict=True)]

    exact = trained(one_device())
    for ours, theirs in zip(trained(strategy_for(4, zero_stage, gradient_compression="int8")), exact, strict=True):
        assert 0 < np.abs(theirs).max() < np.inf
        np.testing.assert_allclose(ours, theirs, rtol=0, atol=0.02 * np.abs(theirs).max())


# Over workers
def settings_of(stage):
    of_parameters = {0: None, 1: "int8", 2: "int4", 3: "int8"}[stage]
    return {"zero_stage": stage, "gradient_compression": "int4", "parameter_compression": of_parameters}


def train_as_worker():
    """Returns what training gives over memory that the workers share, and over TensorFlow's ring; of copies, completed, too."""
    found = {}

    def look(model):
        expected = exact_values(model)
        if len(looks := found.setdefault("completed", [])) % (STEPS + 1) == STEPS:  # after the last step
            complete_copies(model.trainable_variables)
            for variable, exact in zip(model.trainable_variables, expected, strict=True):
                assert exact is None or all(np.array_equal(copy.numpy(), exact) for copy in variable.value.values)
        looks.append(sum(exact is not None for exact in expected))

    for way in ("AUTO", "RING"):
        options = tf.distribute.experimental.CommunicationOptions(
            implementation=getattr(tf.distribute.experimental.CommunicationImplementation, way)
        )
        for stage in range(4):
            strategy = tfdist.MultiWorkerShardedStrategy(communication_options=options, **settings_of(stage))
            found[way, stage] = sharded(strategy, adam, batches(), look=look)[1][-1]
    assert found.pop("completed") == ([0] * 4 + [3] * 8 + [0] * 4) * 2
    return found


@pytest.mark.exhaustive
@pytest.mark.timeout(300)
def test_two_workers_get_the_bits_of_one_process(tmp_path):
    with workers.job(tmp_path, 2, "tests.strategy.test_compression:train_as_worker") as job:
        expected = {stage: sharded(strategy_for(2, **settings_of(stage)), adam, batches())[1][-1] for stage in range(4)}
        for found in job.results(280):
            assert len(found) == 8
            for (way, stage), state in found.items():
                for ours, theirs in zip(state, expected[stage], strict=True):
                    np.testing.assert_array_equal(ours, theirs, err_msg=f"{way} {stage}")


# What is refused
@pytest.mark.parametrize(
    ("settings", "words"),
    [
        ({"gradient_compression": "int2"}, ["`gradient_compression`", "'int2'", '"int8"']),
        ({"gradient_compression": Int8}, ["`gradient_compression`", "`Int8()`"]),
        ({"gradient_compression": True}, ["`gradient_compression`", "True"]),
        ({"zero_stage": 3, "parameter_compression": "int4"}, ["`parameter_compression`", "Int4", '"int8"', "stages 1 and 2"]),
        ({"zero_stage": 3, "parameter_compression": TopK()}, ["`parameter_compression`", "TopK"]),
        ({"zero_stage": 0, "parameter_compression": "int8"}, ["`parameter_compression`", "zero_stage=0", "`zero_stage=1`"]),
        ({"zero_stage": 3, "parameter_compression": "int2"}, ["`parameter_compression`", "int2"]),
        ({"gradient_compression": "int8", "reduce_dtype": "bfloat16"}, ["`gradient_compression`", "`reduce_dtype`", "Leave one"]),
        ({"gradient_compression": "bfloat16", "reduce_dtype": "float16"}, ["`gradient_compression`", "float16", "Leave one"]),
    ],
)
def test_settings_that_are_refused(settings, words):
    for make in (tfdist.ShardingConfig, lambda zero_stage=2, **settings: strategy_for(2, zero_stage, **settings)):
        with pytest.raises(ValueError) as caught:  # noqa: PT011
            make(**settings)
        for word in words:
            assert word in str(caught.value)


@pytest.mark.parametrize("zero_stage", [1, 3])
def test_parameters_that_are_refused(zero_stage):
    with strategy_for(2, zero_stage, gradient_compression="int8").scope():
        with pytest.raises(ValueError, match="`gradient_compression`.*float64"):
            keras.Variable(np.ones((80, 80)), dtype="float64", name="wide")
        keras.Variable(np.ones((3,)), dtype="float64", trainable=False)
        tf.Variable(0, dtype=tf.int64)


def test_a_refusal_names_the_setting_that_was_given():
    with strategy_for(2, 2, reduce_dtype="bfloat16").scope(), pytest.raises(ValueError, match="`reduce_dtype`.*float64"):
        keras.Variable(np.ones((80, 80)), dtype="float64")


def test_a_compressor_that_does_not_keep_its_word():
    class Wrong(Compressor):
        def encode(self, x):
            return tf.bitcast(x, tf.int32)[:, 1:]

        def decode(self, words, n):
            return tf.bitcast(words, tf.float32)

        def bytes_of(self, n):
            return 4 * n

    with pytest.raises(ValueError, match="`Wrong.encode` must return int32"):
        plan_of(strategy_for(2, 2, gradient_compression=Wrong()))


@pytest.mark.parametrize(
    ("transport", "size", "compressor", "is_refused"),
    [
        (RING, 11, Int8(), False),
        (RING, 12, Int8(), True),
        (NCCL, 3, Int8(), False),
        (NCCL, 4, Int8(), True),
        (NCCL, 7, Int4(), False),
        (NCCL, 8, Int4(), True),
        (NCCL, 12, TopK(rest=None), False),
    ],
)
def test_where_gathering_would_send_more(transport, size, compressor, is_refused):
    """NCCL has no all-to-all between processes, and the ring none of more than eleven ranks."""
    communicator = Communicator(DeviceMesh(tuple(f"/device:CPU:{rank}" for rank in range(size))), transport, [0])
    if not is_refused:
        check_it_pays(communicator, compressor, {"gradient_compression": compressor})
        return
    with pytest.raises(NotImplementedError, match=f"no all-to-all.*{size} ranks"):
        check_it_pays(communicator, compressor, {"gradient_compression": compressor})


@pytest.mark.exhaustive
def test_without_an_all_to_all_the_sum_is_the_same(monkeypatch):
    """All gather the words of all."""
    data = batches()
    _, expected = sharded(strategy_for(3, 2, gradient_compression="int8"), adam, data)
    monkeypatch.setattr(type(RING), "exchanges", lambda *_: False)
    strategy = strategy_for(3, 2, gradient_compression="int8")
    _, states = sharded(strategy, adam, data)
    for ours, theirs in zip(states[-1], expected[-1], strict=True):
        np.testing.assert_array_equal(ours, theirs)
    assert [record.op for record in strategy.last_plan.records[0] if record.dtype == "int32"] == ["all_gather"]
