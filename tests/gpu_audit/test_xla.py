"""What XLA may compile of a step, and what happens to a step when TensorFlow compiles what it likes of it (auto-clustering)."""

from __future__ import annotations

import functools
import json
import os
import pathlib
import subprocess
import sys

import keras
import pytest
import tensorflow as tf
from grids import exhaustive
from tensorflow.python.framework import kernels
from training import CLASSES, assert_same, fit, one_device, strategy_for

ROOT = pathlib.Path(__file__).resolve().parents[2]
USED = ("GatherV2", "AllToAllV2", "BcastSendV2", "BcastRecvV2", "ReduceScatterV2")


def test_xla_has_no_kernels_of_the_collectives():
    """But for the all-reduce, which auto-clustering leaves out by name; so no cluster holds a collective."""
    tf.function(lambda x: x + 1, jit_compile=True)(tf.ones([2]))  # XLA registers its kernels when it is first used
    assert "XLA_GPU_JIT" in {kernel.device_type for kernel in kernels.get_registered_kernels_for_op("MatMul").kernel}
    for name in USED:
        found = {kernel.device_type for kernel in kernels.get_registered_kernels_for_op(f"Collective{name}").kernel}
        assert found and not any(device.startswith("XLA") for device in found), name


@pytest.mark.parametrize(("devices", "zero_stage"), [(3, 3), exhaustive(2, 0), exhaustive(2, 1), exhaustive(4, 2)])
def test_xla_may_compile_the_call_of_a_layer(devices, zero_stage):
    def build(is_compiled):
        model = keras.Sequential([keras.Input((15,)), keras.layers.LayerNormalization(), keras.layers.Dense(9, "gelu"), Head()])
        if is_compiled:
            for layer in model.layers:
                layer.call = tf.function(layer.call, jit_compile=True, autograph=False)
        return model

    def train(strategy, is_compiled):
        return fit(strategy, functools.partial(build, is_compiled), lambda: keras.optimizers.SGD(0.05, momentum=0.9))

    assert_same(train(strategy_for(devices, zero_stage), True), train(one_device(), False))


class Head(keras.layers.Layer):
    """Another layer in it: XLA compiles both as one."""

    def build(self, shape):
        self.dense = keras.layers.Dense(CLASSES)
        self.dense.build(shape)

    def call(self, x):
        return self.dense(tf.nn.tanh(x))


PROGRAM = """
import json, keras, numpy as np, sys, tfdist
from tests.gpu_audit.steps import LENGTH, WORDS, transformer, crossentropy

devices = tfdist.use_logical_cpus(2)
x = np.random.default_rng(0).integers(0, WORDS, (16, LENGTH)).astype("int32")
y = np.random.default_rng(1).integers(0, WORDS, (16, LENGTH))
losses = {}
for name, settings in {
    "stage 0": dict(zero_stage=0), "stage 2": dict(zero_stage=2), "stage 3": dict(zero_stage=3),
    "pipeline": dict(zero_stage=0, pipeline_parallel_size=2),
}.items():
    strategy = tfdist.ShardedStrategy(devices, **settings)
    keras.utils.set_random_seed(3)
    with strategy.scope():
        model = transformer(dropout=0.0)
        if name == "pipeline":
            model = tfdist.PipelineModel(model, num_microbatches=2)
        model.compile(keras.optimizers.AdamW(1e-2), crossentropy())
    losses[name] = model.fit(x, y, batch_size=8, epochs=2, shuffle=False, verbose=0).history["loss"]
print(json.dumps(losses))
"""


@pytest.mark.exhaustive
@pytest.mark.timeout(900)
def test_auto_clustering_keeps_the_numbers():
    """On CPUs, where it needs flags; on GPUs `tf.config.optimizer.set_jit(True)` does the same."""
    flags = "--tf_xla_auto_jit=2 --tf_xla_cpu_global_jit --tf_xla_min_cluster_size=2"
    (plain, _), (clustered, log) = _losses(""), _losses(flags)
    assert plain.keys() == clustered.keys()
    for name, losses in plain.items():
        assert losses == pytest.approx(clustered[name], rel=1e-4), name
        assert losses[0] > losses[1]
    assert "Compiled cluster using XLA" in log


def _losses(flags):
    environment = {**os.environ, "PYTHONPATH": str(ROOT), "TF_XLA_FLAGS": flags, "TF_CPP_MIN_LOG_LEVEL": "0"}
    command = [sys.executable, "-c", PROGRAM]
    process = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=400)
    assert process.returncode == 0, process.stderr[-3000:]
    return json.loads(process.stdout.splitlines()[-1]), process.stderr
