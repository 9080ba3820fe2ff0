"""What the workers of the multi-worker tests run. One launch runs many cases: starting TensorFlow costs more than they do."""

from __future__ import annotations

import contextlib
import gc
from typing import Any

import keras
import numpy as np
import tensorflow as tf

import tfdist
from tests import training
from tests.parity import optimizer_cases


def adam() -> keras.optimizers.Optimizer:
    return keras.optimizers.Adam(0.01)


def as_numbers(trained: training.Trained) -> dict[str, Any]:
    return {"losses": trained.losses, "weights": trained.weights, "slots": trained.slots}


def dropout_masks(strategy: Any) -> list[np.ndarray]:
    """Returns the masks that the local ranks draw in the second of two steps."""
    keras.utils.set_random_seed(5)
    with strategy.scope():
        layer = keras.layers.Dropout(0.5)
    step = tf.function(lambda: strategy.run(lambda: layer(tf.ones([2, 9]), training=True)), autograph=False)
    step()
    return [mask.numpy() for mask in strategy.experimental_local_results(step())]


def train_grid(loops: dict[int, list[str]]) -> dict[tuple[int, str], Any]:
    """Trains the same model with each stage, through its loops of `tests.training`; and draws dropout masks.

    At stage 3 `fit` gathers layer by layer, the loop all layers together.
    """
    found = {}
    for stage, names in loops.items():
        for name in names:
            strategy = tfdist.MultiWorkerShardedStrategy(zero_stage=stage, group_bytes=0 if name == "fit" else 2**20)
            found[stage, name] = as_numbers(getattr(training, name)(strategy, training.small, adam))
            gc.freeze()  # as after every test: see conftest.py
        found[stage, "masks"] = dropout_masks(strategy)
    return found


def train_in_groups(loops: dict[int, list[str]], settings: dict[str, Any]) -> dict[tuple[int, str], Any]:
    """As `train_grid`, with `settings` of sharding groups; and what the first local rank sends, and that between hosts."""
    found = {}
    for stage, names in loops.items():
        for name in names:
            strategy = tfdist.MultiWorkerShardedStrategy(zero_stage=stage, **settings)
            numbers = as_numbers(getattr(training, name)(strategy, training.small, adam))
            plan = strategy.last_plan
            found[stage, name] = numbers, plan.sent_bytes(), plan.sent_bytes(between_hosts=True)
            gc.freeze()  # as after every test: see conftest.py
    return found


def normalise(strategy: Any) -> dict[str, Any]:
    """Trains with BatchNormalization, synchronized and not, on batches of 9 and 1: ranks with fewer rows, or none."""
    x, y = training.vectors(37)
    found = {}
    for synchronized in (True, False):
        keras.utils.set_random_seed(5)
        with strategy.scope():
            normalization = keras.layers.BatchNormalization(synchronized=synchronized, momentum=0.8)
            model = keras.Sequential([keras.Input(x.shape[1:]), normalization, training.small()])
            model.compile(adam(), training.loss_function())
        history = model.fit(x, y, batch_size=9, epochs=2, shuffle=False, verbose=0).history
        found[f"moving mean, synchronized={synchronized}"] = normalization.moving_mean.numpy()
        if synchronized:  # else one device normalises over other examples
            found["losses"], found["weights"] = history["loss"], model.get_weights()
    return found


def train_optimizers(zero_stages: list[int], names: list[str]) -> dict[str, dict[str, Any]]:
    """Trains rows of the optimizers' table, at the stages in turns, and the row that overflows; see `loop_of`."""
    found = {}
    for place, name in enumerate(names):
        strategy = tfdist.MultiWorkerShardedStrategy(zero_stage=zero_stages[place % len(zero_stages)])
        found[name] = as_numbers(optimizer_cases.train(name, optimizer_cases.loop_of(name), strategy))
        gc.freeze()  # as after every test: see conftest.py
    for stage in zero_stages:
        strategy = tfdist.MultiWorkerShardedStrategy(zero_stage=stage)
        found[f"overflow {stage}"] = as_numbers(optimizer_cases.train_overflowing(strategy, accumulates=stage == 1))
    return found


def asked(strategy: Any) -> keras.Model:
    keras.utils.set_random_seed(5)
    with strategy.scope():
        model = training.small()
        model.compile(adam(), training.loss_function(), metrics=["accuracy"])
    return model


def fit_in_all_ways(strategy: Any) -> dict[str, Any]:
    """Batches of 8 and 5, of 9 x 4 and 1: some ranks get fewer rows, or none. Data of known and of unknown length."""
    x, y = training.vectors(37)
    weights = np.linspace(0.1, 2.0, 37).astype("float32")
    model = asked(strategy)
    found: dict[str, Any] = {}
    history = model.fit(x, y, sample_weight=weights, batch_size=8, epochs=2, validation_data=(x, y), shuffle=True, verbose=0)
    found["history"] = history.history
    found["logs of batches"] = []
    record = keras.callbacks.LambdaCallback(on_train_batch_end=lambda _, logs: found["logs of batches"].append(dict(logs)))
    found["fit, last batch of 1"] = model.fit(x, y, batch_size=9, callbacks=[record], verbose=0).history
    dataset = tf.data.Dataset.from_tensor_slices((x, y)).shuffle(37).batch(8).prefetch(2)
    found["shuffled dataset"] = model.fit(dataset, epochs=2, verbose=0).history
    found["steps"] = model.fit(dataset.repeat(), steps_per_epoch=3, epochs=2, verbose=0).history
    found["slots"] = [variable.numpy() for variable in model.optimizer.variables]
    # Last, because Keras on one device counts one step too many when such data run out.
    unknown = tf.data.Dataset.from_tensor_slices((x, y)).batch(8).filter(lambda features, labels: True)
    found["unknown length"] = model.fit(unknown, verbose=0).history
    return {**found, "weights": model.get_weights()}


def ask_batches(strategy: Any) -> dict[str, Any]:
    """Evaluates batches of 16, 16 and 5, predicts of 9 x 4 and 1; and what is asked for one batch."""
    x, y = training.vectors(37)
    model = asked(strategy)
    found: dict[str, Any] = {}
    found["evaluate"] = model.evaluate(x, y, batch_size=16, verbose=0, return_dict=True)
    found["predict"] = model.predict(x, batch_size=9, verbose=0)
    found["train_on_batch"] = model.train_on_batch(x[:8], y[:8], return_dict=True)
    found["test_on_batch"] = model.test_on_batch(x[:8], y[:8], return_dict=True)
    found["counted"] = [variable.numpy() for variable in model.metrics_variables]
    found["predict_on_batch"] = model.predict_on_batch(x[:8])
    found["weights"] = model.get_weights()
    model.set_weights([weight * 0.5 for weight in found["weights"]])
    found["half the weights"] = model.get_weights()
    found["slots"] = [variable.numpy() for variable in model.optimizer.variables]
    return found


class NoCall(keras.Model):
    """Built in the first step: layers, the optimizer's slots and metrics. It draws without a seed."""

    def __init__(self) -> None:
        super().__init__()
        self.hidden, self.head = keras.layers.Dense(9, activation="tanh"), keras.layers.Dense(training.CLASSES)

    def train_step(self, data: Any) -> dict[str, tf.Tensor]:
        x, y = data
        noise = 0.0 * keras.random.normal(tf.shape(x))
        with tf.GradientTape() as tape:
            y_pred = self.head(self.hidden(x + noise))
            loss = self.compute_loss(y=y, y_pred=y_pred)
        weights = self.trainable_variables
        self.optimizer.apply(tape.gradient(loss, weights), weights)
        return self.compute_metrics(x, y, y_pred) | {"loss": loss}


def make_in_steps(strategy: Any) -> dict[str, Any]:
    """A model that is built in its first step, compiled outside the scope; and numbers that are drawn without a seed."""
    x, y = training.vectors(37)
    keras.utils.set_random_seed(5)
    with strategy.scope():
        model = NoCall()
    model.compile(adam(), training.loss_function(), metrics=["accuracy"])
    found: dict[str, Any] = {"history": model.fit(x, y, batch_size=8, epochs=2, shuffle=False, verbose=0).history}
    found["weights"] = model.get_weights()

    @tf.function
    def draw() -> tf.Tensor:
        def on_rank() -> tf.Tensor:
            return tf.stack([keras.random.normal((3,)), tf.random.normal((3,)), tf.random.normal((3,), seed=7)])

        return strategy.gather(strategy.run(on_rank), axis=0)

    drawn = draw().numpy()
    assert len(np.unique(drawn)) == 9 * strategy.num_replicas_in_sync, "ranks draw alike"
    found["of the first rank"] = drawn[:3]
    found["drawn after it"] = keras.random.normal((3,)).numpy()
    return found


def call_between_steps(strategy: Any) -> dict[str, Any]:
    """Eager calls, gradients and numbers between steps, outside `strategy.run`: all workers read, and see what changes."""
    x, y = training.vectors(8)
    model = asked(strategy)
    weights = model.trainable_variables
    gathered = getattr(strategy, "gathered", lambda *what: contextlib.nullcontext())

    def look() -> dict[str, Any]:
        with tf.GradientTape() as outer:
            with tf.GradientTape() as inner:
                loss = tf.reduce_mean(model(x) ** 2)
            gradients = inner.gradient(loss, weights)
            norm = tf.linalg.global_norm(gradients)
        products = [tf.convert_to_tensor(product).numpy() for product in outer.gradient(norm, weights)]
        numbers = [int(model.optimizer.iterations), float(model.optimizer.learning_rate), np.array(weights[0].value)]
        return {"gradients": [g.numpy() for g in gradients], "products": products, "numbers": numbers, "loss": float(loss)}

    found: dict[str, Any] = {"before": look()}
    with gathered(model):
        found["gathered"] = look()
        model.train_on_batch(x, y)
        found["after a step"] = look()
        weights[0].assign(0.5 * weights[0])
        found["after an assignment"] = look()
    found["after it"] = look()
    with strategy.scope():
        found["in scope"] = look()
    return {**found, "traced": [g.numpy() for g in tf.function(lambda: _gradients(model, x))()]}


def _gradients(model: keras.Model, x: np.ndarray) -> list[tf.Tensor]:
    with tf.GradientTape() as tape:
        loss = tf.reduce_mean(model(x) ** 2)
    return tape.gradient(loss, model.trainable_variables)


METHODS = {
    "fit": fit_in_all_ways,
    "batches": ask_batches,
    "normalise": normalise,
    "steps": make_in_steps,
    "between": call_between_steps,
}


def ask_models(methods: dict[int, list[str]]) -> dict[tuple[int, str], dict[str, Any]]:
    """Goes through methods of a compiled model on data that do not divide, by the stage; one device is asked the same."""
    found = {}
    for stage, names in methods.items():
        strategy = tfdist.MultiWorkerShardedStrategy(zero_stage=stage)
        for name in names:
            found[stage, name] = METHODS[name](strategy)
            assert not strategy.extended.communicator.running(), "also after data that ran out"
            gc.freeze()  # as after every test: see conftest.py
    return found


def read_own_parts(zero_stage: int) -> dict[str, Any]:
    """Trains on data that each worker reads on its own, of different length, with a custom loop."""
    strategy = tfdist.MultiWorkerShardedStrategy(zero_stage=zero_stage)
    x, y = training.vectors(20)

    def own_part(context: tf.distribute.InputContext) -> tf.data.Dataset:
        rows = slice(0, 12) if context.input_pipeline_id == 0 else slice(12, 20)
        return tf.data.Dataset.from_tensor_slices((x[rows], y[rows])).batch(4)

    keras.utils.set_random_seed(5)
    with strategy.scope():
        model = training.mlp()
        optimizer = adam()
    loss_of = training.loss_function()  # a mean: over the rows of all workers

    @tf.function
    def step(features, labels):
        def on_rank(features, labels):
            with tf.GradientTape() as tape:
                loss = loss_of(labels, model(features, training=True))
            optimizer.apply(tape.gradient(loss, model.trainable_variables), model.trainable_variables)
            return loss

        return strategy.reduce("SUM", strategy.run(on_rank, args=(features, labels)), axis=None)

    losses = [float(step(*batch)) for batch in strategy.distribute_datasets_from_function(own_part)]
    found = {"losses": losses, "weights": model.get_weights()}
    with strategy.scope():
        model.compile(adam(), training.loss_function(), metrics=["accuracy"])
    rows = slice(0, 4) if strategy.cluster.task.index == 0 else slice(4, 8)
    found["logs"] = model.train_on_batch(x[rows], y[rows], return_dict=True)
    found["counted"] = [variable.numpy() for variable in model.metrics_variables]
    return {**found, "trained on batches of their own": model.get_weights()}


def rank_order(does_train: bool) -> dict[str, Any]:
    """Collectives among more than ten workers: tasks sort as strings."""
    strategy = tfdist.MultiWorkerShardedStrategy(zero_stage=3)
    size = strategy.mesh.world_size

    def on_rank():
        rank = tf.cast(tf.distribute.get_replica_context().replica_id_in_sync_group, tf.float32)
        mine = tf.fill([2], rank)
        to_each = rank * 100 + tf.range(size, dtype=tf.float32)
        return {
            "gathered": tfdist.collectives.all_gather(mine),
            "summed": tfdist.collectives.all_reduce(mine),
            "scattered": tfdist.collectives.reduce_scatter(tf.range(size, dtype=tf.float32) + rank),
            "exchanged": tfdist.collectives.all_to_all(to_each),
            "from_3": tfdist.collectives.broadcast(mine, root=3),
        }

    outputs = tf.function(lambda: strategy.run(on_rank))()
    found = {name: strategy.experimental_local_results(value)[0].numpy() for name, value in outputs.items()}
    found["rank"] = strategy.extended.communicator.local_ranks[0]
    found["gather"] = strategy.gather(tf.fill([2], float(found["rank"])), axis=0).numpy()
    if does_train:
        found["trained"] = as_numbers(training.custom_loop(strategy, training.small, adam))
    return found
