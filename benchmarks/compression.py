"""What compressing gradients costs in time and in loss.

    python benchmarks/compression.py cost
    python benchmarks/compression.py loss --steps 1000 --orders 3
    python benchmarks/compression.py loss --zero-stage 2 --parameters int4 --only none int8
    python benchmarks/compression.py loss --json losses.jsonl --picture losses.png

`cost` times encoding, and decoding with the sum over two ranks, of 4 million numbers in one thread: nanoseconds a number, the
least of several turns, in which the compressors alternate; `copy` is `x + 0.5`, which only reads and writes.

`loss` trains a small GPT (168 thousand parameters) on the texts of Python's help, one token a byte, over two logical CPUs at
`--zero-stage`, with Adam and gradients clipped at a norm of 1, and prints the validation loss for each compressor and order of
the data. An order is the same for all compressors. With `--parameters` parameters travel so, but for the first
compressor, with which the others are compared; "none " and "none" are two. With `--json FILE` a line per training is appended,
and what has one in FILE is not trained again. `--picture FILE` draws the losses of the training (needs matplotlib).
"""

from __future__ import annotations

import argparse
import json
import pathlib
import pydoc_data.topics
import statistics
import time

import keras
import numpy as np
import tensorflow as tf

import tfdist
from tfdist.extensions.compression import NAMES, Int4, TopK

NUMBERS = 2**22
VOCABULARY, LENGTH, BATCH, WIDTH = 256, 64, 32, 64
POINTS = 20  # of a curve
COMPRESSORS = {
    **NAMES,
    "top_k, rest int4": TopK(rest="int4"),
    "top_k, rest None": TopK(rest=None),
    "top_k, rest None, error feedback": TopK(rest=None, error_feedback=True),
    "int4, blocks of 128": Int4(128),
}


def seconds(function, *inputs) -> float:
    start = time.perf_counter()
    function(*inputs)
    return time.perf_counter() - start


def cost(args: argparse.Namespace) -> None:
    tf.config.threading.set_intra_op_parallelism_threads(1)
    x = tf.random.stateless_normal([2, NUMBERS // 2], [0, 0])
    turns = {"copy": (tf.function(lambda x: x + 0.5), x)}
    for name, compressor in COMPRESSORS.items():
        encode = tf.function(compressor.encode)
        decode = tf.function(lambda words, compressor=compressor: tf.reduce_sum(compressor.decode(words, NUMBERS // 2), 0))
        turns |= {f"{name}: encode": (encode, x), f"{name}: decode and add": (decode, encode(x))}
    found = {name: [] for name in turns}
    for _ in range(args.turns):
        for name, (function, given) in turns.items():
            found[name].append(seconds(function, given))
    for name, times in found.items():
        print(f"{name:40s} {min(times[1:]) / NUMBERS * 1e9:6.2f} ns")


def gpt(blocks: int = 2, heads: int = 4) -> keras.Model:
    layers = keras.layers
    tokens = keras.Input((LENGTH,), dtype="int32")
    x = layers.Embedding(VOCABULARY, WIDTH)(tokens)
    x = x + layers.Embedding(LENGTH, WIDTH)(keras.ops.cumsum(keras.ops.ones_like(tokens), 1) - 1)
    for _ in range(blocks):
        y = layers.LayerNormalization()(x)
        x = x + layers.MultiHeadAttention(heads, WIDTH // heads)(y, y, use_causal_mask=True)
        x = x + layers.Dense(WIDTH)(layers.Dense(4 * WIDTH, "gelu")(layers.LayerNormalization()(x)))
    return keras.Model(tokens, layers.Dense(VOCABULARY)(layers.LayerNormalization()(x)))


def windows() -> tuple[np.ndarray, np.ndarray]:
    """Returns the windows of the text for training and for validation, (windows, LENGTH + 1) of int32."""
    text = "\n".join(pydoc_data.topics.topics[name] for name in sorted(pydoc_data.topics.topics)).encode()
    count = (len(text) - 1) // LENGTH
    starts = np.arange(count)[:, None] * LENGTH
    found = np.frombuffer(text, np.uint8)[starts + np.arange(LENGTH + 1)].astype("int32")
    chosen = np.random.default_rng(0).permutation(count)
    return found[chosen[256:]], found[chosen[:256]]


def validation_losses(order: int, steps: int, **settings) -> list[float]:
    """Trains; returns the validation loss at `POINTS` steps, the last after the last step."""
    keras.backend.clear_session()
    keras.utils.set_random_seed(0)
    strategy = tfdist.ShardedStrategy(tfdist.use_logical_cpus(2), **settings)
    with strategy.scope():
        model = gpt()
        rate = keras.optimizers.schedules.CosineDecay(0.0, steps * 9 // 10, warmup_target=3e-3, warmup_steps=steps // 10)
        model.compile(
            keras.optimizers.Adam(rate, global_clipnorm=1.0), keras.losses.SparseCategoricalCrossentropy(from_logits=True)
        )
    train, validation = windows()
    rng = np.random.default_rng(order)
    rows = np.concatenate([rng.permutation(len(train)) for _ in range(-(-steps * BATCH // len(train)))])[: steps * BATCH]
    data = tf.data.Dataset.from_tensor_slices(train[rows]).batch(BATCH).map(lambda x: (x[:, :-1], x[:, 1:])).prefetch(2)
    seen = tf.data.Dataset.from_tensor_slices((validation[:, :-1], validation[:, 1:])).batch(BATCH)
    history = model.fit(data, steps_per_epoch=steps // POINTS, epochs=POINTS, validation_data=seen, verbose=0)
    return history.history["val_loss"]


def loss(args: argparse.Namespace) -> None:
    tfdist.use_logical_cpus(2)
    names = args.only or ["none", *COMPRESSORS]
    found: dict[str, list[list[float]]] = {name: [] for name in names}  # by order
    for order in range(args.orders):
        for name in names:
            parameters = None if name == names[0] else args.parameters
            key = {
                "order": order,
                "steps": args.steps,
                "zero_stage": args.zero_stage,
                "gradients": name,
                "parameters": parameters,
            }
            found[name].append(_known(args.json, key) or _trained(args.json, key))
            against = found[name][-1][-1] / found[names[0]][order][-1] - 1
            print(f"order {order}  {name:32s} {found[name][-1][-1]:.4f}  {100 * against:+.2f} %", flush=True)
    for name, curves in found.items():
        against = [one[-1] / other[-1] - 1 for one, other in zip(curves, found[names[0]], strict=True)]
        print(f"{name:32s} mean {statistics.mean(one[-1] for one in curves):.4f}  {100 * statistics.mean(against):+.2f} %")
    if args.picture is not None:
        draw(found, args.steps, args.picture)


def _known(file: pathlib.Path | None, key: dict[str, object]) -> list[float] | None:
    """Returns the curve that `file` has of a training."""
    lines = file.read_text("utf-8").splitlines() if file is not None and file.exists() else []
    return next((record["losses"] for record in map(json.loads, lines) if key.items() <= record.items()), None)


def _trained(file: pathlib.Path | None, key: dict[str, object]) -> list[float]:
    compressor = None if key["gradients"].startswith("none") else COMPRESSORS[key["gradients"]]
    settings = {"gradient_compression": compressor, "parameter_compression": COMPRESSORS.get(key["parameters"])}
    losses = validation_losses(key["order"], key["steps"], zero_stage=key["zero_stage"], **settings)
    if file is not None:
        with file.open("a", encoding="utf-8") as stream:
            stream.write(json.dumps({**key, "losses": losses}) + "\n")
    return losses


def draw(found: dict[str, list[list[float]]], steps: int, file: pathlib.Path) -> None:
    """Draws the validation losses, the mean over the orders; beside it how far the compressed ones are from the first."""
    from matplotlib.figure import Figure  # nothing else here needs it

    figure = Figure(figsize=(10, 3.6), layout="constrained")
    left, right = figure.subplots(1, 2)
    x = np.arange(1, POINTS + 1) * (steps // POINTS)
    first = np.array(next(iter(found.values())))  # (orders, points)
    for name, curves in found.items():
        y = np.array(curves)
        left.plot(x, y.mean(0), label=name, linewidth=1.2)
        right.plot(x, 100 * (y / first - 1).mean(0), label=name, linewidth=1.2)
    left.set(xlabel="steps", ylabel="validation loss")
    right.set(xlabel="steps", ylabel=f"over {next(iter(found))}, %")
    right.legend(frameon=False, fontsize="small")
    for axes in (left, right):
        axes.spines[["top", "right"]].set_visible(False)
    figure.savefig(file, dpi=130)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    commands = parser.add_subparsers(required=True)
    one = commands.add_parser("cost")
    one.add_argument("--turns", type=int, default=12)
    one.set_defaults(run=cost)
    other = commands.add_parser("loss")
    other.add_argument("--steps", type=int, default=1000)
    other.add_argument("--orders", type=int, default=3)
    other.add_argument("--zero-stage", type=int, default=2)
    other.add_argument("--parameters", choices=COMPRESSORS, metavar="NAME", help="how parameters travel (default: exactly)")
    other.add_argument("--only", nargs="*", help="compressors, 'none' among them; the first is what others are compared with")
    other.add_argument(
        "--json", type=pathlib.Path, metavar="FILE", help="append a line per training, and go on from those it has"
    )
    other.add_argument("--picture", type=pathlib.Path, metavar="FILE", help="draw the losses of the training")
    other.set_defaults(run=loss)
    args = parser.parse_args()
    args.run(args)


if __name__ == "__main__":
    main()
