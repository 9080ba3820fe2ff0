"""A `fit` that is begun again with a new model, from a backup of its middle: for every kind of model and optimizer."""

import pathlib
import shutil

import keras
import numpy as np
import tensorflow as tf

import tfdist
from tests.workers import job

X = np.random.default_rng(0).normal(size=(24, 8)).astype("float32")
Y = np.random.default_rng(1).integers(0, 3, size=24)


class Watch(keras.callbacks.Callback):
    """Keeps the logs of every step, and the backup that there is when one of them is taken."""

    def __init__(self, backup, kept, step):
        super().__init__()
        self.steps, self.backup, self.kept, self.step = [], backup, kept, step

    def on_train_batch_end(self, batch, logs=None):
        self.steps.append((batch, dict(logs)))
        if len(self.steps) == self.step:
            shutil.copytree(self.backup, self.kept)


class Pair(keras.Model):
    """Two parts, each with an optimizer of its own; `model.optimizer` is Keras's default, and does nothing."""

    def __init__(self):
        super().__init__()
        self.first = keras.Sequential([keras.Input((8,)), keras.layers.Dense(5, activation="tanh"), keras.layers.Dropout(0.3)])
        self.second = keras.layers.Dense(3)
        self.build((None, 8))

    def build(self, shape):
        self.second.build((None, 5))
        super().build(shape)

    def call(self, x, training=None):
        return self.second(self.first(x, training=training))

    def compile(self, optimizer, loss, metrics):
        super().compile(loss=loss)
        self.second_optimizer, self.in_list = optimizer, [keras.optimizers.Adam(0.01)]

    def train_step(self, data):
        x, y = data
        for part, optimizer in ((self.second, self.second_optimizer), (self.first, self.in_list[0])):
            with tf.GradientTape() as tape:
                loss = self.compute_loss(x, y, self(x, training=True))
            optimizer.apply(tape.gradient(loss, part.trainable_variables), part.trainable_variables)
        return {"loss": loss}


def layers():
    return keras.Sequential(
        [
            keras.Input((8,)),
            keras.layers.Dense(12, activation="relu", name="up"),
            keras.layers.Dense(8, name="down"),
            keras.layers.Dropout(0.3),
            keras.layers.BatchNormalization(),
            keras.layers.Dense(3, name="head"),
        ]
    )


def with_lora():
    model = layers()
    model.layers[0].enable_lora(2)
    return model


MODELS = {"layers": layers, "lora": with_lora}


def _accumulating():
    return keras.optimizers.Adam(0.01, gradient_accumulation_steps=3, use_ema=True, ema_momentum=0.5)


OPTIMIZERS = {
    "adam": lambda: keras.optimizers.Adam(keras.optimizers.schedules.ExponentialDecay(0.01, 2, 0.5)),
    "momentum": lambda: keras.optimizers.SGD(0.1, momentum=0.9),
    "averages": lambda: keras.optimizers.Adam(0.01, use_ema=True, ema_momentum=0.5, ema_overwrite_frequency=4),
    "accumulating": _accumulating,
    "scaled": lambda: keras.optimizers.LossScaleOptimizer(_accumulating(), dynamic_growth_steps=2),
    "muon": lambda: keras.optimizers.Muon(0.01),
    "adafactor": lambda: keras.optimizers.Adafactor(0.01),
    "schedule-free": lambda: keras.optimizers.ScheduleFreeAdamW(0.01),
    "several": lambda: keras.optimizers.MultiOptimizer(
        keras.optimizers.OptimizerMap(keras.optimizers.SGD(0.1, momentum=0.9), {".*kernel": _accumulating()})
    ),
}


def _fit(strategy, build, optimizer, save_freq, callbacks, watch):
    """Trains, and returns what this worker's ranks hold of every variable in the end."""
    keras.utils.clear_session()
    keras.utils.set_random_seed(3)
    with strategy.scope():
        made = build()
        if not made.built:
            made(keras.Input((8,)))
        made.compile(OPTIMIZERS[optimizer](), keras.losses.SparseCategoricalCrossentropy(from_logits=True), metrics=["accuracy"])
    data = tf.data.Dataset.from_tensor_slices((X, Y)).shuffle(24, seed=3).batch(5)
    backup = keras.callbacks.BackupAndRestore(watch.backup, save_freq=save_freq)
    made.fit(data, epochs=2, shuffle=False, callbacks=[backup, *(make() for make in callbacks), watch], verbose=0)
    optimizers = [made.second_optimizer, *made.in_list] if isinstance(made, Pair) else [made.optimizer]
    variables = [*made.variables, *(variable for optimizer in optimizers for variable in optimizer.variables)]
    return [(variable.path, [one.numpy() for one in variable._value.values]) for variable in variables]


def differences(strategy, build, optimizer, folder, save_freq=2, callbacks=(), step=4):
    """Returns in what a `fit` of two epochs of 5 steps differs from one that goes on from the backup that it had at a step."""
    kept = pathlib.Path(folder) / "kept"
    # Each worker keeps it for itself; the one that goes on is the first worker's.
    first = Watch(f"{folder}/backup", str(kept / str(strategy.extended.communicator.local_ranks[0])), step)
    second = Watch(str(kept / "0"), "", None)
    expected = _fit(strategy, build, optimizer, save_freq, callbacks, first)
    found = _fit(strategy, build, optimizer, save_freq, callbacks, second)
    begin = len(first.steps) - len(second.steps)
    assert 0 < begin < step, f"it went on at step {begin}"
    pairs = zip(first.steps[begin:], second.steps, strict=True)
    different = [f"step {begin + number}: {a} {b}" for number, (a, b) in enumerate(pairs) if a != b]
    for (path, mine), (_, theirs) in zip(found, expected, strict=True):
        ranks = enumerate(zip(mine, theirs, strict=True))
        different += [f"{path}, part {rank}" for rank, (a, b) in ranks if not np.array_equal(a, b)]
    return different


def restarted_together(folder, cases, models=MODELS):
    """On every worker: returns what differs, by case."""
    found = {}
    for number, (model, optimizer, settings) in enumerate(cases):
        strategy = tfdist.MultiWorkerShardedStrategy(**settings)
        found[model, optimizer, str(settings)] = differences(strategy, models[model], optimizer, f"{folder}/{number}")
    return found


def assert_no_differences(folder, target, devices, cases):
    """Two workers, of so many devices each, run `target` on cases of a model, an optimizer and settings: all in one job."""
    with job(folder, 2, target, str(folder / "backups"), cases, devices_per_worker=devices) as running:
        for found in running.results(280):
            assert found == {(model, optimizer, str(settings)): [] for model, optimizer, settings in cases}
