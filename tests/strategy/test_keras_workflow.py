"""The rest of a Keras program under the strategy: evaluate, predict, saving, callbacks, reading and setting weights."""

import functools

import keras
import numpy as np
import pytest
import tensorflow as tf
from grids import exhaustive
from test_models import LazilyBuilt
from training import BATCH, ScaleAndShift, fit, gradient_penalty, mlp, one_device, small, strategy_for, vectors

from tfdist.sharding import ShardedVariable

pytestmark = pytest.mark.as_traced

X, Y = vectors()
STAGES = pytest.mark.parametrize("zero_stage", [0, exhaustive(1), exhaustive(2), 3])


def compiled(strategy, build=small):
    keras.utils.set_random_seed(5)
    with strategy.scope():
        model = build()
        model.compile(
            optimizer=keras.optimizers.Adam(0.01),
            loss=keras.losses.SparseCategoricalCrossentropy(from_logits=True),
            metrics=["accuracy"],
        )
    return model


def inferred(strategy):
    model = compiled(strategy)
    return model.evaluate(X, Y, batch_size=BATCH, verbose=0), model.predict(X, batch_size=BATCH, verbose=0)


@functools.cache
def inferred_on_one_device():
    return inferred(one_device())


@STAGES
def test_evaluate_and_predict(zero_stage):
    evaluated, predicted = inferred(strategy_for(4 if zero_stage == 3 else 2, zero_stage))
    expected = inferred_on_one_device()
    np.testing.assert_allclose(evaluated, expected[0], rtol=1e-5)
    np.testing.assert_allclose(predicted, expected[1], rtol=1e-4, atol=1e-6)


@STAGES
def test_train_on_batch_learns(zero_stage):
    model = compiled(strategy_for(2, zero_stage))
    first = model.train_on_batch(X[:BATCH], Y[:BATCH], return_dict=True)["loss"]
    for _ in range(5):
        last = model.train_on_batch(X[:BATCH], Y[:BATCH], return_dict=True)["loss"]
    assert last < first


@functools.cache
def trained_by_three(zero_stage):
    return fit(strategy_for(3, zero_stage), small, lambda: keras.optimizers.Adam(0.01)).model


@pytest.mark.parametrize("zero_stage", [exhaustive(0), exhaustive(1), exhaustive(2), 3])
def test_weights_and_optimizer_travel_between_stages_and_devices(zero_stage, tmp_path):
    """Saved by 3 ranks, loaded without a strategy and by 2 ranks of stage 3: weights, slots and the next step agree."""
    trained = trained_by_three(zero_stage)
    trained.save_weights(tmp_path / "model.weights.h5")
    trained.save(tmp_path / "model.keras")
    results = []
    for strategy in (one_device(), strategy_for(2, 3)):
        model = compiled(strategy)
        model.load_weights(tmp_path / "model.weights.h5")
        for mine, theirs in zip(model.get_weights(), trained.get_weights(), strict=True):
            np.testing.assert_array_equal(mine, theirs)
        with strategy.scope():
            model = keras.models.load_model(tmp_path / "model.keras", custom_objects={"ScaleAndShift": ScaleAndShift})
        for mine, theirs in zip(model.optimizer.variables, trained.optimizer.variables, strict=True):
            np.testing.assert_array_equal(mine.numpy(), theirs.numpy())
        results.append(model.train_on_batch(X[:BATCH], Y[:BATCH]))
    np.testing.assert_allclose(results[0], results[1], rtol=1e-5)


@STAGES
def test_get_set_weights_summary_and_numpy(zero_stage, capsys):
    model, plain = compiled(strategy_for(4 if zero_stage == 3 else 2, zero_stage)), compiled(one_device())
    for mine, theirs in zip(model.get_weights(), plain.get_weights(), strict=True):
        np.testing.assert_array_equal(mine, theirs)  # one seed, the same start at every stage and size
    new = [np.arange(w.size, dtype=w.dtype).reshape(w.shape) for w in plain.get_weights()]
    model.set_weights(new)
    for variable, value in zip(model.variables, new, strict=True):
        np.testing.assert_array_equal(variable.numpy(), value)
        assert tuple(variable.shape) == value.shape
    model.summary()
    assert f"{plain.count_params():,}" in capsys.readouterr().out


@STAGES
def test_tensorflow_checkpoint_round_trip(zero_stage, tmp_path):
    trained = trained_by_three(zero_stage)
    path = tf.train.Checkpoint(variables=[v.value for v in trained.variables]).save(tmp_path / "checkpoint")
    for strategy in (one_device(), strategy_for(2, 3)):
        model = compiled(strategy)
        tf.train.Checkpoint(variables=[v.value for v in model.variables]).restore(path)
        for mine, theirs in zip(model.get_weights(), trained.get_weights(), strict=True):
            np.testing.assert_array_equal(mine, theirs)


@pytest.mark.parametrize("zero_stage", [exhaustive(1), 3])
def test_callbacks_validation_and_history(zero_stage, tmp_path):
    model = compiled(strategy_for(2, zero_stage))
    callbacks = [
        keras.callbacks.ModelCheckpoint(tmp_path / "best.weights.h5", save_weights_only=True, monitor="val_loss"),
        keras.callbacks.EarlyStopping(patience=5),
        keras.callbacks.CSVLogger(tmp_path / "log.csv"),
        keras.callbacks.LearningRateScheduler(lambda epoch, rate: rate * 0.5),
    ]
    history = model.fit(X, Y, batch_size=BATCH, epochs=2, validation_data=(X, Y), verbose=0, callbacks=callbacks, shuffle=False)
    assert set(history.history) == {"loss", "accuracy", "val_loss", "val_accuracy", "learning_rate"}
    assert (tmp_path / "best.weights.h5").exists()
    assert (tmp_path / "log.csv").exists()
    np.testing.assert_allclose(float(model.optimizer.learning_rate.numpy()), 0.0025, rtol=1e-6)


@pytest.mark.parametrize("zero_stage", [exhaustive(0), 3])
def test_batches_that_do_not_divide_train(zero_stage):
    """A first batch of odd size and a partial last one: no error (their exact weighting has an issue of its own)."""
    model = compiled(strategy_for(2, zero_stage))
    history = model.fit(X[:25], Y[:25], batch_size=11, epochs=2, verbose=0)
    assert np.isfinite(history.history["loss"]).all()


def test_lazily_built_model_is_built_sharded_by_fit():
    model = compiled(strategy_for(2, 3), LazilyBuilt)
    sequences = np.random.default_rng(0).normal(size=(24, 7, 15)).astype("float32")
    model.fit(sequences, Y[:24], batch_size=BATCH, verbose=0)
    assert all(isinstance(v.value, ShardedVariable) for v in model.trainable_variables)
    # Keras makes these variables after it has left the layers: each layer's still travel together.
    gathers = {record.label.removesuffix("/backward") for record in model.distribute_strategy.last_plan.records[0]}
    assert len([label for label in gathers if label.startswith("unshard/")]) == 3


def test_model_built_lazily_inside_the_step():
    """Nothing is built before `strategy.run`: layers still travel one by one, and agree with one device."""
    sequences = np.random.default_rng(0).normal(size=(BATCH, 7, 15)).astype("float32")

    def train(strategy):
        keras.utils.set_random_seed(1)
        with strategy.scope():
            model, optimizer = LazilyBuilt(), keras.optimizers.SGD(0.1)

        def rank_step(x):
            with tf.GradientTape() as tape:
                loss = tf.reduce_sum(model(x) ** 2) / BATCH
            optimizer.apply(tape.gradient(loss, model.trainable_variables), model.trainable_variables)

        step = tf.function(lambda x: strategy.run(rank_step, args=(x,)))
        for x in strategy.experimental_distribute_dataset(tf.data.Dataset.from_tensors(sequences).repeat(6)):
            step(x)
        return model.get_weights()

    strategy = strategy_for(3, 3)
    for mine, theirs in zip(train(strategy), train(one_device()), strict=True):
        np.testing.assert_allclose(mine, theirs, rtol=1e-5, atol=1e-7)
    assert strategy.last_plan.counts() == {"all_gather": 4, "reduce_scatter": 3}


def test_steps_run_as_function_of_functions():
    """`tf.function(strategy.run)`, `strategy.run(tf.function)` and both agree."""
    results = []
    for form in range(3):
        keras.utils.set_random_seed(1)
        strategy = strategy_for(2, 3)
        with strategy.scope():
            model = mlp()
            optimizer = keras.optimizers.SGD(0.1)

        def rank_step(model=model, optimizer=optimizer):
            with tf.GradientTape() as tape:
                loss = tf.reduce_mean(model(X[:BATCH]) ** 2)
            optimizer.apply(tape.gradient(loss, model.trainable_variables), model.trainable_variables)
            return loss

        if form > 0:
            rank_step = tf.function(rank_step)
        step = functools.partial(strategy.run, rank_step)
        if form != 1:
            step = tf.function(step)
        results.append([float(strategy.reduce("MEAN", step(), axis=None)) for _ in range(3)])
    np.testing.assert_allclose(results[1], results[0], rtol=1e-6)
    np.testing.assert_allclose(results[2], results[0], rtol=1e-6)
    assert results[0][2] < results[0][0]


def test_two_tapes_and_two_optimizers_in_one_step():
    """A GAN's step: parameters are read under one tape, updated, and read again: each read sees the current value."""

    def train(strategy):
        keras.utils.set_random_seed(1)
        with strategy.scope():
            generator, critic = mlp(), mlp()
            optimizers = [keras.optimizers.SGD(0.05), keras.optimizers.SGD(0.05)]

        def rank_step(x):
            for model, other, optimizer in ((critic, generator, optimizers[0]), (generator, critic, optimizers[1])):
                with tf.GradientTape() as tape:
                    loss = tf.reduce_mean((model(x) - tf.stop_gradient(other(x)) - 1.0) ** 2)
                    loss /= strategy.num_replicas_in_sync
                optimizer.apply(tape.gradient(loss, model.trainable_variables), model.trainable_variables)
            return loss

        step = tf.function(lambda x: strategy.run(rank_step, args=(x,)))
        dataset = tf.data.Dataset.from_tensor_slices(X).batch(BATCH).repeat().take(6)
        for x in strategy.experimental_distribute_dataset(dataset):
            step(x)
        return [*generator.get_weights(), *critic.get_weights()]

    for mine, theirs in zip(train(strategy_for(2, 3)), train(one_device()), strict=True):
        np.testing.assert_allclose(mine, theirs, rtol=1e-5, atol=1e-7)


def test_gradient_penalty():
    """A gradient of a gradient through sharded parameters."""

    def train(strategy):
        keras.utils.set_random_seed(1)
        with strategy.scope():
            model = mlp()
            optimizer = keras.optimizers.SGD(0.05)

        rank_step = gradient_penalty(strategy, model, optimizer)
        step = tf.function(lambda x: strategy.run(rank_step, args=(x,)))
        dataset = tf.data.Dataset.from_tensor_slices(X).batch(BATCH).repeat().take(6)
        for x in strategy.experimental_distribute_dataset(dataset):
            step(x)
        return model.get_weights()

    for mine, theirs in zip(train(strategy_for(2, 3)), train(one_device()), strict=True):
        np.testing.assert_allclose(mine, theirs, rtol=1e-5, atol=1e-7)


def test_export_says_what_to_do():
    model = compiled(strategy_for(2, 3))
    with pytest.raises(NotImplementedError, match="SavedModel.*without a strategy"):
        tf.saved_model.save(tf.train.Checkpoint(v=model.variables[0].value), "/nonexistent")
