"""Parameters that travel compressed at stages 1 and 2: steps, bit by bit, what resets exact shards, saving and restoring."""

import functools
import io

import keras
import numpy as np
import numpy_compressors as model_of
import pytest
import tensorflow as tf
from compressed_training import (
    adam,
    assert_begins_again,
    assert_copies_are_equal,
    assert_each_step_is,
    assert_go_on_alike,
    batches,
    build,
    by_keras,
    decoded_weights,
    exact_values,
    gradients_of,
    sgd,
    sharded,
    steps_of,
    trained,
)
from grids import exhaustive
from keras.src.saving import saving_lib
from training import CLASSES, FEATURES, one_device, strategy_for

import tfdist
from tfdist.extensions.compression import Int4, Int8, TopK
from tfdist.optimizers import plan

pytestmark = pytest.mark.as_traced

CODECS = {
    "int8": ("int8", model_of.int8),
    "int4": ("int4", model_of.int4),
    "bfloat16": ("bfloat16", model_of.as_bfloat16),
    "int8-64": (Int8(64), functools.partial(model_of.int8, block_size=64)),
    "int4-128": (Int4(128), functools.partial(model_of.int4, block_size=128)),
    "top_k-alone": (TopK(0.05, None), functools.partial(model_of.top_k, fraction=0.05, rest=None)),
}
KERNELS = (0, 2, 4)  # places of those that are compressed


def check(codec, stage, size, optimizer=adam, data=None, gradients=None, accumulates=0, eagerly=False, **settings):
    """Compares steps with those of one device, and copies, bit by bit, with what the ranks were sent; returns the states."""
    setting, decoded = CODECS[codec]
    data, exact = batches() if data is None else data, []
    strategy = strategy_for(
        size, stage, parameter_compression=setting, gradient_compression=gradients, use_kernels=False, **settings
    )

    def look(model):
        assert_copies_are_equal(model)
        exact.append(exact_values(model))

    losses, states = sharded(strategy, optimizer, data, eagerly, look)
    assert tuple(place for place, one in enumerate(exact[0]) if one is not None) == KERNELS
    for place in KERNELS:
        np.testing.assert_array_equal(exact[0][place], states[0][place])
        for number in range(len(data)):
            old, new = states[number][place], states[number + 1][place]
            is_step = np.any(exact[number + 1][place] != exact[number][place])  # else gradients were accumulated, or skipped
            sent = decoded_weights(exact[number + 1][place] - old, decoded, size) if is_step else 0
            np.testing.assert_array_equal(new, old + sent)
    of_gradients = CODECS[gradients][1] if gradients else lambda x: x
    assert_each_step_is((losses, states), of_gradients, size, stage, optimizer, data, accumulates, exact=exact)
    return states, exact


GRID = [
    ("int4", 2, 2, "int8"),
    *(exhaustive(codec, stage, size, None) for codec in CODECS for stage in (1, 2) for size in (2, 4)),
    *(exhaustive("int8", stage, 3, "int4") for stage in (1, 2)),
]


@pytest.mark.parametrize(("codec", "stage", "size", "gradients"), GRID)
def test_ranks_update_exact_shards_and_send_differences(codec, stage, size, gradients):
    states, exact = check(codec, stage, size, gradients=gradients)
    for place in KERNELS:
        assert np.any(states[1][place] != exact[1][place]), "nothing was rounded"


@pytest.mark.parametrize(
    ("stage", "optimizer", "accumulates"),
    [
        exhaustive(1, lambda: sgd(gradient_accumulation_steps=2, global_clipnorm=0.5), 2),
        exhaustive(2, lambda: adam(global_clipnorm=0.5), 0),
        exhaustive(1, lambda: adam(clipnorm=0.2), 0),
        exhaustive(2, lambda: adam(use_ema=True), 0),
        exhaustive(2, lambda: adam(weight_decay=0.1, loss_scale_factor=64.0), 0),
        exhaustive(2, lambda: keras.optimizers.LossScaleOptimizer(sgd(), initial_scale=2.0**8), 0),
    ],
)
def test_optimizers(stage, optimizer, accumulates):
    check("int8", stage, 2, optimizer, accumulates=accumulates)


@pytest.mark.exhaustive
@pytest.mark.parametrize("is_compiled", [False, True])
def test_updates_of_large_parameters(is_compiled, monkeypatch):
    """By a function that parameters of one shape share; compiled, where they are very large."""
    monkeypatch.setattr(plan, "LARGE_ELEMENTS", 1000)
    if is_compiled:
        monkeypatch.setattr(plan, "COMPILED_ELEMENTS", 1000)
        monkeypatch.setattr(plan, "COMPILER_PAYS_IN_ALL", 1000)
    check("int4", 2, 2)


@pytest.mark.exhaustive
@pytest.mark.parametrize("stage", [1, 2])
def test_uneven_batches_eager_steps_and_small_buckets(stage):
    check("int8", stage, 4, data=batches(11))
    check("int8", stage, 2, sgd, eagerly=True)
    (one, _), (other, _) = check("int4", stage, 2), check("int4", stage, 2, bucket_bytes=1)
    for ours, theirs in zip(one[-1], other[-1], strict=True):
        np.testing.assert_array_equal(ours, theirs)


@pytest.mark.exhaustive
@pytest.mark.parametrize("stage", [1, 2])
def test_an_overflow_is_seen_by_all(stage):
    """With loss scaling all skip the step, and neither copies nor exact shards change; without it, weights are not finite."""
    data = batches()
    data[1][0][7, 3] = np.inf
    states, exact = check("int8", stage, 2, lambda: keras.optimizers.LossScaleOptimizer(sgd()), data)
    for place in KERNELS:
        np.testing.assert_array_equal(states[2][place], states[1][place])
        np.testing.assert_array_equal(exact[2][place], exact[1][place])
        assert np.any(states[3][place] != states[2][place]) and np.isfinite(states[3][place]).all()
    looks = []
    _, states = sharded(
        strategy_for(2, stage, parameter_compression="int4"),
        sgd,
        data,
        look=lambda model: looks.append(assert_copies_are_equal(model)),
    )
    assert len(looks) == 4
    for place in KERNELS:
        assert not np.isfinite(states[3][place]).all()


@pytest.mark.exhaustive
@pytest.mark.parametrize("policy", ["mixed_bfloat16", "float16"])
def test_half_precision(policy):
    """With variables in half precision, too: what they are rounded to is sent again."""
    keras.config.set_dtype_policy(policy)
    try:
        looks = []

        def look(model):
            assert_copies_are_equal(model)
            looks.append((exact_values(model), [variable.numpy() for variable in model.trainable_variables]))

        sharded(strategy_for(2, 2, parameter_compression="int8"), sgd, batches(), look=look)
    finally:
        keras.config.set_dtype_policy("float32")
    for exact, copies in looks[1:]:
        for place in KERNELS:
            e, w = exact[place].astype("float64"), copies[place].astype("float64")
            assert np.any(w != looks[0][1][place])
            np.testing.assert_allclose(w, e, rtol=0, atol=2e-3)


@pytest.mark.exhaustive
def test_the_error_does_not_grow():
    """Of 30 steps with 4 bits, what copies lack is less than what one step changes; without correction it would add up."""
    data = batches()[:1] * 30
    looks = []
    _, states = sharded(
        strategy_for(2, 2, parameter_compression="int4"),
        lambda: keras.optimizers.Adam(1e-2),
        data,
        look=lambda model: looks.append(exact_values(model)),
    )
    for place in KERNELS:
        lacks = [np.abs(exact[place] - state[place]).max() for exact, state in zip(looks[1:], states[1:], strict=True)]
        assert max(lacks[20:]) < 2 * max(lacks[:5]) < 0.02


# What is written otherwise


def copies_of(model):
    return [variable.numpy() for variable in model.trainable_variables]


def assert_is_exact(model, expected=None):
    """Copies and exact shards are the same, or both `expected`, on all ranks."""
    assert_copies_are_equal(model)
    expected = copies_of(model) if expected is None else expected
    for copy, exact, weights in zip(copies_of(model), exact_values(model), expected, strict=True):
        np.testing.assert_array_equal(copy, weights)
        np.testing.assert_array_equal(weights if exact is None else exact, weights)


def lacks(model):
    return any(np.any(copies_of(model)[place] != exact_values(model)[place]) for place in KERNELS)


def test_what_is_assigned_counts(tmp_path):
    """Outside replicas and inside, traced and eagerly, by Keras and by TensorFlow, and in a file."""
    strategy = strategy_for(2, 2, parameter_compression="int4")
    model = trained(strategy)
    assert lacks(model)
    kernel = model.trainable_variables[0]
    before = exact_values(model)
    model.set_weights([2 * weights for weights in copies_of(model)])
    assert_is_exact(model)
    steps_of(model, 1)
    assert lacks(model)

    def halve():
        kernel.assign(kernel * 0.5)
        kernel.value.assign_add(tf.ones(kernel.shape))

    for run in (tf.function(lambda: strategy.run(halve)), lambda: strategy.run(halve)):
        others, old = exact_values(model)[2:], copies_of(model)[0]
        run()
        np.testing.assert_array_equal(copies_of(model)[0], old * np.float32(0.5) + 1)
        np.testing.assert_array_equal(exact_values(model)[0], copies_of(model)[0])
        for one, other in zip(exact_values(model)[2:], others, strict=True):  # of others the difference is kept
            np.testing.assert_array_equal(one, other)
        steps_of(model, 1)
    assert lacks(model) and before
    path = str(tmp_path / "a.weights.h5")
    model.save_weights(path)
    saved = copies_of(model)
    steps_of(model, 2)
    model.load_weights(path)
    assert_is_exact(model, saved)


@pytest.mark.exhaustive
def test_a_weight_that_is_assigned_under_a_tape():
    """What follows the assignment is no part of its gradient."""
    strategy = strategy_for(2, 2, parameter_compression="int4")
    model = trained(strategy)
    kernel = model.trainable_variables[0]
    before = kernel.numpy()

    def on_rank():
        with tf.GradientTape() as tape:
            kernel.assign(kernel * 0.5)
            square = tf.reduce_sum(kernel * kernel)
        return tape.gradient(square, kernel)

    for gradient in strategy.experimental_local_results(tf.function(lambda: strategy.run(on_rank))()):
        np.testing.assert_allclose(gradient.numpy(), before, rtol=1e-6)
    np.testing.assert_array_equal(kernel.value.exact.numpy(), kernel.numpy())


@pytest.mark.exhaustive
@pytest.mark.parametrize("eagerly", [False, True])
def test_an_optimizer_that_is_built_in_the_first_step(eagerly):
    strategy = strategy_for(2, 2, parameter_compression="int4")
    keras.backend.clear_session()
    with strategy.scope():
        model, trainer = build(), adam()

    def on_rank(features, labels):
        _, grads = gradients_of(model, trainer, len(features) * 2, features, labels)
        trainer.apply(grads, model.trainable_variables)

    def step(*batch):
        strategy.run(on_rank, args=batch)

    dataset = tf.data.Dataset.from_tensor_slices(batches()[0]).batch(12)
    for batch in strategy.experimental_distribute_dataset(dataset):
        (step if eagerly else tf.function(step))(*batch)
    assert_copies_are_equal(model)
    assert lacks(model)


@pytest.mark.exhaustive
def test_averages_and_constraints():
    """An average is of exact weights, and where it takes their place it counts; what has a constraint travels exactly."""
    strategy = strategy_for(2, 2, parameter_compression="int4", use_kernels=False)
    model = trained(strategy, lambda: sgd(use_ema=True, ema_overwrite_frequency=2), steps=1)
    assert lacks(model)
    (features, labels), *_ = batches()
    model.train_on_batch(features, labels)
    assert_is_exact(model)
    keras.backend.clear_session()
    with strategy.scope():
        model = keras.Sequential(
            [keras.Input((FEATURES,)), keras.layers.Dense(301, kernel_constraint="unit_norm"), keras.layers.Dense(CLASSES)]
        )
        model.compile("sgd", keras.losses.SparseCategoricalCrossentropy(from_logits=True))
    steps_of(model, 1)
    assert exact_values(model) == [None] * 4
    np.testing.assert_allclose(np.linalg.norm(copies_of(model)[0], axis=0), 1, rtol=1e-5)


@pytest.mark.exhaustive
def test_frozen_weights_and_optimizers_of_whole_tensors_are_left_alone():
    strategy = strategy_for(2, 2, parameter_compression="int4")
    model = trained(strategy)
    model.layers[0].trainable = False
    model.compile(adam(), keras.losses.SparseCategoricalCrossentropy(from_logits=True))
    frozen = model.layers[0].kernel
    before, exact = frozen.numpy(), frozen.value.exact.numpy()
    steps_of(model, 2)
    np.testing.assert_array_equal(frozen.numpy(), before)
    np.testing.assert_array_equal(frozen.value.exact.numpy(), exact)
    assert np.any(model.layers[1].kernel.value.exact.numpy() != model.layers[1].kernel.numpy())
    model.compile(keras.optimizers.Muon(1e-2), keras.losses.SparseCategoricalCrossentropy(from_logits=True))
    steps_of(model, 1)
    assert_copies_are_equal(model)
    kernel = model.layers[1].kernel
    np.testing.assert_array_equal(kernel.numpy(), kernel.value.exact.numpy())
    whole = trained(strategy, lambda: keras.optimizers.LossScaleOptimizer(keras.optimizers.Adafactor(1e-2)))
    assert exact_values(whole) == [None] * 8


# Saving


def by_tensorflow(model, folder):
    path = tf.train.Checkpoint(model=model, optimizer=model.optimizer).write(str(folder / "checkpoint"))

    def restore(strategy):
        other = trained(strategy, steps=1)
        tf.train.Checkpoint(model=other, optimizer=other.optimizer).read(path).assert_consumed()
        return other

    return restore


@pytest.mark.parametrize("save", [by_keras, exhaustive(by_tensorflow)])
def test_what_is_saved_is_exact_and_training_goes_on_from_it(save, tmp_path):
    """Bit by bit under the same settings; on other ranks, without compression and on one device weights are the exact ones."""
    settings = {"parameter_compression": "int8", "use_kernels": False}
    model = trained(strategy_for(2, 2, **settings))
    assert lacks(model)
    exact = [weights if one is None else one for one, weights in zip(exact_values(model), copies_of(model), strict=True)]
    restore = save(model, tmp_path)
    assert_is_exact(model, exact)  # from here on the ranks compute with what was saved
    for strategy in (strategy_for(3, 1, **settings), strategy_for(2, 2), strategy_for(2, 3, **settings), one_device()):
        other = restore(strategy)
        for ours, theirs in zip(exact, other.trainable_variables, strict=True):
            np.testing.assert_array_equal(theirs.numpy(), ours)
        assert len(other.optimizer.variables) == len(model.optimizer.variables)
    assert_go_on_alike(model, restore(strategy_for(2, 2, **settings)))


@pytest.mark.exhaustive
def test_what_is_exported_or_saved_in_memory_is_exact(tmp_path):
    model = trained(strategy_for(2, 2, parameter_compression="int4"))
    exact = exact_values(model)
    model.export(tmp_path / "exported", verbose=False)
    served = {tuple(one.shape): one.numpy() for one in tf.saved_model.load(str(tmp_path / "exported")).variables}
    for place in KERNELS:
        np.testing.assert_array_equal(served[exact[place].shape], exact[place])
    assert_is_exact(model)
    steps_of(model, 1)
    assert lacks(model)
    saving_lib.save_model(model, io.BytesIO())
    assert_is_exact(model)
    steps_of(model, 1)
    model.save(tmp_path / "model.h5")
    assert_is_exact(model)


@pytest.mark.exhaustive
@pytest.mark.timeout(300)
def test_a_run_that_is_begun_again_ends_with_the_same_bits(tmp_path):
    assert_begins_again(lambda: strategy_for(2, 2, parameter_compression="int4"), tmp_path)


def test_memory_report():
    report = tfdist.memory_report(trained(strategy_for(2, 2, parameter_compression="int8"), steps=0))
    sizes = [FEATURES * 301, 301 * 17, 17 * 5 * 51]
    assert [memory.exact_bytes for memory in report.devices] == [4 * sum(-(-size // 2) for size in sizes)] * 2
    assert "exact shards" in str(report) and report.mirrored.exact_bytes == 0
    memory = report.devices[0]
    assert memory.total_bytes == memory.parameter_bytes + memory.gradient_bytes + memory.optimizer_bytes + memory.exact_bytes
    assert "exact shards" not in str(tfdist.memory_report(trained(strategy_for(2, 2), steps=0)))
