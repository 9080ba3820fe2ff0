"""What a contender is, how it trains and on what: strategies, models, batches, loops."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from typing import Any

import keras
import numpy as np
import tensorflow as tf

import tfdist
from benchmarks.cases import MIRRORED, MW_MIRRORED, SINGLE, ZERO_STAGES, Case
from benchmarks.devices import take_devices, wait
from benchmarks.gpt_arrays import EPSILON, LEARNING_RATE, WEIGHT_DECAY, initial_weight, make_batch
from tfdist.extensions.compression import TopK
from tfdist.mesh import worker_devices
from tfdist.runtime import share_cores

# Strategies

_COMPRESSORS = {  # those that have no name in tfdist
    "top_k_int4": TopK(rest="int4"),
    "top_k_alone": TopK(rest=None),
    "top_k_feedback": TopK(rest=None, error_feedback=True),
    "top_k_0.3_alone": TopK(0.003, rest=None),
    "top_k_0.3_feedback": TopK(0.003, rest=None, error_feedback=True),
    "top_k_0.1_alone": TopK(0.001, rest=None),
    "top_k_0.1_feedback": TopK(0.001, rest=None, error_feedback=True),
}


def build_strategy(case: Case) -> tf.distribute.Strategy:
    """Makes the case's strategy and initialises TensorFlow with its devices, each of which has run something."""
    if case.auto_clustering:
        tf.config.optimizer.set_jit(True)
    if case.multi_worker and case.contender != SINGLE:
        share_cores(case.devices)  # as tfdist's strategy does, for the others too
        # Before any operation: it makes this process one of the workers that TF_CONFIG lists.
        strategy = _build_worker_strategy(case)
        devices = strategy.extended.worker_devices
    else:
        devices = take_devices(case.num_ranks, case.logical_gpus)
        strategy = _build_local_strategy(case, devices)
    for device in devices:
        with tf.device(device):
            tf.add(tf.ones([2]), 1.0).numpy()
    return strategy


def _build_worker_strategy(case: Case) -> tf.distribute.Strategy:
    if case.contender == MW_MIRRORED:
        worker_devices()  # splits the GPU, where it is to be split
        way = tf.distribute.experimental.CommunicationImplementation("RING" if case.logical_gpus else "AUTO")
        options = tf.distribute.experimental.CommunicationOptions(implementation=way)
        return tf.distribute.MultiWorkerMirroredStrategy(communication_options=options)
    return tfdist.MultiWorkerShardedStrategy(**_settings(case))


def _build_local_strategy(case: Case, devices: list[str]) -> tf.distribute.Strategy:
    if case.contender == SINGLE:
        return tf.distribute.get_strategy()  # TensorFlow's default: no distribution
    if case.contender == MIRRORED:
        return tf.distribute.MirroredStrategy(devices)
    return tfdist.ShardedStrategy(devices, **_settings(case))


def _settings(case: Case) -> dict[str, Any]:
    compressed = {"gradient_compression": case.gradients, "parameter_compression": case.parameters}
    compressors = {name: _COMPRESSORS.get(value, value) for name, value in compressed.items()}
    return {"zero_stage": ZERO_STAGES[case.contender], "use_kernels": case.use_kernels, **compressors}


# Models and data


class PositionEmbedding(keras.layers.Layer):
    """Adds a learned vector per position."""

    def build(self, input_shape: tuple[int | None, ...]) -> None:
        self.vectors = self.add_weight(shape=input_shape[1:], initializer="uniform", name="vectors")

    def call(self, inputs: Any) -> Any:
        return inputs + self.vectors


def build_model(case: Case) -> keras.Model:
    return {"mlp": _build_mlp, "gpt": _build_gpt}[case.model](case)


def _build_mlp(case: Case) -> keras.Model:
    activations = ["relu"] * (case.layers - 1) + [None]
    layers = [keras.layers.Dense(case.width, activation, name=f"dense_{i}") for i, activation in enumerate(activations)]
    return keras.Sequential([keras.Input((case.width,)), *layers])


def _build_gpt(case: Case) -> keras.Model:
    tokens = keras.Input((case.sequence_length,), dtype="int32")
    x = keras.layers.Embedding(case.vocabulary, case.width, name="token_embedding")(tokens)
    x = PositionEmbedding(name="position_embedding")(x)  # (batch, seq, width)
    for i in range(case.layers):
        normed = keras.layers.LayerNormalization(name=f"block_{i}_attention_norm")(x)
        attention = keras.layers.MultiHeadAttention(case.heads, case.width // case.heads, name=f"block_{i}_attention")
        x = x + attention(normed, normed, use_causal_mask=True)
        normed = keras.layers.LayerNormalization(name=f"block_{i}_mlp_norm")(x)
        hidden = keras.layers.Dense(4 * case.width, activation="gelu", name=f"block_{i}_mlp_in")(normed)
        x = x + keras.layers.Dense(case.width, name=f"block_{i}_mlp_out")(hidden)
    x = keras.layers.LayerNormalization(name="final_norm")(x)
    return keras.Model(tokens, keras.layers.Dense(case.vocabulary, name="logits")(x))


def build_loss(case: Case) -> keras.losses.Loss:
    """The loss per example (and position): reduced by whoever uses it."""
    if case.model == "mlp":
        return keras.losses.MeanSquaredError(reduction=None)
    return keras.losses.SparseCategoricalCrossentropy(from_logits=True, reduction=None)


# Training loops


class DataLoop:
    """A `tf.function` around `strategy.run`: tape, gradients, `optimizer.apply`. The batch lies on the devices.

    Weights, batch and AdamW are those of the other frameworks.
    """

    def __init__(self, case: Case, strategy: tf.distribute.Strategy):
        self.strategy = strategy
        keras.config.set_dtype_policy(case.policy)
        with strategy.scope():
            self.model = model = build_model(case)
            for variable in model.variables:
                path = variable.path.removeprefix(f"{model.name}/")  # a Sequential's own name stands before its layers'
                variable.assign(initial_weight(path, variable.shape))
            optimizer = keras.optimizers.AdamW(LEARNING_RATE, epsilon=EPSILON, weight_decay=WEIGHT_DECAY)
            optimizer.build(model.trainable_variables)
        loss_of = build_loss(case)

        def train(inputs: tf.Tensor, targets: tf.Tensor) -> tf.Tensor:
            with tf.GradientTape() as tape:
                # This rank's summand of the mean over the global batch.
                loss = tf.reduce_mean(loss_of(targets, model(inputs, training=True))) / case.num_ranks
            variables = model.trainable_variables
            optimizer.apply(tape.gradient(loss, [variable.value for variable in variables]), variables)
            return loss

        @tf.function(jit_compile=case.jit_compile)
        def step(inputs: Any, targets: Any) -> tf.Tensor:
            losses = strategy.run(train, (inputs, targets))
            return strategy.reduce(tf.distribute.ReduceOp.SUM, losses, axis=None)

        self._step = step
        self._batch = [_place(array, case, strategy) for array in make_batch(case)]

    def run(self, steps: int) -> tuple[float, float]:
        """Runs `steps` steps; returns seconds and the last loss."""
        return run_steps(self._step, self._batch, steps)

    def time_steps(self, steps: int) -> tuple[list[float], float]:
        """Runs `steps` steps; returns the seconds of each, until all devices are done, and the last loss."""
        seconds = []
        for _ in range(steps):
            start = time.perf_counter()
            loss = self._step(*self._batch)
            wait()
            seconds.append(time.perf_counter() - start)
        return seconds, float(loss)


def run_steps(step: Callable[..., tf.Tensor], batch: Sequence[Any], steps: int) -> tuple[float, float]:
    """Calls `step` on `batch` that often; returns seconds, until all devices are done, and the last loss."""
    start = time.perf_counter()
    for _ in range(steps):
        loss = step(*batch)
    loss = float(loss)
    wait()
    return time.perf_counter() - start, loss


def place_on_all(array: np.ndarray, strategy: tf.distribute.Strategy) -> Any:
    """Returns what `strategy.run` takes for integers that every rank has whole, on its device."""
    devices = strategy.extended.worker_devices

    def place(context: Any) -> tf.Tensor:
        with tf.device(devices[context.replica_id_in_sync_group % len(devices)]):
            return tf.constant(array, tf.int32)

    return strategy.experimental_distribute_values_from_function(place)


def _place(array: np.ndarray, case: Case, strategy: tf.distribute.Strategy) -> Any:
    """Returns what `strategy.run` takes for a global batch: a worker with one device takes its rows as a plain tensor."""
    parts = np.split(array, case.num_ranks)
    if case.contender == SINGLE:
        return tf.constant(parts[0])
    if case.multi_worker:
        return tf.constant(parts[strategy.cluster_resolver.task_id or 0])
    devices = strategy.extended.worker_devices

    def place(context: Any) -> tf.Tensor:
        index = context.replica_id_in_sync_group
        with tf.device(devices[index]):
            return tf.constant(parts[index])

    return strategy.experimental_distribute_values_from_function(place)
