"""What the disturbed program trains: small models with dropout and a learning rate that changes, on data shuffled each epoch."""

from __future__ import annotations

import itertools
import json
import os
import pathlib
from collections.abc import Iterator
from typing import Any

import keras
import numpy as np
import tensorflow as tf

import tfdist
from tests.soak import inside, marks
from tests.soak.jobs import Job

SAMPLES, FEATURES, CLASSES, BATCH = 70, 15, 6, 12  # the last batch of an epoch has 10 rows
STEPS = -(-SAMPLES // BATCH)


def main(faults: inside.Faults) -> None:
    spec = marks.spec()
    job, backup = Job.from_name(spec["job"]), pathlib.Path(spec["backup"])
    keras.utils.set_random_seed(11)
    strategy = tfdist.MultiWorkerShardedStrategy(
        **_mesh(job),
        zero_stage=job.zero_stage,
        step_timeout_seconds=job.step_timeout_seconds,
        rendezvous_timeout_seconds=job.rendezvous_timeout_seconds,
    )
    marks.mark("connected")
    faults.at("connected")
    with strategy.scope():
        model = _model(job)
        rate = 0.02 if job.callbacks == "plateau" else keras.optimizers.schedules.ExponentialDecay(0.02, 5, 0.9)
        loss = keras.losses.SparseCategoricalCrossentropy(from_logits=True)
        model.compile(keras.optimizers.Adam(rate), loss, metrics=["accuracy"], steps_per_execution=job.steps_per_execution)
    marks.mark("built")
    faults.at("built")
    train = _fit if job.loop == "fit" else _own_loop
    train(strategy, model, job, backup, faults)
    marks.mark("trained")
    faults.at("trained")
    values = [variable.numpy() for variable in [*model.variables, *model.optimizer.variables]]  # on every worker: collectives
    if strategy.cluster is None or strategy.cluster.is_chief:
        path = pathlib.Path(os.environ[marks.VARIABLE]).parent / "result.npz"
        np.savez(path, *values)
    marks.mark("saved")
    faults.at("saved")


def _mesh(job: Job) -> dict[str, int]:
    return {} if job.kind == "data" else {f"{job.kind}_parallel_size": job.workers}


def _model(job: Job) -> keras.Model:
    layers = [keras.Input((FEATURES,))]
    for number in range(3):
        layers += [keras.layers.Dense(12, activation="tanh", name=f"hidden_{number}"), keras.layers.Dropout(0.2)]
    model = keras.Sequential([*layers, keras.layers.Dense(CLASSES, name="head")])
    if job.kind == "tensor":
        tfdist.parallelize(model, {"hidden_0": "column", "hidden_1": "row", "hidden_2": "column", "head": "row"})
    if job.kind == "pipeline":
        model = tfdist.PipelineModel(model, num_microbatches=4)
    return model


def _rows() -> tuple[np.ndarray, np.ndarray]:
    """Returns the data, which are the same on every worker; a fault may have spoilt a row, which one rank gets."""
    rng = np.random.default_rng(7)
    x, y = rng.normal(size=(SAMPLES, FEATURES)).astype("float32"), rng.integers(0, CLASSES, size=SAMPLES)
    for fault in marks.spec()["faults"]:
        if fault.get("at") == "rows" and fault["attempt"] == marks.attempt():
            (x if fault["act"] == "nan" else y)[23] = np.nan if fault["act"] == "nan" else 99
    return x, y


def _data(job: Job, strategy: Any, faults: inside.Faults) -> Any:
    x, y = _rows()
    if job.data == "shuffled":
        return tf.data.Dataset.from_tensor_slices((x, y)).shuffle(SAMPLES, seed=5).batch(BATCH)
    if job.data == "parts":
        return strategy.distribute_datasets_from_function(lambda context: _part(context, x, y, faults))

    def batches(endless: bool) -> Iterator[Any]:
        shift = 1 if faults.commits("other data", 0) else 0
        for number in itertools.count() if endless else range(STEPS):
            faults.at("data", number)
            if faults.commits("data ends", number):
                return
            rows = slice(number % STEPS * BATCH, (number % STEPS + 1) * BATCH)
            yield np.roll(x, shift, axis=0)[rows], y[rows]

    if job.data == "generator":
        return batches(endless=True)
    signature = (tf.TensorSpec((None, FEATURES), tf.float32), tf.TensorSpec((None,), tf.int64))
    return tf.data.Dataset.from_generator(lambda: batches(endless=False), output_signature=signature)


def _part(context: Any, x: np.ndarray, y: np.ndarray, faults: inside.Faults) -> tf.data.Dataset:
    """Returns the part of this worker, of 4 or 5 batches: some have one batch less."""
    local = BATCH // context.num_replicas_in_sync
    here, number = context.input_pipeline_id, context.num_input_pipelines
    rows = np.array_split(np.arange(SAMPLES), number)[here]
    cut = [fault["batches"] * local for fault in faults.planned("part")]
    rows = rows[: cut[0]] if cut else rows
    return tf.data.Dataset.from_tensor_slices((x[rows], y[rows])).batch(local)


class _Log(keras.callbacks.Callback):
    """Marks epochs, logs every number, and gives faults their steps."""

    def __init__(self, faults: inside.Faults, steps_per_execution: int):
        super().__init__()
        self._faults = faults
        self._steps = steps_per_execution

    def on_epoch_begin(self, epoch: int, logs: Any = None) -> None:
        self._epoch = epoch
        marks.mark(f"epoch {epoch}")

    def on_train_batch_begin(self, batch: int, logs: Any = None) -> None:
        for number in range(batch, min(batch + self._steps, STEPS)):
            self._faults.at("step", self._epoch * STEPS + number)
            if self._faults.commits("save", self._epoch * STEPS + number):
                self.model.save_weights(pathlib.Path(marks.spec()["backup"]).with_name("own.weights.h5"))

    def on_train_batch_end(self, batch: int, logs: Any = None) -> None:
        marks.log(f"step {self._epoch} {batch}", _numbers(logs))

    def on_epoch_end(self, epoch: int, logs: Any = None) -> None:
        marks.log(f"epoch {epoch}", _numbers(logs))


def _numbers(logs: dict[str, Any]) -> dict[str, float]:
    return {name: float(value) for name, value in logs.items()}


def _fit(strategy: Any, model: Any, job: Job, backup: pathlib.Path, faults: inside.Faults) -> None:
    callbacks = [
        keras.callbacks.BackupAndRestore(backup, save_freq=job.save_freq or "epoch"),
        _Log(faults, job.steps_per_execution),
    ]
    if job.callbacks == "nan":
        callbacks.append(keras.callbacks.TerminateOnNaN())
    if job.callbacks == "plateau":
        callbacks.append(keras.callbacks.ReduceLROnPlateau("val_loss", factor=0.5, patience=1, min_delta=0.02))
        callbacks.append(keras.callbacks.EarlyStopping("val_loss", patience=3, min_delta=0.02))
    x, y = _rows()
    arguments: dict[str, Any] = {"validation_data": (x[:14], y[:14]), "validation_batch_size": BATCH}
    if job.data == "generator":
        arguments["steps_per_epoch"] = STEPS
    model.fit(_data(job, strategy, faults), epochs=job.epochs, verbose=0, callbacks=callbacks, **arguments)


def _own_loop(strategy: Any, model: Any, job: Job, backup: pathlib.Path, faults: inside.Faults) -> None:
    """Steps of `strategy.run`, with checkpoints that every worker writes, as in TensorFlow's guide: the chief's are read."""
    optimizer, x, y = model.optimizer, *_rows()
    optimizer.build(model.trainable_variables)
    loss_of = keras.losses.SparseCategoricalCrossentropy(from_logits=True, reduction="sum")

    def on_rank(features: Any, labels: Any) -> Any:
        with tf.GradientTape() as tape:
            loss = loss_of(labels, model(features, training=True)) / BATCH
        optimizer.apply(tape.gradient(loss, model.trainable_variables), model.trainable_variables)
        return loss

    @tf.function(reduce_retracing=True)
    def step(features: Any, labels: Any) -> Any:
        return strategy.reduce("SUM", strategy.run(on_rank, args=(features, labels)), axis=None)

    checkpoint = tf.train.Checkpoint(model=model, optimizer=optimizer)
    own = backup if strategy.cluster.is_chief else backup.with_name(f"unused_{strategy.cluster.worker_index}")
    place = backup / "place.json"
    done = json.loads(place.read_text("utf-8"))["steps"] if place.exists() else 0
    if done:
        checkpoint.read(str(backup / f"{done}")).assert_consumed()
    own.mkdir(exist_ok=True)
    for epoch in range(done // STEPS, job.epochs):
        marks.mark(f"epoch {epoch}")
        data = tf.data.Dataset.from_tensor_slices((x, y)).shuffle(SAMPLES, seed=epoch).batch(BATCH).skip(done % STEPS)
        for batch in strategy.experimental_distribute_dataset(data):
            faults.at("step", done)
            marks.log(f"step {epoch} {done % STEPS}", float(step(*batch)))
            done += 1
            if done % (job.save_freq or STEPS) == 0:
                checkpoint.write(str(own / f"{done}"))
                if strategy.cluster.is_chief:
                    written = backup / "place.new"
                    written.write_text(json.dumps({"steps": done}), "utf-8")
                    written.replace(place)
