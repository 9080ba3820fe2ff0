"""Random numbers that a program draws without a seed of its own, in layers, losses and steps: each rank its own, reproducible."""

import keras
import numpy as np
import pytest
import tensorflow as tf
from grids import exhaustive
from keras import layers
from ranks import run as run_on_ranks
from ranks import strategy_on
from training import one_device, strategy_for

pytestmark = [pytest.mark.as_traced, pytest.mark.timeout(200)]

RNG = np.random.default_rng(2)
X = RNG.normal(size=(20, 6)).astype("float32")


def global_state():
    """Returns the state of Keras's global generator, drawn from by the last line of a program."""
    keras.random.uniform(())
    return keras.src.random.seed_generator.global_seed_generator().state.numpy()


class Sampling(layers.Layer):
    """That of Keras's guide to variational autoencoders, without its seed."""

    def call(self, inputs):
        mean, log_variance = inputs
        epsilon = keras.random.normal(shape=keras.ops.shape(mean))
        return mean + keras.ops.exp(0.5 * log_variance) * epsilon


def vae():
    inputs = keras.Input((6,))
    hidden = layers.Dense(5, activation="relu")(inputs)
    latent = Sampling()([layers.Dense(2)(hidden), layers.Dense(2)(hidden)])
    return keras.Model(inputs, layers.Dense(6)(latent))


def in_fit(strategy, **compiled):
    with strategy.scope():
        model = vae()
        model.compile(keras.optimizers.SGD(0.1), "mse", **compiled)
    history = model.fit(X, X, batch_size=8, epochs=2, validation_data=(X, X), verbose=0, shuffle=False).history
    predicted = model.predict(X, batch_size=8, verbose=0)
    eager = model(X[:4]).numpy()
    return {"history": history, "weights": model.get_weights(), "predicted": predicted, "eager": eager, "state": global_state()}


def in_a_loop_of_ones_own(strategy):
    """Also in a step that draws outside layers, and with a generator that was drawn from before the strategy was there."""
    first = keras.random.normal((3,)).numpy()
    with strategy.scope():
        model = vae()
        optimizer = keras.optimizers.Adam(0.01)

    def step_on_rank(x):
        noise = keras.random.uniform(tf.shape(x), -0.1, 0.1)
        with tf.GradientTape() as tape:
            loss = keras.losses.MeanSquaredError()(x, model(x + noise, training=True))
        optimizer.apply(tape.gradient(loss, model.trainable_variables), model.trainable_variables)
        return loss

    @tf.function
    def step(x):
        return strategy.reduce("SUM", strategy.run(step_on_rank, args=(x,)), axis=None)

    dataset = tf.data.Dataset.from_tensor_slices(X).batch(8)
    losses = [float(step(x)) for x in strategy.experimental_distribute_dataset(dataset)]
    return {"first": first, "losses": losses, "weights": model.get_weights(), "state": global_state()}


def seeded(program, strategy, seed=3, **settings):
    keras.backend.clear_session()
    keras.utils.set_random_seed(seed)
    return program(strategy, **settings)


def flat(tree):
    return np.concatenate([np.ravel(np.asarray(leaf, "float64")) for leaf in tf.nest.flatten(tree)])


CASES = [
    (in_fit, 3, {}),
    exhaustive(in_a_loop_of_ones_own, 0, {}),
    exhaustive(in_fit, 0, {"run_eagerly": True}),
    exhaustive(in_fit, 2, {"steps_per_execution": 2}),
    exhaustive(in_a_loop_of_ones_own, 3, {}),
    exhaustive(in_fit, 1, {}),
]


@pytest.mark.parametrize(("program", "zero_stage", "settings"), CASES)
def test_reproducible_and_as_many_draws_as_on_one_device(program, zero_stage, settings):
    one, again, other = (seeded(program, strategy_for(2, zero_stage), seed, **settings) for seed in (3, 3, 4))
    np.testing.assert_array_equal(flat(one), flat(again))
    assert not np.allclose(flat(one), flat(other))
    alone = seeded(program, one_device(), **settings)
    np.testing.assert_array_equal(one["state"], alone["state"])
    assert [weight.shape for weight in one["weights"]] == [weight.shape for weight in alone["weights"]]


KERAS = {
    "normal": lambda: keras.random.normal((2000,)),
    "uniform": lambda: keras.random.uniform((2000,)),
    "truncated_normal": lambda: keras.random.truncated_normal((2000,)),
    "randint": lambda: keras.ops.cast(keras.random.randint((2000,), 0, 100), "float32") / 100.0,
    "dropout": lambda: keras.random.dropout(tf.ones((2000,)), 0.5),
    "shuffle": lambda: keras.random.shuffle(tf.range(2000.0) / 2000.0),
    "categorical": lambda: keras.ops.cast(keras.random.categorical(tf.zeros((1, 9)), 2000)[0], "float32"),
    "gamma": lambda: keras.random.gamma((2000,), 2.0),
    "beta": lambda: keras.random.beta((2000,), 2.0, 3.0),
    "binomial": lambda: keras.random.binomial((2000,), 10.0, 0.5),
    "in a loop": lambda: tf.map_fn(lambda x: keras.random.normal((100,)), tf.zeros((20,)), parallel_iterations=1),
}
TENSORFLOW = {
    "tf normal": lambda: tf.random.normal((2000,)),
    "tf uniform": lambda: tf.random.uniform((2000,)),
    "tf uniform with a seed": lambda: tf.random.uniform((2000,), seed=5),
    "tf dropout": lambda: tf.nn.dropout(tf.ones((2000,)), 0.5),
    "tf shuffle": lambda: tf.random.shuffle(tf.range(2000.0) / 2000.0),
    "tf categorical": lambda: tf.cast(tf.random.categorical(tf.zeros((1, 9)), 2000)[0], tf.float32),
    "tf in a loop": lambda: tf.map_fn(lambda x: tf.random.normal((100,)), tf.zeros((20,)), parallel_iterations=1),
}


@pytest.mark.parametrize("kind", ["keras", "tensorflow"])
def test_functions(kind):
    """Every rank draws its own numbers, of one device's distribution; twice the same from one seed; tensor peers alike."""
    functions = KERAS if kind == "keras" else TENSORFLOW

    def draw():
        return {name: function() for name, function in functions.items()}

    def drawn(strategy):
        keras.utils.set_random_seed(7)
        return run_on_ranks(strategy, draw)

    keras.utils.set_random_seed(7)
    alone = {name: value.numpy() for name, value in tf.function(draw)().items()}
    first, peer, second, its_peer = drawn(strategy_on(4, tensor_parallel_size=2, zero_stage=0))
    data = drawn(strategy_on(2, zero_stage=0))
    for name, value in alone.items():
        np.testing.assert_array_equal(first[name], peer[name], name)
        np.testing.assert_array_equal(second[name], its_peer[name], name)
        assert not np.array_equal(first[name], second[name]), name
        assert abs(second[name].mean() - value.mean()) < 5 * (value.std() + 1e-6) / 40, name
        correlation = np.corrcoef(first[name].ravel(), second[name].ravel())[0, 1]
        assert abs(correlation) < 0.12, f"{name}: {correlation}"
        for rank, of_rank in enumerate((first, second)):
            np.testing.assert_array_equal(data[rank][name], of_rank[name], name)
        np.testing.assert_array_equal(first[name], value, f"{name}: rank 0 draws what one device does")


def test_a_layer_made_outside_the_scope():
    """Its generator's state is one plain variable, which each rank would move on."""
    found = []
    for strategy in (strategy_for(2, 0), one_device()):
        keras.utils.set_random_seed(1)
        dropout = layers.Dropout(0.5)
        with strategy.scope():
            model = keras.Sequential([keras.Input((64,)), dropout])
        step = tf.function(lambda strategy=strategy, model=model: strategy.run(lambda: model(tf.ones((2, 64)), training=True)))
        masks = [[part.numpy() for part in strategy.experimental_local_results(step())] for _ in range(3)]
        found.append((masks, dropout.seed_generator.state.numpy()))
    (masks, state), (alone, expected) = found
    np.testing.assert_array_equal(state, expected)
    for (first, second), (mask,) in zip(masks, alone, strict=True):
        np.testing.assert_array_equal(first, mask)
        assert not np.array_equal(first, second)
