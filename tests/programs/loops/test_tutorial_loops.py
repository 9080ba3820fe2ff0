"""Custom training loops, as TensorFlow's tutorials write them for `tf.distribute`, and plain ones around them."""

import keras
import numpy as np
import pytest
import tensorflow as tf
from grids import exhaustive
from keras import layers, ops

from tests.programs.comparing import STAGES, assert_as_on_one_device

pytestmark = pytest.mark.as_traced

ROWS, BATCH = 24, 8


def rng():
    return np.random.default_rng(17)


def mlp(units=3):
    return keras.Sequential([keras.Input((5,)), layers.Dense(6, "tanh"), layers.Dense(units)])


def left(model, *optimizers):
    slots = [variable.numpy() for optimizer in optimizers for variable in optimizer.variables]
    return {"weights": model.get_weights(), "slots": slots}


def rows(r, classes=3):
    return r.normal(size=(ROWS, 5)).astype("float32"), r.integers(0, classes, size=ROWS)


def custom_training(strategy):
    """TensorFlow's "custom training with tf.distribute.Strategy": losses divided by the global batch, metrics in scope."""
    x, y = rows(rng())
    train = strategy.experimental_distribute_dataset(tf.data.Dataset.from_tensor_slices((x, y)).batch(BATCH))
    with strategy.scope():
        model, optimizer = mlp(), keras.optimizers.Adam(0.01, epsilon=1e-3)
        accuracy, test_loss = keras.metrics.SparseCategoricalAccuracy(), keras.metrics.Mean()
        loss_object = keras.losses.SparseCategoricalCrossentropy(from_logits=True, reduction=None)
        optimizer.build(model.trainable_variables)

    def train_step(inputs):
        features, labels = inputs
        with tf.GradientTape() as tape:
            predictions = model(features, training=True)
            loss = tf.nn.compute_average_loss(loss_object(labels, predictions), global_batch_size=BATCH)
            loss += tf.nn.scale_regularization_loss(0.01 * tf.add_n([tf.nn.l2_loss(w) for w in model.trainable_variables]))
        gradients = tape.gradient(loss, model.trainable_variables)
        optimizer.apply_gradients(zip(gradients, model.trainable_variables, strict=True))
        accuracy.update_state(labels, predictions)
        return loss

    @tf.function
    def distributed(inputs):
        return strategy.reduce(tf.distribute.ReduceOp.SUM, strategy.run(train_step, args=(inputs,)), axis=None)

    @tf.function
    def tested(inputs):
        strategy.run(lambda features, labels: test_loss.update_state(loss_object(labels, model(features))), args=inputs)

    losses, accuracies = [], []
    for _ in range(2):
        losses += [float(distributed(inputs)) for inputs in train]
        accuracies.append(float(accuracy.result()))
        accuracy.reset_state()
    for inputs in train:
        tested(inputs)
    return {"losses": losses, "accuracies": accuracies, "tested": float(test_loss.result()), **left(model, optimizer)}


def loop_in_the_graph(strategy):
    """Steps in a `for` over the distributed dataset inside one `tf.function`."""
    x, y = rows(rng())
    train = strategy.experimental_distribute_dataset(tf.data.Dataset.from_tensor_slices((x, y)).batch(BATCH))
    with strategy.scope():
        model, optimizer = mlp(), keras.optimizers.SGD(0.1, momentum=0.9)
        loss_object = keras.losses.SparseCategoricalCrossentropy(from_logits=True, reduction="sum")
        optimizer.build(model.trainable_variables)

    def step(features, labels):
        with tf.GradientTape() as tape:
            loss = loss_object(labels, model(features, training=True)) / BATCH
        optimizer.apply(tape.gradient(loss, model.trainable_variables), model.trainable_variables)
        return loss

    @tf.function
    def epoch(iterator):
        total = 0.0
        for _ in range(ROWS // BATCH):
            total += strategy.reduce("SUM", strategy.run(step, args=next(iterator)), axis=None)
        return total

    return {"losses": [float(epoch(iter(train))) for _ in range(2)], **left(model, optimizer)}


def plain_loop(strategy):
    """A tutorial's eager loop with no `strategy.run`: whole batches, whole gradients."""
    x, y = rows(rng())
    with strategy.scope():
        model, optimizer = mlp(), keras.optimizers.Adam(0.01, epsilon=1e-3)
        loss_object = keras.losses.SparseCategoricalCrossentropy(from_logits=True)
    losses = []
    for start in range(0, ROWS, BATCH):
        with tf.GradientTape() as tape:
            loss = loss_object(y[start : start + BATCH], model(x[start : start + BATCH], training=True))
        gradients = tape.gradient(loss, model.trainable_weights)
        optimizer.apply(gradients, model.trainable_weights)
        losses.append(float(loss))
    return {"losses": losses, **left(model, optimizer)}


def traced_loop(strategy):
    """The same in a `tf.function`, as "writing a training loop from scratch" has it, with a metric that is updated in it."""
    x, y = rows(rng())
    with strategy.scope():
        model, optimizer = mlp(), keras.optimizers.SGD(0.1, momentum=0.9)
        metric = keras.metrics.SparseCategoricalAccuracy()
        optimizer.build(model.trainable_variables)
    loss_object = keras.losses.SparseCategoricalCrossentropy(from_logits=True)

    @tf.function
    def step(features, labels):
        with tf.GradientTape() as tape:
            logits = model(features, training=True)
            loss = loss_object(labels, logits)
        gradients = tape.gradient(loss, model.trainable_weights)
        optimizer.apply_gradients(zip(gradients, model.trainable_weights, strict=True))
        metric.update_state(labels, logits)
        return loss

    losses = [float(step(x[i : i + BATCH], y[i : i + BATCH])) for i in range(0, ROWS, BATCH)]
    return {"losses": losses, "accuracy": float(metric.result()), **left(model, optimizer)}


def policy_gradients(strategy):
    """REINFORCE: actions by eager calls, one step on whole gradients at the end of an episode."""
    r = rng()
    with strategy.scope():
        model, optimizer = mlp(2), keras.optimizers.Adam(0.02, epsilon=1e-3)
    returns = []
    for _ in range(3):
        states, actions, total, here = [], [], 0.0, r.normal(size=5).astype("float32")
        for _ in range(4):
            probabilities = ops.convert_to_numpy(ops.softmax(model(here[None]))[0])
            action = int(r.uniform() < probabilities[1])
            states.append(here)
            actions.append(action)
            here = (0.7 * here + 0.3 * (1 if action else -1)).astype("float32")
            total += float(here.sum())
        with tf.GradientTape() as tape:
            log_probabilities = ops.log_softmax(model(np.stack(states)))
            loss = -total * ops.mean(ops.sum(log_probabilities * ops.one_hot(np.array(actions), 2), axis=-1))
        optimizer.apply_gradients(zip(tape.gradient(loss, model.trainable_variables), model.trainable_variables, strict=True))
        returns.append(total)
    return {"returns": returns, **left(model, optimizer)}


def deep_q_learning(strategy):
    """A target network that is copied with `set_weights`, `train_on_batch`-like steps, `predict` for the targets."""
    r = rng()
    with strategy.scope():
        model, target, optimizer = mlp(2), mlp(2), keras.optimizers.Adam(0.02, epsilon=1e-3)
    target.set_weights(model.get_weights())
    losses = []
    for step in range(4):
        states, following = (r.normal(size=(6, 5)).astype("float32") for _ in range(2))
        rewards, actions = r.normal(size=6).astype("float32"), r.integers(0, 2, size=6)
        wanted = rewards + 0.9 * target.predict(following, verbose=0).max(axis=1)
        with tf.GradientTape() as tape:
            chosen = ops.sum(model(states) * ops.one_hot(actions, 2), axis=1)
            loss = ops.mean(keras.losses.huber(wanted[:, None], chosen[:, None]))
        gradients = tape.gradient(loss, model.trainable_variables)
        optimizer.apply_gradients(zip(gradients, model.trainable_variables, strict=True))
        losses.append(float(loss))
        if step % 2:
            target.set_weights(model.get_weights())
    return {"losses": losses, **left(model, optimizer)}


def reptile(strategy):
    """Few-shot learning: inner steps by an optimizer, then the weights move a part of the way, by `set_weights`."""
    r = rng()
    with strategy.scope():
        model, optimizer = mlp(), keras.optimizers.SGD(0.05)
    for _ in range(2):
        before = model.get_weights()
        x, y = rows(r)
        for start in range(0, ROWS, BATCH):
            with tf.GradientTape() as tape:
                loss = keras.losses.sparse_categorical_crossentropy(
                    y[start : start + BATCH], ops.softmax(model(x[start : start + BATCH]))
                )
            optimizer.apply(tape.gradient(loss, model.trainable_weights), model.trainable_weights)
        model.set_weights([old + 0.5 * (new - old) for old, new in zip(before, model.get_weights(), strict=True)])
    return left(model, optimizer)


def saliency(strategy):
    """Gradients for inputs, for a hidden layer's output (Grad-CAM), and for weights, of a fitted model."""
    x, y = rows(rng())
    with strategy.scope():
        inputs = keras.Input((5,))
        hidden = layers.Dense(6, "tanh", name="hidden")(inputs)
        model = keras.Model(inputs, layers.Dense(3)(hidden))
        model.compile("sgd", keras.losses.SparseCategoricalCrossentropy(from_logits=True))
    model.fit(x, y, batch_size=BATCH, shuffle=False, verbose=0)
    inner = keras.Model(model.inputs, [model.get_layer("hidden").output, model.output])
    features = tf.constant(x[:3])
    with tf.GradientTape(persistent=True) as tape:
        tape.watch(features)
        middle, outputs = inner(features)
        score = ops.sum(outputs[:, 0])
    weights = model.trainable_weights
    found = [tape.gradient(score, features), tape.gradient(score, middle), *tape.gradient(score, weights)]
    return {"gradients": [np.asarray(gradient) for gradient in found]}


def neural_style(strategy):
    """An image is optimized, by a frozen network and a `tf.Variable` of one's own."""
    r = rng()
    with strategy.scope():
        network = keras.Sequential([keras.Input((6, 6, 1)), layers.Conv2D(3, 3, activation="relu"), layers.Flatten()])
    network.trainable = False
    image, wanted = tf.Variable(r.uniform(size=(1, 6, 6, 1)).astype("float32")), r.uniform(size=(1, 48)).astype("float32")
    losses = []
    for _ in range(3):
        with tf.GradientTape() as tape:
            loss = ops.mean((network(image) - wanted) ** 2)
        image.assign_sub(0.5 * tape.gradient(loss, image))
        losses.append(float(loss))
    return {"losses": losses, "image": image.numpy()}


def fine_tuning(strategy):
    """A backbone is trained, frozen under a new head, then unfrozen with a small rate."""
    r = rng()
    x, y = rows(r)
    z = r.normal(size=(ROWS, 2)).astype("float32")
    with strategy.scope():
        backbone = keras.Sequential([keras.Input((5,)), layers.Dense(6, "tanh"), layers.Dense(4, "tanh")])
        first = keras.Sequential([backbone, layers.Dense(3)])
        first.compile("adam", keras.losses.SparseCategoricalCrossentropy(from_logits=True))
    histories = [first.fit(x, y, batch_size=BATCH, shuffle=False, verbose=0).history]
    backbone.trainable = False
    with strategy.scope():
        second = keras.Sequential([backbone, layers.Dense(2)])
        second.compile(keras.optimizers.SGD(0.1), "mse")
    histories.append(second.fit(x, z, batch_size=BATCH, shuffle=False, verbose=0).history)
    backbone.trainable = True
    with strategy.scope():
        second.compile(keras.optimizers.SGD(0.01), "mse")
    histories.append(second.fit(x, z, batch_size=BATCH, shuffle=False, verbose=0).history)
    return {"histories": histories, **left(second, second.optimizer)}


def text_generation(strategy):
    """A language model is trained, then asked for one token after the other by eager calls."""
    r = rng()
    ids = r.integers(0, 7, size=(ROWS, 6))
    with strategy.scope():
        x = keras.Input((None,), dtype="int64")
        hidden = layers.GRU(4, return_sequences=True)(layers.Embedding(7, 3)(x))
        model = keras.Model(x, layers.Dense(7)(hidden))
        model.compile(keras.optimizers.SGD(0.5), keras.losses.SparseCategoricalCrossentropy(from_logits=True))
    history = model.fit(ids[:, :-1], ids[:, 1:], batch_size=BATCH, epochs=2, shuffle=False, verbose=0).history
    text = [1]
    for _ in range(4):
        text.append(int(ops.argmax(model(np.array([text]))[0, -1])))
    return {"history": history, "text": text, **left(model, model.optimizer)}


PROGRAMS = [
    custom_training,
    loop_in_the_graph,
    plain_loop,
    traced_loop,
    policy_gradients,
    deep_q_learning,
    reptile,
    saliency,
    neural_style,
    fine_tuning,
    text_generation,
]


@pytest.mark.parametrize("program", [exhaustive(program) for program in PROGRAMS])
@pytest.mark.parametrize("zero_stage", STAGES)
def test_it_is_as_on_one_device(program, zero_stage):
    assert_as_on_one_device(program, zero_stage, rtol=1e-4)
