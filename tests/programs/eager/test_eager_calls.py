"""A model that is called eagerly between steps: drawing samples in a callback, decoding token by token, playing episodes.

At stage 3 its weights are kept in one piece until they change; whatever changes them, the next call must see it.
"""

from __future__ import annotations

import gc
import tempfile

import keras
import numpy as np
import pytest
import tensorflow as tf
from grids import exhaustive
from training import strategy_for

from tests.programs.comparing import SHARDED, assert_as_on_one_device
from tfdist.sharding import assembly

X = np.random.default_rng(5).normal(size=(12, 6)).astype("float32")
Y = np.random.default_rng(6).normal(size=(12, 1)).astype("float32")


def _mlp(strategy, **arguments):
    with strategy.scope():
        model = keras.Sequential([keras.Input((6,)), keras.layers.Dense(5, activation="tanh"), keras.layers.Dense(1)])
        model.compile(keras.optimizers.Adam(0.05, use_ema=True), "mse", **arguments)
    return model


def between_all_that_changes_weights(strategy):
    """A call before and after each way of writing weights."""
    model, seen = _mlp(strategy), {}
    first = model.get_weights()
    kernel, dense = model.layers[0].kernel, model.layers[1]
    ones = np.ones((6, 5), "float32")

    def step(x, y):
        with tf.GradientTape() as tape:
            loss = tf.reduce_sum((model(x) - y) ** 2) / 12
        optimizer.apply(tape.gradient(loss, model.trainable_variables), model.trainable_variables)

    with strategy.scope():
        optimizer = keras.optimizers.SGD(0.1)
        optimizer.build(model.trainable_variables)
    traced = tf.function(lambda x, y: strategy.run(step, args=(x, y)))
    batches = strategy.experimental_distribute_dataset(tf.data.Dataset.from_tensors((X, Y)))
    dataset = tf.data.Dataset.from_tensor_slices((X, Y)).batch(4)
    checkpoint = tf.train.Checkpoint(model=model)

    @tf.function
    def loop(turns):
        for _ in tf.range(turns):
            kernel.assign(kernel * 0.9)

    called_by_another = tf.function(lambda: loop(tf.constant(2)))
    swap = keras.callbacks.SwapEMAWeights(swap_on_epoch=True)

    def each(strategy_step):
        for batch in batches:
            strategy_step(*batch)

    changes = {
        "fit": lambda: model.fit(dataset, epochs=1, verbose=0),
        "train_on_batch": lambda: model.train_on_batch(X, Y),
        "set_weights": lambda: model.set_weights(first),
        "assign": lambda: kernel.assign(ones),
        "assign_add": lambda: kernel.assign_add(ones),
        "assign of the value": lambda: kernel.value.assign_sub(0.5 * ones),
        "layer": lambda: dense.set_weights([np.ones((5, 1)), np.ones(1)]),
        "traced assign": lambda: tf.function(lambda: kernel.assign(kernel * 2.0))(),
        "loop": lambda: loop(tf.constant(3)),
        "loop again": lambda: loop(tf.constant(1)),
        "function of a function": called_by_another,
        "function of a function again": called_by_another,
        "in scope": lambda: _in_scope(strategy, lambda: kernel.assign(ones * 0.5)),
        "evaluate": lambda: model.evaluate(X, Y, verbose=0),
        "predict": lambda: model.predict(X, verbose=0),
        "traced step": lambda: each(traced),
        "traced step again": lambda: each(traced),
        "eager step": lambda: each(lambda x, y: strategy.run(step, args=(x, y))),
        "averages": lambda: model.optimizer.finalize_variable_values(model.trainable_variables),
        "callback": lambda: model.fit(dataset, epochs=2, verbose=0, callbacks=[swap]),
        "restore": lambda: checkpoint.restore(path).expect_partial(),
        "compile": lambda: model.compile("sgd", "mse", run_eagerly=True),
        "fit eagerly": lambda: model.fit(dataset, epochs=1, verbose=0),
    }
    with tempfile.TemporaryDirectory() as folder:
        path = checkpoint.save(f"{folder}/before")
        model.save_weights(f"{folder}/w.weights.h5")
        changes["load_weights"] = lambda: model.load_weights(f"{folder}/w.weights.h5")
        for name, change in changes.items():
            before = np.array(model(X))
            change()
            seen[name] = [np.array(model(X)), bool(np.any(before != np.array(model(X)))), np.array(kernel)]
    return seen


def _in_scope(strategy, change):
    with strategy.scope():
        return change()


def samples_in_a_callback(strategy):
    """Tokens drawn one by one at the end of every epoch, greedily, by a small recurrent language model."""
    tokens = np.random.default_rng(1).integers(0, 7, size=(8, 6))
    with strategy.scope():
        layers = [keras.layers.Embedding(7, 5), keras.layers.LSTM(6, return_sequences=True), keras.layers.Dense(7)]
        model = keras.Sequential(layers)
        loss = keras.losses.SparseCategoricalCrossentropy(from_logits=True)
        model.compile(keras.optimizers.SGD(1.0), loss)
    drawn = []

    def draw(epoch, logs):
        text = [1]
        for _ in range(4):
            logits = model(np.array([text]))
            text.append(int(tf.argmax(logits[0, -1])))
        drawn.append(text + list(np.array(logits[0, -1])))

    callback = keras.callbacks.LambdaCallback(on_epoch_end=draw)
    model.fit(tokens[:, :-1], tokens[:, 1:], batch_size=4, epochs=3, shuffle=False, verbose=0, callbacks=[callback])
    return drawn


def grouped_convolutions(strategy):
    """Blocks of MobileNet and ResNeXt: Keras compiles their convolutions by XLA; called eagerly, traced, and trained."""
    images = np.random.default_rng(7).normal(size=(4, 8, 8, 4)).astype("float32")
    labels = np.array([0, 1, 2, 1])
    with strategy.scope():
        inputs = keras.Input((8, 8, 4))
        x = keras.layers.DepthwiseConv2D(3, padding="same")(inputs)
        x = keras.layers.Conv2D(8, 1, activation="relu")(x)
        x = x + keras.layers.Conv2D(8, 3, padding="same", groups=4)(x)
        x = keras.layers.SeparableConv2D(4, 3)(x)
        x = keras.layers.Conv2DTranspose(3, 3)(x)
        model = keras.Model(inputs, keras.layers.Dense(3)(keras.layers.GlobalAveragePooling2D()(x)))
        model.compile("sgd", keras.losses.SparseCategoricalCrossentropy(from_logits=True))
    seen = [np.array(model(images)), np.array(tf.function(model)(images))]
    with tf.GradientTape() as tape:
        loss = tf.reduce_sum(model(images) ** 2)
    seen += [np.array(g) for g in tape.gradient(loss, model.trainable_variables)]
    model.fit(images, labels, batch_size=2, epochs=2, shuffle=False, verbose=0)
    return [*seen, np.array(model(images)), model.predict(images, verbose=0)]


def episodes(strategy):
    """REINFORCE: episodes played by eager calls, a target network that follows, and steps of `train_on_batch` between them."""
    policy, target = _mlp(strategy), _mlp(strategy)
    target.set_weights(policy.get_weights())
    rewards = []
    for episode in range(3):
        state = X[episode : episode + 1]
        for _ in range(4):
            action = float(policy(state)[0, 0]) - 0.5 * float(target(state)[0, 0])
            state = np.tanh(np.roll(state, 1) + action).astype("float32")
            rewards.append(action)
        policy.train_on_batch(X, Y)
        for mine, theirs in zip(target.weights, policy.weights, strict=True):
            mine.assign(0.9 * mine + 0.1 * theirs)
    return rewards


PROGRAMS = [between_all_that_changes_weights, *map(exhaustive, (grouped_convolutions, samples_in_a_callback, episodes))]


@pytest.mark.as_traced
@pytest.mark.parametrize("zero_stage", SHARDED)
@pytest.mark.parametrize("program", PROGRAMS)
def test_they_are_those_of_one_device(program, zero_stage):
    assert_as_on_one_device(program, zero_stage)


@pytest.fixture
def assembled(monkeypatch):
    """The names of weights as they are put together."""
    names, assemble = [], assembly.assemble

    def noting(variable):
        if tf.executing_eagerly():
            names.append(variable.name)
        return assemble(variable)

    monkeypatch.setattr("tfdist.sharding.variable.assemble", noting)
    return names


def _kept_bytes(strategy):
    return strategy.extended.weight_cache.kept_bytes


BYTES = (6 * 5 + 5 + 5 + 1) * 4


def test_weights_are_put_together_once_and_dropped_by_a_step(assembled):
    strategy = strategy_for(2, 3)
    model = _mlp(strategy)
    for _ in range(3):
        model(X)
    assert len(assembled) == 4 and _kept_bytes(strategy) == BYTES
    model.evaluate(X, Y, verbose=0)
    model.predict(X, verbose=0)
    model(X)
    assert len(assembled) == 4, "nothing has changed"
    model.layers[1].bias.assign(np.ones(1))
    assert _kept_bytes(strategy) == BYTES - 4
    model(X)
    assert len(assembled) == 5
    held = []
    seen = keras.callbacks.LambdaCallback(on_train_batch_end=lambda batch, logs: held.append(_kept_bytes(strategy)))
    model.fit(X, Y, batch_size=4, verbose=0, callbacks=[seen])
    assert held == [0, 0, 0], "training has the memory"


def test_saving_and_reading_keep_nothing(tmp_path):
    strategy = strategy_for(2, 3)
    model = _mlp(strategy)
    model.get_weights()
    model.save(tmp_path / "model.keras")
    tf.train.Checkpoint(model=model).save(tmp_path / "checkpoint")
    np.array(model.weights[0])
    assert _kept_bytes(strategy) == 0


def test_a_model_that_is_gone_is_not_kept():
    strategy = strategy_for(2, 3)
    model = _mlp(strategy)
    model(X)
    assert _kept_bytes(strategy) == BYTES
    del model
    keras.backend.clear_session()
    gc.collect()
    assert _kept_bytes(strategy) == 0


def test_no_more_is_kept_than_is_set_but_for_what_is_gathered(assembled):
    keras.utils.set_random_seed(7)  # no output is near 0, where there are no six digits
    strategy = strategy_for(2, 3, kept_bytes=130)
    model = _mlp(strategy)
    model(X), model(X)
    assert _kept_bytes(strategy) == 6 * 5 * 4 + 4 and len(assembled) == 6
    with strategy.gathered(model):
        assert _kept_bytes(strategy) == BYTES
        count = len(assembled)
        model(X), model(X)
        assert len(assembled) == count
        model.train_on_batch(X, Y)
        assert _kept_bytes(strategy) == 0
        np.testing.assert_allclose(np.array(model(X)), model.predict(X, verbose=0), rtol=1e-6)
        assert _kept_bytes(strategy) == BYTES
        with strategy.gathered(model.layers[0]):
            pass
        assert _kept_bytes(strategy) == BYTES
    assert _kept_bytes(strategy) <= 130


def test_what_can_be_gathered():
    strategy = strategy_for(2, 3)
    model = _mlp(strategy)
    with strategy.gathered(model.layers[0], model.layers[1].kernel, model.layers[1].bias.value):
        assert _kept_bytes(strategy) == BYTES
    with pytest.raises(ValueError, match="`what` must be models, layers or variables"):
        strategy.gathered("model")
    with strategy_for(2, 0).gathered(model.layers[0]):
        pass


def test_nothing_is_kept_that_was_put_together_while_a_step_ran(monkeypatch):
    strategy = strategy_for(2, 3)
    model = _mlp(strategy)
    kept = strategy.extended.weight_cache
    with kept.written():  # another thread's step
        model(X)
    assert kept.kept_bytes == 0
    assemble = assembly.join

    def beside_a_step(*args):
        with kept.written():
            pass
        return assemble(*args)

    with monkeypatch.context() as patch:
        patch.setattr(assembly, "join", beside_a_step)
        model(X)
    assert kept.kept_bytes == 0
    model(X)
    assert kept.kept_bytes == BYTES


def test_steps_in_a_loop_of_a_function_drop_what_is_kept():
    keras.utils.set_random_seed(3)  # an output near 0 has no five digits
    strategy = strategy_for(2, 3)
    model = _mlp(strategy, steps_per_execution=3)
    for _ in range(2):
        model(X)
        model.fit(X, Y, batch_size=4, verbose=0)
        np.testing.assert_allclose(np.array(model(X)), model.predict(X, verbose=0), rtol=1e-5)
