"""Several threads of one process that predict, read and train: a web service, actors that play while a learner trains."""

import concurrent.futures
import threading

import keras
import numpy as np
import pytest
import tensorflow as tf
from grids import exhaustive
from training import one_device, strategy_for

import tfdist

X = np.random.default_rng(1).normal(size=(12, 5)).astype("float32")
Y = np.random.default_rng(2).normal(size=(12, 1)).astype("float32")
THREADS = 4
STAGES = [0, exhaustive(1), exhaustive(2), 3]
EVERY_STAGE = pytest.mark.parametrize("stage", STAGES)

pytestmark = pytest.mark.timeout(120)


def small(strategy, seed=1, optimizer=None):
    keras.utils.set_random_seed(seed)
    with strategy.scope():
        model = keras.Sequential([keras.Input((5,)), keras.layers.Dense(64, activation="tanh"), keras.layers.Dense(1)])
        model.compile(optimizer or keras.optimizers.Adam(0.01), "mse")
    return model


def together(*functions):
    """Calls all at once, each in a thread, and returns what they return; raises what one raises."""
    barrier = threading.Barrier(len(functions))

    def called(function):
        barrier.wait(60)
        return function()

    with concurrent.futures.ThreadPoolExecutor(len(functions)) as threads:
        return [one.result(100) for one in [threads.submit(called, function) for function in functions]]


@EVERY_STAGE
def test_predicting(stage):
    model = small(strategy_for(2, stage))
    expected = model.predict(X, verbose=0)

    def serve():
        return [model.predict(X, batch_size=8, verbose=0) for _ in range(8)]

    for found in together(*[serve] * THREADS):
        for one in found:
            np.testing.assert_allclose(one, expected, rtol=1e-5)
    model.fit(X, Y, verbose=0)  # a step that failed would have failed all later ones


@EVERY_STAGE
@pytest.mark.parametrize("is_traced_before", [True, False])
def test_training_a_model_each(stage, is_traced_before):
    """Each comes to what it comes to alone."""
    strategy = strategy_for(2, stage)

    def fitted(model):
        model.fit(X, Y, batch_size=5, epochs=4, shuffle=False, verbose=0)
        return model.get_weights()

    expected = [fitted(small(strategy, seed)) for seed in range(3)]
    models = [small(strategy, seed) for seed in range(3)]
    if is_traced_before:
        models = [small(strategy, seed) for seed in range(3)]
        for model in models:
            before = model.get_weights()
            fitted(model)
            model.set_weights(before)
            for variable in model.optimizer.variables:
                variable.assign(keras.ops.zeros_like(variable) if variable is not model.optimizer._learning_rate else 0.01)
    found = together(*[lambda model=model: fitted(model) for model in models])
    for one, alone in zip(found, expected, strict=True):
        for value, expected_value in zip(one, alone, strict=True):
            np.testing.assert_allclose(value, expected_value, rtol=1e-5, atol=1e-7)


@EVERY_STAGE
def test_steps_of_one_function(stage):
    """A custom training loop in each of several threads: all steps count, none is half another's."""
    strategy = strategy_for(2, stage)
    model = small(strategy, optimizer=keras.optimizers.SGD(0.5))
    bias = model.layers[1].bias
    batch = strategy.experimental_distribute_values_from_function(lambda context: tf.ones((6, 5)))
    with strategy.scope():
        model.optimizer.build([bias])

    @tf.function
    def step(batch):
        def of_rank(x):
            with tf.GradientTape() as tape:
                loss = tf.reduce_sum(bias) * tf.reduce_sum(x) / 60
            model.optimizer.apply(tape.gradient(loss, [bias]), [bias])

        strategy.run(of_rank, args=(batch,))

    together(*[lambda: [step(batch) for _ in range(10)]] * THREADS)
    assert int(model.optimizer.iterations) == 10 * THREADS
    np.testing.assert_allclose(bias.numpy(), [-0.5 * 10 * THREADS], rtol=1e-6)


@pytest.mark.parametrize("way", ["eager", "traced", exhaustive("eager_function")])
def test_what_is_read_beside_a_step_is_of_one_moment(way):
    """At stage 3 a weight is put together of shards: all from before an update, or all from behind it."""
    strategy = strategy_for(4, 3)
    with strategy.scope():
        layer = keras.layers.Dense(1000)
        layer.build((None, 100))
    kernel = layer.kernel

    @tf.function
    def step(number):
        strategy.run(lambda: kernel.assign(tf.fill(kernel.shape, number)))

    read = {"eager": kernel.numpy, "traced": tf.function(lambda: tf.identity(kernel)), "eager_function": lambda: kernel + 0}[way]
    step(tf.constant(0.0)), read()
    is_over = threading.Event()

    def write():
        for number in range(1, 200):
            step(tf.constant(float(number)))
        is_over.set()

    def look():
        seen = []
        while not is_over.is_set():
            value = np.array(read())
            seen.append((value.min(), value.max()))
        return seen

    _, *found = together(write, look, look)
    for seen in found:
        assert all(low == high for low, high in seen), [pair for pair in seen if pair[0] != pair[1]][:3]
        assert len({low for low, _ in seen}) > 1


@EVERY_STAGE
def test_data_that_the_model_makes_while_it_trains(stage):
    """The step waits for a generator, which calls the model: whatever waits for a step must not wait for its data."""
    model = small(strategy_for(2, stage), optimizer=keras.optimizers.SGD(0.0))
    expected = model.predict(X, verbose=0)
    made = []

    def batches():
        for _ in range(6):
            made.append(model.predict(X, verbose=0))
            yield X, Y + model.predict_on_batch(X)

    spec = tf.TensorSpec((12, 5)), tf.TensorSpec((12, 1))
    model.fit(tf.data.Dataset.from_generator(batches, output_signature=spec), verbose=0)
    assert len(made) >= 6
    for one in made:
        np.testing.assert_allclose(one, expected, rtol=1e-5)


@pytest.mark.parametrize("way", ["argument", "closure", "within"])
def test_a_loop_whose_data_the_model_makes(way):
    """A step takes its data as an argument, from what its function closes over, or from an iterator there."""
    strategy = strategy_for(2, 3)
    model = small(strategy, optimizer=keras.optimizers.SGD(0.0))
    model.predict(X, verbose=0)

    def batches():
        for _ in range(4):
            yield model.predict(X, verbose=0)

    data = tf.data.Dataset.from_generator(batches, output_signature=tf.TensorSpec((12, 1)))
    iterator = iter(data if way == "within" else data.map(lambda y: y * 2.0))

    def of_rank(y):
        return tfdist.collectives.all_reduce(tf.reduce_sum(y), "data")

    @tf.function
    def step():
        if way == "within":
            return strategy.run(lambda: of_rank(tf.ones([3])) + (tf.reduce_sum(next(iterator)) if replica() == 0 else 0.0))
        y = next(iterator)
        return strategy.run(of_rank, args=(y,)) if way == "argument" else strategy.run(lambda: of_rank(y))

    def replica():
        return tfdist.collectives.current_program().rank

    for _ in range(3):
        assert np.isfinite(strategy.experimental_local_results(step())[0].numpy())


@EVERY_STAGE
@pytest.mark.parametrize("is_eager", [False, exhaustive(True)])
def test_training_while_others_evaluate(stage, is_eager):
    model = small(strategy_for(2, stage))
    other = small(strategy_for(2, stage))
    other.evaluate(X, Y, verbose=0)
    if is_eager:
        model.compile("adam", "mse", run_eagerly=True)
    model.fit(X, Y, verbose=0)
    expected = other.evaluate(X, Y, verbose=0)

    def train():
        model.fit(X, Y, batch_size=6, epochs=5, verbose=0)

    def evaluate():
        return [other.evaluate(X, Y, batch_size=7, verbose=0) for _ in range(5)]

    _, found = together(train, evaluate)
    np.testing.assert_allclose(found, expected, rtol=1e-5)


@pytest.mark.parametrize("stage", [0, 3])
def test_python_code_of_a_step_that_runs_another(stage):
    """It would wait for ever; what the error names in its place is one device's."""

    def fitted(strategy, way):
        other = small(strategy, seed=2)
        outputs = {"step": lambda x: other.predict_on_batch(x.numpy()), "model": other}[way]

        class Helped(keras.Model):
            def __init__(self):
                super().__init__()
                self.dense = keras.layers.Dense(1)

            def call(self, x):
                helped = tf.py_function(outputs, [x], tf.float32)
                return self.dense(x) + tf.stop_gradient(tf.ensure_shape(helped, (None, 1)))

        keras.utils.set_random_seed(3)
        with strategy.scope():
            model = Helped()
            model.compile(keras.optimizers.SGD(0.1), "mse")
        model.fit(X, Y, batch_size=6, shuffle=False, verbose=0)
        return model.get_weights()

    with pytest.raises(tf.errors.OpError, match="runs another step, which waits for the end of the first"):
        fitted(strategy_for(2, stage), "step")
    for found, expected in zip(fitted(strategy_for(2, stage), "model"), fitted(one_device(), "step"), strict=True):
        np.testing.assert_allclose(found, expected, rtol=1e-5, atol=1e-6)
