"""Steps with compressed gradients, and those steps on one device, with the sum, in order, of what the ranks' are decoded to.

What is compressed is computed by NumPy (`numpy_compressors`), from the gradients of the ranks' rows.
"""

import functools
import math

import keras
import numpy as np
import pytest
import tensorflow as tf
from training import CLASSES, FEATURES, one_device

from tests import devices

ROWS, STEPS = 12, 3


def build():
    """Kernels 15x301, 301x17 and 17x5x51, which are compressed, and small ones and vectors, which are not."""
    return keras.Sequential(
        [
            keras.Input((FEATURES,)),
            keras.layers.Dense(301, activation="tanh"),
            keras.layers.Dense(17),
            keras.layers.EinsumDense("ab,bcd->acd", (5, 51), activation="tanh", bias_axes="d"),
            keras.layers.Flatten(),
            keras.layers.Dense(CLASSES),
        ]
    )


def is_compressed(variable):
    return len(variable.shape) > 1 and math.prod(variable.shape) >= 4096


def adam(**settings):
    return keras.optimizers.Adam(1e-2, **settings)


def sgd(**settings):
    return keras.optimizers.SGD(0.1, momentum=0.9, **settings)


def batches(rows=ROWS):
    rng = np.random.default_rng(7)
    return [(rng.normal(size=(rows, FEATURES)).astype("float32"), rng.integers(0, CLASSES, rows)) for _ in range(STEPS)]


def made(strategy, optimizer):
    keras.backend.clear_session()
    keras.utils.set_random_seed(3)
    with strategy.scope():
        model, trainer = build(), optimizer()
        trainer.build(model.trainable_variables)
    return model, trainer


def plan_of(strategy, make=build, optimizer=adam):
    """Returns the plan of a traced step, which does not run."""
    with strategy.scope():
        model, trainer = make(), optimizer()
        trainer.build(model.trainable_variables)

    def on_rank(x):
        with tf.GradientTape() as tape:
            loss = tf.reduce_mean(model(x, training=True) ** 2)
        trainer.apply(tape.gradient(loss, model.trainable_variables), model.trainable_variables)

    step = tf.function(lambda x: strategy.run(on_rank, args=(x,)))
    step.get_concrete_function(tf.zeros((6, *model.input_shape[1:])))
    return model, strategy.last_plan


def gradients_of(model, trainer, rows, features, labels):
    loss_of = keras.losses.SparseCategoricalCrossentropy(from_logits=True, reduction="sum")
    with tf.GradientTape() as tape:
        loss = loss_of(labels, model(features, training=True)) / rows
        scaled = trainer.scale_loss(loss)
    return loss, tape.gradient(scaled, model.trainable_variables)


def state_of(model, trainer):
    return [variable.numpy() for variable in (*model.variables, *trainer.variables)]


def exact_values(model):
    """Returns what the exact shards of each trainable variable are together; None of one without."""
    exact = [variable.value.exact for variable in model.trainable_variables]
    return [None if one is None else one.numpy() for one in exact]


def residuals(model):
    """Returns what each rank keeps of what its gradients have lost, of each trainable variable; None of one without."""
    kept = [variable.value.residual for variable in model.trainable_variables]
    return [None if one is None else [numbers.numpy() for numbers in one.numbers()] for one in kept]


def assert_copies_are_equal(model):
    """All ranks hold the same bits."""
    for variable in model.trainable_variables:
        first, *others = (copy.numpy() for copy in variable.value.values)
        for other in others:
            np.testing.assert_array_equal(first, other)


def sharded(strategy, optimizer, data, eagerly=False, look=lambda model: None):
    """Trains under `strategy`; returns the losses, and weights and slots before the first step and after each.

    `look` is called with the model when weights and slots are read.
    """
    model, trainer = made(strategy, optimizer)

    def on_rank(features, labels):
        loss, grads = gradients_of(model, trainer, len(data[0][0]), features, labels)
        trainer.apply(grads, model.trainable_variables)
        return loss

    def step(features, labels):
        return strategy.reduce("SUM", strategy.run(on_rank, args=(features, labels)), axis=None)

    run = step if eagerly else tf.function(step)
    features, labels = (np.concatenate(parts) for parts in zip(*data, strict=True))
    dataset = tf.data.Dataset.from_tensor_slices((features, labels)).batch(len(data[0][0]))
    losses, states = [], [state_of(model, trainer)]
    look(model)
    for batch in strategy.experimental_distribute_dataset(dataset):
        losses.append(float(run(*batch)))
        states.append(state_of(model, trainer))
        look(model)
    return losses, states


def decoded_weights(weights, decoded, size):
    """Returns a whole parameter as ranks gather it that encode their shards."""
    length = -(-weights.size // size)
    flat = np.pad(weights.ravel(), [0, size * length - weights.size])
    shards = [decoded(flat[place * length : (place + 1) * length]) for place in range(size)]
    return np.concatenate(shards)[: weights.size].reshape(weights.shape)


def decoded_sum(summands, decoded, size, is_whole):
    """Returns the sum of the ranks' `summands`, each encoded in `size` shards, one by one; at stage 0 the sums are, too."""
    length = -(-summands[0].size // size)
    rows = np.zeros((size, size * length), "float32")
    for row, summand in zip(rows, summands, strict=True):
        row[: summand.size] = summand.ravel()
    shards = []
    for place in range(size):
        parts = [decoded(row[place * length : (place + 1) * length]) for row in rows]
        total = functools.reduce(np.add, parts)
        shards.append(decoded(total) if is_whole else total)
    return np.concatenate(shards)[: summands[0].size].reshape(summands[0].shape)


def decoded_sum_of_groups(summands, decoded, group_size):
    """Returns the sum of the ranks' `summands` where exact sums of groups travel, shard by shard, and are encoded."""
    sums = [functools.reduce(np.add, summands[start:][:group_size]) for start in range(0, len(summands), group_size)]
    length = -(-summands[0].size // group_size)
    flat = [np.pad(one.ravel(), [0, group_size * length - one.size]) for one in sums]
    shards = [
        decoded_sum([one[place * length :][:length] for one in flat], decoded, len(sums), True) for place in range(group_size)
    ]
    return np.concatenate(shards)[: summands[0].size].reshape(summands[0].shape)


def fed_back_sum(summands, kept, decoded, is_whole):
    """Returns the sum of the ranks' flat `summands` with what they have kept of those before, and what these have lost."""
    size, n = len(summands), summands[0].size
    length = -(-n // size)
    x = np.stack([np.pad(own + old, [0, size * length - n]) for own, old in zip(summands, kept, strict=True)])
    sent = np.stack([np.concatenate([decoded(row) for row in one.reshape(size, length)]) for one in x])
    lost, total = x - sent, functools.reduce(np.add, sent)
    if is_whole:
        again = np.concatenate([decoded(row) for row in total.reshape(size, length)])
        for place in range(size):
            part = slice(place * length, (place + 1) * length)
            lost[place, part] += total[part] - again[part]
        total = again
    return total[:n], [one[:n] for one in lost]


def fed_back_sum_of_groups(summands, kept, decoded, group_size):
    """The same where exact sums of groups travel, shard by shard: each rank keeps what its shard has lost."""
    sums = [functools.reduce(np.add, summands[start:][:group_size]) for start in range(0, len(summands), group_size)]
    length = -(-summands[0].size // group_size)
    padded = [np.pad(one, [0, group_size * length - one.size]) for one in sums]
    shards, lost = [], [None] * len(summands)
    for place in range(group_size):
        parts = [one[place * length :][:length] for one in padded]
        total, lost[place::group_size] = fed_back_sum(parts, kept[place::group_size], decoded, True)
        shards.append(total)
    return np.concatenate(shards)[: summands[0].size], lost


def assert_each_step_is(
    trained,
    decoded,
    size,
    stage,
    optimizer,
    data,
    accumulates=0,
    parameters=None,
    exact=None,
    group_size=None,
    kept=None,
    kept_as=None,
):
    """Takes every step again on one device, from the state before it, with the sums of what `size` ranks' gradients decode to.

    From the same state, because one that differs by rounding has numbers in it that are rounded to another code. With
    `accumulates` the ranks add up so many of their own gradients before they are encoded. `parameters` decodes what ranks compute
    with; what they update is exact. With `exact`, what the exact shards were each time, copies and exact weights differ.
    With sharding groups of `group_size` ranks their sums are encoded, and not the ranks' own. With `kept`, what `residuals` were
    each time, they are added first, and what is lost then is what `kept_as` makes of it.
    """
    whole_sum = functools.partial(decoded_sum, size=size, is_whole=stage == 0)
    if group_size is not None:
        whole_sum = functools.partial(decoded_sum_of_groups, group_size=group_size)
    with_residual = functools.partial(fed_back_sum, is_whole=stage == 0)
    if group_size is not None:
        with_residual = functools.partial(fed_back_sum_of_groups, group_size=group_size)
    losses, states = trained
    model, trainer = made(one_device(), optimizer)
    grads_of = tf.function(lambda x, y: gradients_of(model, trainer, len(data[0][0]), x, y), autograph=False)
    accumulated = []
    for number, (features, labels) in enumerate(data):
        for variable, value in zip((*model.variables, *trainer.variables), states[number], strict=True):
            variable.assign(value)
        if parameters is not None:
            updated = [variable.numpy() for variable in model.trainable_variables]
            for variable, weights in zip(model.trainable_variables, updated, strict=True):
                variable.assign(decoded_weights(weights, parameters, size) if is_compressed(variable) else weights)
        share = -(-len(features) // size)
        parts = [slice(rank * share, (rank + 1) * share) for rank in range(size)]
        found = [grads_of(tf.constant(features[part]), tf.constant(labels[part])) for part in parts]
        np.testing.assert_allclose(losses[number], float(sum(loss for loss, _ in found)), rtol=1e-5)
        if parameters is not None:
            for variable, weights in zip(model.trainable_variables, updated, strict=True):
                variable.assign(weights)
        accumulated.append([[grad.numpy() for grad in grads] for _, grads in found])
        if len(accumulated) < accumulates:
            continue
        is_dynamic = isinstance(trainer, keras.optimizers.LossScaleOptimizer)
        scale = np.float32(trainer.dynamic_scale if is_dynamic else trainer.loss_scale_factor or 1)
        sums = []
        for place, variable in enumerate(model.trainable_variables):
            summands = [functools.reduce(np.add, [step[rank][place] for step in accumulated[::-1]]) for rank in range(size)]
            summands = [summand / np.float32(len(accumulated)) for summand in summands]
            total = whole_sum(summands, decoded) if is_compressed(variable) and not kept else None
            if kept and is_compressed(variable):
                flat = [summand.ravel() for summand in summands]
                total, lost = with_residual(flat, [scale * old for old in kept[number][place]], decoded)
                total = total.reshape(variable.shape)
                for now, expected in zip(kept[number + 1][place], lost, strict=True):
                    expected = kept_as(expected / scale)
                    off = np.abs(now - expected) > 1e-5 * np.abs(expected).max()
                    assert np.abs(now).max() > 0 and off.mean() <= 2e-3, (number, place, off.mean())
            sums.append(functools.reduce(np.add, summands) if total is None else total)
        if accumulates:  # all at once, in the last of these steps
            sums = [total * np.float32(accumulates) for total in sums]
            for accumulator in trainer._accumulated_gradients:
                accumulator.assign(tf.zeros_like(accumulator))
        accumulated = []
        for variable, weights in zip(model.trainable_variables, exact[number] if exact else (), strict=bool(exact)):
            if weights is not None:
                variable.assign(weights)
        limit = getattr(trainer, "global_clipnorm", None)
        assert limit is None or tf.linalg.global_norm(sums) > limit, "nothing is clipped"
        trainer.apply([tf.constant(total) for total in sums], model.trainable_variables)
        found = list(states[number + 1])
        for place, weights in enumerate(exact[number + 1] if exact else ()):
            found[place] = found[place] if weights is None else weights  # variables of this model are all trainable
        for ours, theirs in zip(found, state_of(model, trainer), strict=True):
            scale = np.abs(theirs).max(initial=1e-2)
            off = np.abs(ours - theirs) > 1e-5 * scale
            assert off.mean() <= 1e-3, (number, off.mean())
            np.testing.assert_allclose(ours, theirs, rtol=0, atol=0.1 * scale)


def trained(strategy, optimizer=adam, steps=2):
    """Returns a compiled model after some steps of its own."""
    keras.backend.clear_session()
    keras.utils.set_random_seed(3)
    with strategy.scope():
        model = build()
        model.compile(optimizer(), keras.losses.SparseCategoricalCrossentropy(from_logits=True))
        model.optimizer.build(model.trainable_variables)
    steps_of(model, steps)
    return model


def steps_of(model, steps):
    for features, labels in batches()[:steps]:
        model.train_on_batch(features, labels)


def by_keras(model, folder):
    """Saves the model, and returns the function of a strategy that loads it."""
    model.save(folder / "model.keras")
    return lambda strategy: load_in(strategy, folder / "model.keras")


def load_in(strategy, path):
    with strategy.scope():
        return keras.models.load_model(path)


def assert_go_on_alike(model, other, steps=2):
    """Two models take steps that agree bit by bit, in what every rank keeps, too."""
    steps_of(model, steps)
    steps_of(other, steps)
    assert_copies_are_equal(other)
    for one, theirs in zip(
        [*model.variables, *model.optimizer.variables], [*other.variables, *other.optimizer.variables], strict=True
    ):
        _assert_same_bits(one.numpy(), theirs.numpy())
    for values in (exact_values, residuals):
        for ours, found in zip(values(model), values(other), strict=True):
            assert (ours is None) == (found is None)
            if ours is not None:
                _assert_same_bits(found, ours)


_assert_same_bits = functools.partial(devices.assert_same_bits, outliers=1e-3)


def assert_begins_again(make, folder):
    """`BackupAndRestore` of every second step: killed in the fifth and begun again, as if nothing had happened."""
    data = tf.data.Dataset.from_tensor_slices(tuple(map(np.concatenate, zip(*batches(), strict=True)))).batch(6)

    class Killed(Exception):
        pass

    def kill(batch, logs):
        if batch == 4:
            raise Killed

    def fit(name, *callbacks):
        model = trained(make(), steps=0)
        backup = keras.callbacks.BackupAndRestore(str(folder / name), save_freq=2)
        model.fit(data, epochs=2, verbose=0, callbacks=[backup, *callbacks])
        return model

    expected = fit("undisturbed")
    with pytest.raises(Killed):
        fit("killed", keras.callbacks.LambdaCallback(on_train_batch_end=kill))
    assert_go_on_alike(expected, fit("killed"), steps=1)
