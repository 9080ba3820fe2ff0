"""How exact the planned memory is: the plan beside TensorFlow's own count of the bytes of tensors.

    python benchmarks/planning_memory.py                            every model in every way that it can be trained
    python benchmarks/planning_memory.py mlp gpt --ways one zero3   some of them

Every case runs in a process for each of its devices. Each process trains some steps of `fit`, on examples of its own, and the
peak of each step is that of the bytes of tensors as TensorFlow's profiler notes them, with the state and the batch. It
notes tensors of at least 256 kB if TF_ENABLE_ONEDNN_OPTS=1, which is set here: take so many `--examples` that what a microbatch
keeps is larger. What the allocator gave for them
(`tf.config.experimental.get_memory_info("CPU:0")`) stands in the last column: pieces that were free may be larger than what
is put into them. Not planned: the process itself, its graphs, the scratch of kernels, pieces that are too large.
"""

from __future__ import annotations

import argparse
import functools
import json
import os
import pathlib
import statistics
import subprocess
import sys
import tempfile
from collections.abc import Callable, Sequence

os.environ.setdefault("TF_ENABLE_ONEDNN_OPTS", "1")
os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "2")

import keras
import numpy as np
import tensorflow as tf
from keras import layers
from tensorflow.tsl.profiler.protobuf import xplane_pb2

import tfdist
from tfdist.tools.planning import Candidate, DeviceMemory
from tfdist.tools.planning.memory import memory_of
from tfdist.tools.planning.traced_model import trace

SEQUENCE_LENGTH = 128  # of axes that a model leaves open
RUNS, WARM_UP = 5, 2  # the first step traces, and the second is not like the others either
_MARK = "planning_step"


class Block(layers.Layer):
    """A block of an encoder or, if causal, of a decoder."""

    def __init__(self, width: int, heads: int, dropout: float = 0.0, causal: bool = True, **settings):
        super().__init__(**settings)
        self.width, self.causal = width, causal
        self.norms = [layers.LayerNormalization() for _ in range(2)]
        self.attention = layers.MultiHeadAttention(heads, width // heads, dropout=dropout)
        self.up, self.down = layers.Dense(4 * width, "gelu"), layers.Dense(width)
        self.dropout = layers.Dropout(dropout)

    def build(self, shape):
        for norm in self.norms:
            norm.build(shape)
        self.attention.build(shape, shape)
        self.up.build(shape)
        self.down.build((*shape[:-1], 4 * self.width))

    def call(self, x, training=None):
        y = self.norms[0](x)
        x = x + self.attention(y, y, use_causal_mask=self.causal, training=training)
        return x + self.dropout(self.down(self.up(self.norms[1](x))), training=training)

    def compute_output_shape(self, shape):
        return shape


def compiled(model: keras.Model, loss: object = None) -> keras.Model:
    model.compile("adam", loss or keras.losses.SparseCategoricalCrossentropy(from_logits=True))
    return model


def mlp() -> keras.Model:
    return compiled(keras.Sequential([keras.Input((1024,)), *(layers.Dense(1024, "relu") for _ in range(8)), layers.Dense(10)]))


def transformer(blocks=4, width=128, length=256, dropout=0.0, causal=True, vocabulary=4096) -> keras.Model:
    tokens = keras.Input((length,), dtype="int32")
    x = layers.Embedding(vocabulary, width)(tokens)
    for index in range(blocks):
        x = Block(width, 4, dropout, causal, name=f"block_{index}")(x)
    return compiled(keras.Model(tokens, layers.Dense(vocabulary)(layers.LayerNormalization()(x))))


def vit() -> keras.Model:
    images = keras.Input((64, 64, 3))
    x = layers.Reshape((64, 128))(layers.Conv2D(128, 8, 8)(images))
    for index in range(4):
        x = Block(128, 4, causal=False, name=f"block_{index}")(x)
    return compiled(keras.Model(images, layers.Dense(10)(layers.GlobalAveragePooling1D()(x))))


def cnn() -> keras.Model:
    model = [keras.Input((64, 64, 3))]
    for filters in (32, 64, 128):
        model += [layers.Conv2D(filters, 3, padding="same", activation="relu") for _ in range(2)]
        model.append(layers.MaxPooling2D())
    return compiled(keras.Sequential([*model, layers.Flatten(), layers.Dense(10)]))


def unet() -> keras.Model:
    images = keras.Input((64, 64, 3))
    x, skips = images, []
    for filters in (16, 32, 64):
        x = layers.BatchNormalization()(layers.Conv2D(filters, 3, padding="same", activation="relu")(x))
        skips.append(x)
        x = layers.MaxPooling2D()(x)
    x = layers.Conv2D(128, 3, padding="same", activation="relu")(x)
    for filters, skip in zip((64, 32, 16), reversed(skips), strict=True):
        x = layers.Concatenate()([layers.Conv2DTranspose(filters, 2, 2)(x), skip])
        x = layers.Conv2D(filters, 3, padding="same", activation="relu")(x)
    return compiled(keras.Model(images, layers.Conv2D(5, 1)(x)))


def lstm() -> keras.Model:
    tokens = keras.Input((48,), dtype="int32")
    x = layers.LSTM(512, return_sequences=True)(layers.Embedding(2000, 512)(tokens))
    return compiled(keras.Model(tokens, layers.Dense(10)(layers.LSTM(512)(x))))


def two_outputs() -> keras.Model:
    inputs = keras.Input((256,))
    x = layers.Dense(512, "relu")(layers.Dense(512, "relu")(inputs))
    outputs = {"classes": layers.Dense(10, name="classes")(x), "value": layers.Dense(1, name="value")(x)}
    crossentropy = keras.losses.SparseCategoricalCrossentropy(from_logits=True)
    return compiled(keras.Model(inputs, outputs), {"classes": crossentropy, "value": "mse"})


def keras_hub_gpt2() -> keras.Model:
    import keras_hub  # seconds

    sizes = {"vocabulary_size": 2048, "num_layers": 3, "num_heads": 4, "hidden_dim": 128, "intermediate_dim": 512}
    backbone = keras_hub.models.GPT2Backbone(max_sequence_length=128, dropout=0.0, **sizes)
    inputs = {name: keras.Input((SEQUENCE_LENGTH,), dtype="int32", name=name) for name in ("token_ids", "padding_mask")}
    return compiled(keras.Model(inputs, layers.Dense(2048)(backbone(inputs))))


def application(name: str) -> Callable[[], keras.Model]:
    made = getattr(keras.applications, name)
    return lambda: compiled(made(weights=None, classes=10, classifier_activation=None, input_shape=(96, 96, 3)))


# The model, and the examples of a device's batch.
MODELS: dict[str, tuple[Callable[[], keras.Model], int]] = {
    "mlp": (mlp, 2048),
    "gpt": (transformer, 8),
    "gpt_dropout": (lambda: transformer(dropout=0.1), 8),
    "bert": (lambda: transformer(causal=False), 8),
    "vit": (vit, 32),
    "cnn": (cnn, 64),
    "unet": (unet, 16),
    "lstm": (lstm, 256),
    "two_outputs": (two_outputs, 4096),
    "keras_hub_gpt2": (keras_hub_gpt2, 16),
    "resnet50": (application("ResNet50"), 8),
    "mobilenet_v2": (application("MobileNetV2"), 8),
    "efficientnet_b0": (application("EfficientNetB0"), 8),
}


def batch_of(model: keras.Model, examples: int) -> tuple[np.ndarray, object]:
    rng = np.random.default_rng(0)

    def numbers(given: keras.KerasTensor) -> np.ndarray:
        shape = (examples, *(size or SEQUENCE_LENGTH for size in given.shape[1:]))
        return rng.integers(1, 100, shape).astype("int32") if "int" in given.dtype else rng.normal(size=shape).astype("float32")

    x = {one.name: numbers(one) for one in model.inputs} if len(model.inputs) > 1 else numbers(model.inputs[0])
    outputs = model.outputs[0] if isinstance(model, keras.Sequential) else model.output

    def labels(output: keras.KerasTensor) -> np.ndarray:
        if output.shape[-1] == 1:
            return np.zeros((examples, 1), "float32")
        return rng.integers(0, 5, (examples, *(size or SEQUENCE_LENGTH for size in output.shape[1:-1]))).astype("int32")

    return x, keras.tree.map_structure(labels, outputs)


# How a model is trained: what a plan says of it.
WAYS: dict[str, dict[str, object]] = {
    "one": {"zero_stage": 0},
    "recompute": {"zero_stage": 0, "recompute": True},
    **{f"zero{stage}": {"zero_stage": stage, "data": 2} for stage in range(4)},
    "recompute3": {"zero_stage": 3, "data": 2, "recompute": True},
    "tensor": {"zero_stage": 0, "tensor": 2},
    "1f1b": {"zero_stage": 0, "pipeline": 2, "schedule": "1f1b", "microbatches": 4},
    "gpipe": {"zero_stage": 0, "pipeline": 2, "schedule": "gpipe", "microbatches": 4},
    "tensor3": {"zero_stage": 3, "data": 2, "tensor": 2},
    "1f1b2": {"zero_stage": 2, "data": 2, "pipeline": 2, "schedule": "1f1b", "microbatches": 4},
}


class Profile(keras.callbacks.Callback):
    """Notes which tensors are allocated and freed in the steps after `WARM_UP`: TensorFlow's profiler, each step marked."""

    def __init__(self, folder: str):
        super().__init__()
        self.folder, self.most = folder, []

    def on_train_batch_begin(self, batch, logs=None):
        if batch == WARM_UP:
            options = tf.profiler.experimental.ProfilerOptions(host_tracer_level=3, python_tracer_level=0)
            tf.profiler.experimental.start(self.folder, options)
        if batch >= WARM_UP:
            tf.config.experimental.reset_memory_stats("CPU:0")
            with tf.profiler.experimental.Trace(_MARK):
                pass

    def on_train_batch_end(self, batch, logs=None):
        if batch >= WARM_UP:
            self.most.append(tf.config.experimental.get_memory_info("CPU:0")["peak"])

    def on_train_end(self, logs=None):
        tf.profiler.experimental.stop()


def events_of(folder: str) -> list[tuple[int, str, dict[str, object]]]:
    """Returns the profile's marks, allocations and frees, in the order of time: (time, name, what is known of it)."""
    (path,) = pathlib.Path(folder).glob("**/*.xplane.pb")
    space, found = xplane_pb2.XSpace.FromString(path.read_bytes()), []
    for plane in space.planes:
        names = {key: one.name for key, one in plane.event_metadata.items()}
        stats = {key: one.name for key, one in plane.stat_metadata.items()}
        for line in plane.lines:
            for event in line.events:
                if (name := names[event.metadata_id].partition("#")[0]) in (_MARK, "MemoryAllocation", "MemoryDeallocation"):
                    known = {stats[one.metadata_id]: _value(one, stats) for one in event.stats}
                    found.append((line.timestamp_ns * 1000 + event.offset_ps, name, known))
    return sorted(found, key=lambda event: event[0])


def _value(stat: object, names: dict[int, str]) -> object:
    kind = stat.WhichOneof("value")
    value = getattr(stat, kind)
    return names[value] if kind == "ref_value" else value


def tensor_peaks(events: Sequence[tuple[int, str, dict[str, object]]], held: int) -> list[int]:
    """Returns the most bytes of tensors in each step, if `held` bytes are there when they are least.

    The allocator may give more than a tensor needs, up to twice as much, when it has a free piece of that size: only what is
    asked of it is counted. What a step returns is freed when the next has begun.
    """
    peaks: list[int] = []
    now = least = 0
    for _, name, known in events:
        if name == _MARK:
            peaks.append(now)
        else:
            now += known["requested_bytes"] * (1 if name == "MemoryAllocation" else -1)
            least = min(least, now)
            peaks[-1:] = [max(one, now) for one in peaks[-1:]]
    return [held + peak - least for peak in peaks]


def trained(name: str, candidate: Candidate, examples: int, folder: str) -> dict[str, list[int]]:
    """Returns the peaks of a model's steps, trained as `candidate` says in this process and others with so many examples each.

    "tensors": of the bytes of tensors, the state that `memory_report` finds and the batch among them. "allocator": of what the
    allocator gave for them, over what was there before.
    """
    build = MODELS[name][0]
    settings = {
        "zero_stage": candidate.zero_stage,
        "tensor_parallel_size": candidate.tensor,
        "pipeline_parallel_size": candidate.pipeline,
        "use_kernels": False,  # as on GPUs, which plans are for: on CPUs they save memory by default
    }
    is_alone = candidate.devices == 1
    strategy = tfdist.ShardedStrategy(["CPU:0"], **settings) if is_alone else tfdist.MultiWorkerShardedStrategy(**settings)
    blocks = traced(build, sequence_length=SEQUENCE_LENGTH).block_pattern if candidate.recompute else None
    before = tf.config.experimental.get_memory_info("CPU:0")["current"]
    with strategy.scope():
        model = build()
        x, y = batch_of(model, examples)
        loss = model.loss
        if candidate.tensor > 1:
            tfdist.parallelize(model, tfdist.suggest_plan(model, candidate.tensor), print_fn=None)
        if candidate.recompute and candidate.pipeline == 1:
            tfdist.recompute(model, blocks)
        if candidate.pipeline > 1:
            schedule = {"num_microbatches": candidate.microbatches, "schedule": candidate.schedule}
            model = compiled(tfdist.PipelineModel(model, recompute=candidate.recompute, **schedule), loss)
    own = strategy.distribute_datasets_from_function(lambda _: tf.data.Dataset.from_tensors((x, y)).repeat())
    profile = Profile(folder)
    model.fit(own, steps_per_epoch=RUNS + WARM_UP, verbose=0, callbacks=[profile])
    task = json.loads(os.environ.get("TF_CONFIG", "{}")).get("task", {"index": 0})
    held = tfdist.memory_report(model).devices[task["index"]]
    bytes_held = held.parameter_bytes + held.optimizer_bytes + sum(one.nbytes for one in tf.nest.flatten((x, y)))
    return {"tensors": tensor_peaks(events_of(folder), bytes_held), "allocator": [most - before for most in profile.most]}


def train_and_tell(name: str, way: str, examples: int) -> None:
    """Prints what `trained` returns: in a process of its own."""
    with tempfile.TemporaryDirectory() as folder:
        print("RESULT", json.dumps(trained(name, Candidate(**WAYS[way]), examples, folder)), flush=True)


def planned(name: str, candidate: Candidate, examples: int) -> DeviceMemory:
    return memory_of(traced(MODELS[name][0], sequence_length=SEQUENCE_LENGTH), candidate, examples * candidate.data)


traced = functools.cache(trace)


def measured(name: str, way: str, examples: int) -> dict[str, list[int]]:
    """Returns the peaks of the fullest process."""
    workers = Candidate(**WAYS[way]).devices
    launch = [] if workers == 1 else ["-m", "tfdist", "run", "--workers", str(workers), "--cpu"]
    environment = {**os.environ, "PYTHONPATH": str(pathlib.Path(__file__).resolve().parent.parent)}
    command = [sys.executable, *launch, __file__, name, "--child", way, "--examples", str(examples)]
    done = subprocess.run(command, capture_output=True, text=True, env=environment, timeout=1800, check=False)
    found = [json.loads(line.partition("RESULT ")[2]) for line in done.stdout.splitlines() if "RESULT " in line]
    if len(found) != workers:
        raise RuntimeError(f"{name}, {way}: {done.stdout[-1000:]}{done.stderr[-2000:]}")
    return max(found, key=lambda peaks: statistics.median(peaks["tensors"]))


def row(name: str, way: str, examples: int, plan: DeviceMemory, peaks: dict[str, list[int]]) -> str:
    """Returns a row of the table."""
    tensors, given = (sorted(size / 1e6 for size in peaks[kind]) for kind in ("tensors", "allocator"))
    middle = statistics.median(tensors)
    spread = f"{middle:.1f} ({tensors[0]:.1f} to {tensors[-1]:.1f})"
    numbers = f"{plan.together / 1e6:.1f} | {spread} | {plan.together / 1e6 / middle - 1:+.1%} | {statistics.median(given):.1f}"
    return f"| {name} | {examples} | {way} | {numbers} |"


def can_be_trained(name: str, way: str) -> bool:
    """Whether a model can be trained so: whether it has blocks to recompute, stages, and layers to shard."""
    candidate = Candidate(**WAYS[way])
    try:
        planned(name, candidate, MODELS[name][1])
    except ValueError:
        return False
    return not candidate.recompute or traced(MODELS[name][0], sequence_length=SEQUENCE_LENGTH).block_pattern is not None


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("models", nargs="*", default=list(MODELS), help=", ".join(MODELS))
    parser.add_argument("--ways", nargs="*", default=list(WAYS), help=", ".join(WAYS))
    parser.add_argument("--examples", type=int, help="of a device's batch; otherwise each model's own number")
    parser.add_argument("--child", help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.child:
        train_and_tell(options.models[0], options.child, options.examples)
        return
    print("| model | examples | way | planned MB | measured MB, median (least to most) | error | allocator MB |")
    print("|---|---|---|---|---|---|---|")
    for name in options.models:
        for way in options.ways:
            examples = options.examples or MODELS[name][1]
            if can_be_trained(name, way):
                plan = planned(name, Candidate(**WAYS[way]), examples)
                print(row(name, way, examples, plan, measured(name, way, examples)), flush=True)


if __name__ == "__main__":
    main()
