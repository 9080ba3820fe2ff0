"""Error feedback: each step is that of one device with what NumPy says the ranks decode, and so is what they keep."""

import functools
import io
import math

import keras
import numpy as np
import numpy_compressors as model_of
import pytest
import tensorflow as tf
from compressed_training import (
    FEATURES,
    STEPS,
    adam,
    assert_begins_again,
    assert_each_step_is,
    assert_go_on_alike,
    batches,
    build,
    by_keras,
    is_compressed,
    load_in,
    residuals,
    sgd,
    sharded,
    steps_of,
    trained,
)
from grids import exhaustive
from keras.src.saving import saving_lib
from training import one_device, strategy_for

import tfdist
from tests import workers
from tfdist.collectives import RING
from tfdist.extensions.compression import BFloat16, Compressor, Exact, Int8, TopK

pytestmark = pytest.mark.as_traced

KERNELS = (0, 2, 4)  # places of those that are compressed
CODECS = {
    "top_k": (TopK(0.05, None, error_feedback=True), functools.partial(model_of.top_k, fraction=0.05, rest=None), model_of.int8),
    "top_k-int4-exactly": (
        TopK(0.05, "int4", Exact()),
        functools.partial(model_of.top_k, fraction=0.05, rest=model_of.int4),
        np.array,
    ),
    "top_k-bfloat16": (
        TopK(0.1, None, BFloat16()),
        functools.partial(model_of.top_k, fraction=0.1, rest=None),
        model_of.as_bfloat16,
    ),
}


def check(codec, stage, size, optimizer=adam, data=None, accumulates=0, eagerly=False, **settings):
    """Compares steps, and what ranks keep after each, with those of one device; returns the states and what was kept."""
    setting, decoded, kept_as = CODECS[codec]
    data, kept = batches() if data is None else data, []
    strategy = strategy_for(size, stage, gradient_compression=setting, use_kernels=False, **settings)
    trained = sharded(strategy, optimizer, data, eagerly, look=lambda model: kept.append(residuals(model)))
    assert tuple(place for place, one in enumerate(kept[0]) if one is not None) == KERNELS
    assert not any(np.any(numbers) for place in KERNELS for numbers in kept[0][place])
    how = {"group_size": settings.get("sharding_group_size"), "kept": kept, "kept_as": kept_as}
    assert_each_step_is(trained, decoded, size, stage, optimizer, data, accumulates, **how)
    return trained[1], kept


GRID = [
    ("top_k", 3, 2),
    ("top_k", 0, 2),
    *(exhaustive("top_k", stage, 4) for stage in range(4)),
    *(exhaustive(codec, stage, 2) for codec in CODECS for stage in range(4)),
]


@pytest.mark.parametrize(("codec", "stage", "size"), GRID)
def test_what_is_lost_is_added_to_the_next_gradient(codec, stage, size):
    check(codec, stage, size)


@pytest.mark.exhaustive
@pytest.mark.parametrize("stage", range(4))
def test_sharding_groups_keep_what_their_sums_lose(stage):
    check("top_k", stage, 4, sharding_group_size=2)


@pytest.mark.parametrize(
    ("stage", "optimizer", "accumulates"),
    [
        exhaustive(0, lambda: sgd(gradient_accumulation_steps=2), 2),
        exhaustive(1, lambda: sgd(gradient_accumulation_steps=2, global_clipnorm=0.5), 2),
        exhaustive(2, lambda: sgd(gradient_accumulation_steps=2), 0),
        exhaustive(3, lambda: sgd(gradient_accumulation_steps=2), 0),
        *(exhaustive(stage, lambda: adam(global_clipnorm=0.05), 0) for stage in range(4)),
        *(exhaustive(stage, lambda: sgd(loss_scale_factor=64.0), 0) for stage in (1, 3)),
        exhaustive(0, lambda: sgd(loss_scale_factor=64.0, gradient_accumulation_steps=2), 2),
        *(exhaustive(stage, lambda: keras.optimizers.LossScaleOptimizer(sgd(), initial_scale=2.0**8), 0) for stage in range(4)),
        exhaustive(3, lambda: keras.optimizers.Muon(1e-2), 0),
    ],
)
def test_optimizers(stage, optimizer, accumulates):
    check("top_k", stage, 2, optimizer, accumulates=accumulates)


@pytest.mark.exhaustive
@pytest.mark.parametrize("stage", range(4))
def test_eager_steps_and_uneven_batches(stage):
    check("top_k", stage, 2, sgd, eagerly=True)
    check("top_k", stage, 4, data=batches(11))


@pytest.mark.parametrize("stage", [exhaustive(0), exhaustive(1), 2, exhaustive(3)])
def test_a_step_that_is_skipped_keeps_what_was_kept(stage):
    """An overflow halves the loss scale, and what is kept is in units without it."""
    data = batches() + batches()[:1]
    data[1][0][7, 3] = np.inf
    kept, scales = [], []

    def look(model):
        kept.append(residuals(model))

    def optimizer():
        scales.append(keras.optimizers.LossScaleOptimizer(sgd(), initial_scale=2.0**8))
        return scales[-1]

    strategy = strategy_for(2, stage, gradient_compression=CODECS["top_k"][0], use_kernels=False)
    losses, states = sharded(strategy, optimizer, data, look=look)
    for place in KERNELS:
        np.testing.assert_array_equal(states[2][place], states[1][place])
        for before, after in zip(kept[1][place], kept[2][place], strict=True):
            assert np.any(before) and np.isfinite(before).all()
            np.testing.assert_array_equal(before, after)
    assert float(scales[0].dynamic_scale) == 2.0**7
    _, decoded, kept_as = CODECS["top_k"]
    how = {"kept": kept[2:], "kept_as": kept_as}
    assert_each_step_is((losses[2:], states[2:]), decoded, 2, stage, optimizer, data[2:], **how)


@pytest.mark.exhaustive
def test_the_sum_of_what_is_sent_does_not_drift():
    """With SGD and a gradient that stays the same, what all steps together lack is what is kept; without feedback it adds up."""
    far = {}
    for name, feedback in (("kept", Exact()), ("lost", None)):
        strategy = strategy_for(2, 2, gradient_compression=TopK(0.05, None, feedback))
        keras.backend.clear_session()
        with strategy.scope():
            kernel = keras.Variable(np.zeros([64, 128], "float32"), name="kernel")
            optimizer = keras.optimizers.SGD(1.0)
            optimizer.build([kernel])
        direction = np.random.default_rng(1).normal(size=kernel.shape).astype("float32")

        def on_rank(kernel=kernel, optimizer=optimizer, direction=direction):
            with tf.GradientTape() as tape:
                loss = tf.reduce_sum(kernel * direction)
            optimizer.apply([0.5 * tape.gradient(loss, kernel)], [kernel])

        step = tf.function(lambda run=strategy.run, on_rank=on_rank: run(on_rank))
        for _ in range(40):
            step()
        lacks = kernel.numpy() + 40 * direction
        if feedback is not None:
            np.testing.assert_allclose(lacks, kernel.value.residual.numpy(), atol=1e-3)
        far[name] = np.linalg.norm(lacks) / np.linalg.norm(40 * direction)
    assert far["kept"] < 0.35 < 0.8 < far["lost"]


def feeding(size, stage, **settings):
    return strategy_for(size, stage, gradient_compression=CODECS["top_k"][0], use_kernels=False, **settings)


def test_memory_report():
    """To the byte: of each compressed variable's local elements a code and, for 256 of them, a scale."""
    report = tfdist.memory_report(trained(feeding(2, 2), steps=0))
    sizes = [FEATURES * 301, 301 * 17, 17 * 5 * 51]
    expected = sum((256 + 4) * math.ceil(size / 256) for size in sizes)
    assert [memory.residual_bytes for memory in report.devices] == [expected] * 2
    assert "residuals" in str(report) and report.mirrored.residual_bytes == 0
    memory = report.devices[0]
    assert memory.total_bytes == memory.parameter_bytes + memory.gradient_bytes + memory.optimizer_bytes + expected
    assert "residuals" not in str(tfdist.memory_report(trained(strategy_for(2, 2, gradient_compression="top_k"), steps=0)))


# Saving


def sums(model):
    """Returns the ranks' sums of what is kept; None of a variable without."""
    kept = [variable.value.residual for variable in model.trainable_variables]
    return [None if one is None else one.numpy() for one in kept]


def by_weights(model, folder):
    model.save_weights(folder / "a.weights.h5")

    def restore(strategy):
        other = trained(strategy, steps=1)
        other.load_weights(folder / "a.weights.h5")
        return other

    return restore


def by_tensorflow(model, folder):
    path = tf.train.Checkpoint(model=model, optimizer=model.optimizer).write(str(folder / "checkpoint"))

    def restore(strategy):
        other = trained(strategy, steps=1)
        status = tf.train.Checkpoint(model=other, optimizer=other.optimizer).read(path)
        if getattr(other.trainable_variables[0].value, "residual", None) is not None:
            status.assert_consumed()
        return other

    return restore


@pytest.mark.parametrize("save", [by_keras, exhaustive(by_weights), exhaustive(by_tensorflow)])
def test_what_is_kept_is_saved_as_the_sum_and_training_goes_on_from_it(save, tmp_path):
    """Bit by bit on as many ranks; on others of the same sum, and where nothing is kept the file is any other's."""
    model = trained(feeding(2, 2))
    before = sums(model)
    restore = save(model, tmp_path)
    for strategy in (feeding(3, 1), feeding(2, 0), feeding(2, 3), feeding(4, 2, sharding_group_size=2), strategy_for(2, 2), None):
        other = restore(one_device() if strategy is None else strategy)
        for ours, theirs in zip(model.trainable_variables, other.trainable_variables, strict=True):
            np.testing.assert_array_equal(theirs.numpy(), ours.numpy())
        assert len(other.optimizer.variables) == len(model.optimizer.variables)
        np.testing.assert_array_equal(other.optimizer.variables[-1].numpy(), model.optimizer.variables[-1].numpy())
        if strategy is not None and strategy.sharding_config.feeds_back:
            for place in KERNELS:
                found = sums(other)[place]
                assert np.any(before[place])
                np.testing.assert_allclose(found, before[place], rtol=0, atol=np.abs(before[place]).max() / 200)
    assert_go_on_alike(model, restore(feeding(2, 2)))


@pytest.mark.exhaustive
def test_a_file_without_it_is_loaded(tmp_path):
    """Of a run that keeps nothing, and of Keras alone: nothing is lost yet."""
    for number, strategy in enumerate((strategy_for(2, 2, use_kernels=False), one_device())):
        model = trained(strategy)
        model.save_weights(tmp_path / f"{number}.weights.h5")
        other = trained(feeding(2, 2))
        assert np.any(sums(other)[0])
        other.load_weights(tmp_path / f"{number}.weights.h5")
        assert not any(np.any(sums(other)[place]) for place in KERNELS)
        for ours, theirs in zip(model.optimizer.variables, other.optimizer.variables, strict=True):
            np.testing.assert_array_equal(theirs.numpy(), ours.numpy())


@pytest.mark.exhaustive
@pytest.mark.timeout(300)
def test_a_run_that_is_begun_again_ends_with_the_same_bits(tmp_path):
    assert_begins_again(lambda: feeding(2, 2), tmp_path)


@pytest.mark.exhaustive
def test_other_ways_to_save(tmp_path):
    """In memory, as a legacy file, which holds no residuals, and exported, which leaves them alone."""
    model = trained(feeding(2, 2))
    saving_lib.save_model(model, io.BytesIO())
    kept = residuals(model)
    model.save(tmp_path / "model.h5")
    model.export(tmp_path / "exported", verbose=False)
    for place in KERNELS:
        np.testing.assert_array_equal(residuals(model)[place], kept[place])
    other = load_in(feeding(2, 2), tmp_path / "model.h5")
    assert not any(np.any(sums(other)[place]) for place in KERNELS)
    # The optimizer that Keras makes of such a file knows other variables, without tfdist, too.
    other.compile(adam(), keras.losses.SparseCategoricalCrossentropy(from_logits=True))
    steps_of(other, 1)
    assert np.any(sums(other)[0])


# Which optimizer, and when it is built


@pytest.mark.exhaustive
@pytest.mark.parametrize("stage", [2, 3])
@pytest.mark.parametrize("eagerly", [False, True])
def test_an_optimizer_that_is_built_in_the_first_step(stage, eagerly):
    strategy = feeding(2, stage)
    keras.backend.clear_session()
    with strategy.scope():
        model, trainer = build(), adam()

    def on_rank(features, labels):
        with tf.GradientTape() as tape:
            loss = tf.reduce_mean(keras.losses.sparse_categorical_crossentropy(labels, model(features), from_logits=True))
        trainer.apply(tape.gradient(loss, model.trainable_variables), model.trainable_variables)

    def step(*batch):
        strategy.run(on_rank, args=batch)

    run = step if eagerly else tf.function(step)
    dataset = tf.data.Dataset.from_tensor_slices(batches()[0]).batch(12).repeat(2)
    kept = []
    if stage == 3 and eagerly:  # gradients are summed as the tape has them
        with pytest.raises(RuntimeError, match="before its optimizer was built"):
            step(*next(iter(strategy.experimental_distribute_dataset(dataset))))
        return
    for batch in strategy.experimental_distribute_dataset(dataset):
        run(*batch)
        kept.append(residuals(model))
    assert np.any(kept[0][0][0]) and np.any(kept[1][0][0] != kept[0][0][0])


@pytest.mark.exhaustive
def test_another_optimizer_begins_anew():
    model = trained(feeding(2, 2))
    assert np.any(sums(model)[0])
    model.compile(sgd(), keras.losses.SparseCategoricalCrossentropy(from_logits=True))
    model.optimizer.build(model.trainable_variables)
    assert not np.any(sums(model)[0])
    steps_of(model, 1)
    assert np.any(sums(model)[0])


@pytest.mark.exhaustive
@pytest.mark.parametrize("stage", range(4))
def test_sums_that_no_optimizer_takes_leave_it_alone(stage):
    """In a step that is taken in a branch, too."""
    strategy = feeding(2, stage)
    model = trained(strategy, sgd)
    before = residuals(model)

    def on_rank(features, labels, is_step):
        with tf.GradientTape() as tape:
            loss = tf.reduce_mean(keras.losses.sparse_categorical_crossentropy(labels, model(features), from_logits=True))
        grads = tape.gradient(loss, model.trainable_variables)
        norm = tf.linalg.global_norm(grads)
        tf.cond(is_step, lambda: _applied(model.optimizer, grads, model.trainable_variables), lambda: None)
        return norm

    step = tf.function(lambda *args: strategy.run(on_rank, args=args))
    features, labels = (part[:6] for part in batches()[0])
    for is_step in (False, True):
        step(tf.constant(features), tf.constant(labels), tf.constant(is_step))
        for place in KERNELS:
            assert np.any(residuals(model)[place][0] != before[place][0]) == is_step


def _applied(optimizer, grads, variables):
    optimizer.apply(grads, variables)


@pytest.mark.exhaustive
def test_without_an_all_to_all_it_is_the_same(monkeypatch):
    """All gather the words of all."""
    states, kept = check("top_k", 2, 3)
    monkeypatch.setattr(type(RING), "exchanges", lambda *_: False)
    again, kept_again = check("top_k", 2, 3)
    for ours, theirs in zip(states[-1], again[-1], strict=True):
        np.testing.assert_array_equal(ours, theirs)
    for place in KERNELS:
        np.testing.assert_array_equal(kept[-1][place], kept_again[-1][place])


@pytest.mark.exhaustive
def test_half_precision():
    keras.config.set_dtype_policy("mixed_float16")
    try:
        model = trained(feeding(2, 3), lambda: keras.optimizers.LossScaleOptimizer(sgd(), initial_scale=2.0**6))
    finally:
        keras.config.set_dtype_policy("float32")
    assert all(np.any(sums(model)[place]) and np.isfinite(sums(model)[place]).all() for place in KERNELS)


@pytest.mark.exhaustive
@pytest.mark.parametrize("stage", [0, 3])
def test_beside_tensor_ranks(stage, tmp_path):
    """A residual is of a tensor rank's shard, and saved whole."""
    strategy = feeding(4, stage, tensor_parallel_size=2)

    def made():
        keras.backend.clear_session()
        keras.utils.set_random_seed(3)
        with strategy.scope():
            model = keras.Sequential(
                [keras.Input((64,)), tfdist.layers.ColumnParallelDense(256, "tanh", gather_output=True), keras.layers.Dense(7)]
            )
            model.compile("sgd", keras.losses.SparseCategoricalCrossentropy(from_logits=True))
            model.optimizer.build(model.trainable_variables)
        return model

    def step(model):
        rng = np.random.default_rng(5)
        model.train_on_batch(rng.normal(size=(8, 64)).astype("float32"), rng.integers(0, 7, 8))

    model, other = made(), made()
    step(model)
    kernel = model.trainable_variables[0].value
    assert kernel.residual.shape == (64, 256) and [x.shape[0] for x in kernel.residual.numbers()] == [64 * 128] * 4
    whole, numbers = kernel.residual.numpy(), [x.numpy().reshape(64, 128) for x in kernel.residual.numbers()]
    np.testing.assert_allclose(whole, np.concatenate([numbers[0] + numbers[2], numbers[1] + numbers[3]], 1), rtol=1e-6)
    model.save_weights(tmp_path / "a.weights.h5")
    other.load_weights(tmp_path / "a.weights.h5")
    for one in (model, other):
        step(one)
    for ours, theirs in zip(model.variables, other.variables, strict=True):
        np.testing.assert_array_equal(ours.numpy(), theirs.numpy())


# Over workers


def train_as_worker(folder):
    """Returns what training gives, and what goes on from a file of it, at every stage."""
    found = {}
    for stage in range(4):
        strategy = tfdist.MultiWorkerShardedStrategy(gradient_compression=CODECS["top_k"][0], zero_stage=stage)
        found[stage] = of_worker(strategy, f"{folder}/{stage}")
    return found


def of_worker(strategy, path):
    model = trained(strategy)
    sums_before = [one for one in sums(model) if one is not None]
    model.save_weights(f"{path}.weights.h5")
    tf.train.Checkpoint(model=model, optimizer=model.optimizer).write(f"{path}.checkpoint")
    steps_of(model, STEPS)
    return [variable.numpy() for variable in model.variables] + sums_before


@pytest.mark.exhaustive
@pytest.mark.timeout(400)
def test_two_workers_get_the_bits_of_one_process(tmp_path):
    with workers.job(tmp_path, 2, "tests.optimizers.test_error_feedback:train_as_worker", str(tmp_path)) as job:
        own = tmp_path / "own"
        own.mkdir()
        settings = {"gradient_compression": CODECS["top_k"][0]}
        expected = {stage: of_worker(strategy_for(2, stage, **settings), f"{own}/{stage}") for stage in range(4)}
        for found in job.results(380):
            for stage, state in found.items():
                for ours, theirs in zip(state, expected[stage], strict=True):
                    np.testing.assert_array_equal(ours, theirs, err_msg=f"{stage}")
    other = trained(feeding(3, 2), steps=0)
    other.load_weights(tmp_path / "1.weights.h5")
    assert np.any(sums(other)[0])


# What is refused


@pytest.mark.parametrize(
    ("make", "words"),
    [
        (lambda: TopK(error_feedback="int8"), ["`error_feedback`", "'int8'", "True"]),
        (lambda: TopK(error_feedback=Int8), ["`error_feedback`"]),
        (lambda: TopK(error_feedback=1), ["`error_feedback`", "error_feedback=1"]),
        (lambda: TopK(error_feedback=TopK(error_feedback=True)), ["`error_feedback`", "feedback of its own"]),
        (lambda: tfdist.ShardingConfig(parameter_compression=TopK(error_feedback=True)), ["`parameter_compression`", "Leave"]),
    ],
)
def test_what_is_refused(make, words):
    with pytest.raises(ValueError) as caught:  # noqa: PT011
        make()
    for word in words:
        assert word in str(caught.value)


def test_what_it_means():
    assert TopK().feedback is None is TopK(error_feedback=False).feedback
    assert TopK(error_feedback=True).feedback == Int8() and TopK(error_feedback=Exact()).feedback == Exact()
    assert TopK(0.01, None, True).bytes_of(2**20) == TopK(0.01, None).bytes_of(2**20)
    assert Compressor.feedback.fget(Int8()) is None


@pytest.mark.exhaustive
@pytest.mark.parametrize("wraps", [False, True])
def test_gradients_that_would_be_compressed_twice(wraps):
    """At stages 0 and 1 those that are read before they are accumulated."""
    strategy = feeding(2, 1)
    keras.backend.clear_session()
    with strategy.scope():
        model, trainer = build(), sgd(gradient_accumulation_steps=2)
        trainer = keras.optimizers.LossScaleOptimizer(trainer) if wraps else trainer
        trainer.build(model.trainable_variables)

    def on_rank(features, labels):
        with tf.GradientTape() as tape:
            loss = tf.reduce_mean(keras.losses.sparse_categorical_crossentropy(labels, model(features), from_logits=True))
        grads = tape.gradient(loss, model.trainable_variables)
        grads, _ = tfdist.clip_by_global_norm(grads, model.trainable_variables, 1.0)
        trainer.apply(grads, model.trainable_variables)

    step = tf.function(lambda *args: strategy.run(on_rank, args=args))
    with pytest.raises(NotImplementedError, match="compressed twice"):
        step(*map(tf.constant, batches()[0]))


def test_small_variables_keep_nothing():
    model = trained(feeding(2, 2), steps=0)
    for variable in model.trainable_variables:
        assert (variable.value.residual is not None) == is_compressed(variable)
