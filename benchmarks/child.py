"""What runs in a child process: builds one contender, trains it, measures.

    python -m benchmarks.child memory|throughput

The first line on stdin is the case. What TensorFlow and Keras print goes to stderr; stdout carries answers only.
"""

from __future__ import annotations

import contextlib
import dataclasses
import gc
import json
import os
import sys
import time
import traceback
from collections.abc import Callable, Iterator
from typing import Any

import keras
import numpy as np
import tensorflow as tf

import tfdist
from benchmarks.cases import MIRRORED, SINGLE, ZERO_STAGES, Case
from benchmarks.resident import PeakResident, give_back, resident_bytes

_SEED = 1


# Contenders


def use_devices(case: Case) -> list[str]:
    """Initialises TensorFlow with the case's devices, and makes each run something."""
    devices = tfdist.use_logical_cpus(case.num_ranks)
    for device in devices:
        with tf.device(device):
            tf.add(tf.ones([2]), 1.0).numpy()
    return devices


def build_strategy(case: Case, devices: list[str]) -> tf.distribute.Strategy:
    if case.contender == SINGLE:
        return tf.distribute.get_strategy()  # TensorFlow's default: no distribution
    if case.contender == MIRRORED:
        return tf.distribute.MirroredStrategy(devices)
    options = {"bucket_bytes": case.bucket_bytes, "prefetch": case.prefetch}
    given = {name: value for name, value in options.items() if value is not None}
    return tfdist.ShardedStrategy(devices, zero_stage=ZERO_STAGES[case.contender], **given)


class PositionEmbedding(keras.layers.Layer):
    """Adds a learned vector per position."""

    def build(self, input_shape: tuple[int | None, ...]) -> None:
        self.vectors = self.add_weight(shape=input_shape[1:], initializer="uniform", name="vectors")

    def call(self, inputs: Any) -> Any:
        return inputs + self.vectors


def build_model(case: Case) -> keras.Model:
    return {"mlp": _build_mlp, "gpt": _build_gpt}[case.model](case)


def _build_mlp(case: Case) -> keras.Model:
    layers = [keras.layers.Dense(case.width, activation="relu", name=f"dense_{i}") for i in range(case.layers)]
    return keras.Sequential([keras.Input((case.width,)), *layers])


def _build_gpt(case: Case) -> keras.Model:
    tokens = keras.Input((case.sequence_length,), dtype="int32")
    x = PositionEmbedding()(keras.layers.Embedding(case.vocabulary, case.width)(tokens))  # (batch, seq, width)
    for _ in range(case.layers):
        normed = keras.layers.LayerNormalization()(x)
        attention = keras.layers.MultiHeadAttention(case.heads, case.width // case.heads)
        x = x + attention(normed, normed, use_causal_mask=True)
        hidden = keras.layers.Dense(4 * case.width, activation="gelu")(keras.layers.LayerNormalization()(x))
        x = x + keras.layers.Dense(case.width)(hidden)
    return keras.Model(tokens, keras.layers.Dense(case.vocabulary)(keras.layers.LayerNormalization()(x)))


def build_loss(case: Case) -> keras.losses.Loss:
    """The loss per example (and position): reduced by whoever uses it."""
    if case.model == "mlp":
        return keras.losses.MeanSquaredError(reduction=None)
    return keras.losses.SparseCategoricalCrossentropy(from_logits=True, reduction=None)


def build_batch(case: Case) -> tuple[np.ndarray, np.ndarray]:
    """Returns inputs and targets of one global batch: always the same."""
    random = np.random.default_rng(_SEED)
    if case.model == "mlp":
        shape = (2, case.global_batch_size, case.width)
        return tuple(random.standard_normal(shape, dtype=np.float32))
    shape = (2, case.global_batch_size, case.sequence_length)
    return tuple(random.integers(0, case.vocabulary, shape, dtype=np.int32))


# Training loops


class FunctionLoop:
    """A `tf.function` around `strategy.run`: tape, gradients, `optimizer.apply`. The batch lies on the devices."""

    def __init__(self, case: Case, strategy: tf.distribute.Strategy, devices: list[str]):
        keras.utils.set_random_seed(_SEED)
        with strategy.scope():
            self.model = model = build_model(case)
            optimizer = keras.optimizers.Adam(1e-4)
            optimizer.build(model.trainable_variables)
        loss_of = build_loss(case)

        def train(inputs: tf.Tensor, targets: tf.Tensor) -> tf.Tensor:
            with tf.GradientTape() as tape:
                # This rank's summand of the mean over the global batch.
                loss = tf.reduce_mean(loss_of(targets, model(inputs, training=True))) / case.num_ranks
            variables = model.trainable_variables
            optimizer.apply(tape.gradient(loss, [variable.value for variable in variables]), variables)
            return loss

        @tf.function(jit_compile=False)
        def step(inputs: Any, targets: Any) -> tf.Tensor:
            losses = strategy.run(train, (inputs, targets))
            return strategy.reduce(tf.distribute.ReduceOp.SUM, losses, axis=None)

        self._step = step
        self._batch = [_place(array, case, strategy, devices) for array in build_batch(case)]

    def run(self, steps: int) -> tuple[float, float]:
        """Runs `steps` steps; returns seconds and the last loss."""
        start = time.perf_counter()
        for _ in range(steps):
            loss = self._step(*self._batch)
        loss = float(loss)
        return time.perf_counter() - start, loss


def _place(array: np.ndarray, case: Case, strategy: tf.distribute.Strategy, devices: list[str]) -> Any:
    parts = []
    for device, part in zip(devices, np.split(array, case.num_ranks), strict=True):
        with tf.device(device):
            parts.append(tf.constant(part))
    if case.contender == SINGLE:
        return parts[0]
    return strategy.experimental_distribute_values_from_function(lambda context: parts[context.replica_id_in_sync_group])


class FitLoop:
    """`model.fit` on a data set that repeats one batch. The clock runs from the first batch's begin to the last's end.

    So neither the making of iterators nor the end of an epoch is timed.
    """

    def __init__(self, case: Case, strategy: tf.distribute.Strategy, devices: list[str]):
        keras.utils.set_random_seed(_SEED)
        with strategy.scope():
            self.model = build_model(case)
            loss = build_loss(case)
            loss.reduction = "sum_over_batch_size"
            self.model.compile(keras.optimizers.Adam(1e-4), loss=loss, jit_compile=False)
        data = tf.data.Dataset.from_tensor_slices(build_batch(case)).cache().repeat()
        self._data = data.batch(case.global_batch_size, drop_remainder=True).prefetch(2)

    def run(self, steps: int) -> tuple[float, float]:
        """Runs `steps` steps; returns seconds and the mean loss."""
        clock = _BatchClock()
        history = self.model.fit(self._data, steps_per_epoch=steps, epochs=1, verbose=0, callbacks=[clock])
        return clock.end - clock.start, float(history.history["loss"][-1])


class _BatchClock(keras.callbacks.Callback):
    start: float | None = None

    def on_train_batch_begin(self, batch: int, logs: Any = None) -> None:
        self.start = self.start or time.perf_counter()

    def on_train_batch_end(self, batch: int, logs: Any = None) -> None:
        self.end = time.perf_counter()


def build_loop(case: Case, strategy: tf.distribute.Strategy, devices: list[str]) -> FunctionLoop | FitLoop:
    return {"function": FunctionLoop, "fit": FitLoop}[case.loop](case, strategy, devices)


def describe(case: Case, loop: FunctionLoop | FitLoop) -> dict[str, Any]:
    """Returns the fields of a JSON line that only a process with TensorFlow knows."""
    parameters = sum(int(np.prod(weight.shape)) for weight in loop.model.trainable_weights)
    stage = ZERO_STAGES.get(case.contender, 0)  # a mirrored model and a single device hold what stage 0 holds
    per_rank = tfdist.sharding.placements_of(stage).bytes_per_parameter(case.num_ranks)
    return {
        "parameters": parameters,
        "parameter_bytes": 4 * parameters,
        "floor_bytes": round(case.num_ranks * per_rank * parameters),
        "tensorflow": tf.__version__,
        "keras": keras.__version__,
        "tfdist": tfdist.__version__,
    }


# Jobs


def tensor_bytes(reset_peak: bool = False) -> dict[str, int] | None:
    """Returns "current" and "peak" bytes in use of TensorFlow's CPU allocator, or None where it does not count them.

    All logical CPUs of a process share one allocator.
    """
    try:
        if reset_peak:
            tf.config.experimental.reset_memory_stats("CPU:0")
        return tf.config.experimental.get_memory_info("CPU:0")
    except ValueError:
        return None


def memory_job(case: Case, answer: Callable[[dict[str, Any]], None], requests: Iterator[dict[str, Any]]) -> None:
    """Answers once, to `{"steps": n, "warmup": bool}`: the process's memory at rest and at the peak of each phase."""
    devices = use_devices(case)
    strategy = build_strategy(case, devices)
    give_back()
    imported = resident_bytes()
    answer({})
    request = next(requests)
    if request["warmup"]:
        tiny = dataclasses.replace(case, layers=2, width=4 * case.heads, vocabulary=8, global_batch_size=case.num_ranks)
        # The same strategy: two in one process would share collective keys under MirroredStrategy.
        build_loop(tiny, strategy, devices).run(2)
        keras.backend.clear_session(free_memory=True)
        give_back()
    baseline = resident_bytes()
    tensors_before = tensor_bytes(reset_peak=True)
    with PeakResident() as build:
        loop = build_loop(case, strategy, devices)
    with PeakResident() as first:
        loop.run(1)
    gc.collect()
    with PeakResident() as later:
        _, loss = loop.run(max(1, request["steps"] - 1))
    give_back()
    tensors = tensor_bytes()
    phases = {"build": build, "first_step": first, "steps": later}
    answer(
        {
            "imported_rss_bytes": imported,
            "baseline_rss_bytes": baseline,
            "peak_rss_bytes": max(peak.bytes for peak in phases.values()),
            "phase_peak_rss_bytes": {name: peak.bytes for name, peak in phases.items()},
            "at_rest_rss_bytes": resident_bytes(),
            "tensor_peak_bytes": None if tensors is None else tensors["peak"] - tensors_before["current"],
            "tensor_at_rest_bytes": None if tensors is None else tensors["current"] - tensors_before["current"],
            "has_high_water_mark": later.has_high_water_mark,
            "loss": loss,
            **describe(case, loop),
        }
    )


def throughput_job(case: Case, answer: Callable[[dict[str, Any]], None], requests: Iterator[dict[str, Any]]) -> None:
    """Traces and warms up, says so, then answers every `{"steps": n}` with the seconds of n steps."""
    devices = use_devices(case)
    loop = build_loop(case, build_strategy(case, devices), devices)
    _, loss = loop.run(3)
    answer({"warmup_loss": loss, **describe(case, loop)})
    for request in requests:
        seconds, loss = loop.run(request["steps"])
        answer({"seconds": seconds, "loss": loss})


_JOBS = {"memory": memory_job, "throughput": throughput_job}


def main() -> None:
    channel = os.fdopen(os.dup(sys.stdout.fileno()), "w")
    os.dup2(sys.stderr.fileno(), sys.stdout.fileno())

    def answer(fields: dict[str, Any]) -> None:
        channel.write(json.dumps(fields) + "\n")
        channel.flush()

    requests = (json.loads(line) for line in sys.stdin)
    try:
        _JOBS[sys.argv[1]](Case(**next(requests)), answer, requests)
    except Exception as error:  # noqa: BLE001 (the parent reports it)
        traceback.print_exc()
        with contextlib.suppress(BrokenPipeError):  # the parent is gone
            answer({"error": f"{type(error).__name__}: {error}"})


if __name__ == "__main__":
    main()
