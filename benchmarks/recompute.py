"""Memory of a step of a GPT with and without recomputation of its blocks, beside PyTorch's `checkpoint_wrapper` under FSDP2.

    python -m benchmarks.recompute --torch-python PATH_TO_PYTHON
    python -m benchmarks.recompute --layers 2 --width 32 --sequence-length 16 --steps 1    (tiny; without PyTorch)

Every case is trained alone: tfdist on logical CPUs of one process, or on parts of one GPU, PyTorch in a process a rank over gloo;
figures are of all ranks together. `step` is the most that is in use during a step, less what was before it: activations,
gradients, gathered layers and messages. It is the median of some steps, which begin with the freed memory given back (see
`benchmarks.resident`). `saved` is the share of it that recomputation saves. Losses of a framework must be the same with and
without. A table, and a line of JSON for each case, are printed.
"""

from __future__ import annotations

import argparse
import json
import os
import socket
import statistics
import subprocess
import sys
import time
from typing import Any

from benchmarks.cases import Case, add_logical_gpus, positive_int
from benchmarks.memory import Memory, growths
from benchmarks.resident import MALLOC

CONTENDERS = ("zero0", "zero3", "fsdp2")


def parse_args(argv: list[str] | None = None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    sizes = {"devices": 2, "layers": 12, "width": 192, "batch-size": 8, "sequence-length": 192, "vocabulary": 256, "steps": 3}
    for name, default in sizes.items():
        parser.add_argument(f"--{name}", type=positive_int, default=default, help=f"default: {default}")
    add_logical_gpus(parser)
    parser.add_argument("--torch-python", help="a Python with PyTorch; without it only tfdist is measured")
    parser.add_argument("--contenders", nargs="+", choices=CONTENDERS, default=list(CONTENDERS), help="default: all")
    parser.add_argument("--child", help=argparse.SUPPRESS)
    return parser.parse_args(argv)


def case_of(args: argparse.Namespace, contender: str) -> Case:
    return Case(
        contender,
        "gpt",
        args.devices,
        args.layers,
        args.width,
        args.batch_size,
        sequence_length=args.sequence_length,
        vocabulary=args.vocabulary,
        logical_gpus=args.logical_gpus,
    )


def measure(argv: list[str], args: argparse.Namespace, name: str, is_recomputed: bool) -> dict[str, Any]:
    """Trains one case in processes of its own; returns its record."""
    child = json.dumps([name, is_recomputed])
    ranks = args.devices if name == "fsdp2" else 1
    python = args.torch_python if name == "fsdp2" else sys.executable
    module = "benchmarks.torch_recompute" if name == "fsdp2" else "benchmarks.recompute"
    with socket.socket() as free:
        free.bind(("localhost", 0))
        port = str(free.getsockname()[1])
    meeting = {"WORLD_SIZE": str(ranks), "MASTER_ADDR": "localhost", "MASTER_PORT": port}
    command = [python, "-m", module, *argv, "--child", child]
    pipes: Any = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE, "text": True}
    processes = [
        subprocess.Popen(command, env={**os.environ, **MALLOC, **meeting, "RANK": str(rank)}, **pipes) for rank in range(ranks)
    ]
    outputs = [process.communicate() for process in processes]
    for process, (_, error) in zip(processes, outputs, strict=True):
        if process.returncode:
            sys.exit(f"{name}: {error[-2000:]}")
    answers = [json.loads(output.splitlines()[-1]) for output, _ in outputs]
    return {
        "benchmark": "recompute",
        **vars(case_of(args, name)),
        "recompute": is_recomputed,
        "step_bytes": statistics.median(map(sum, zip(*(answer["growths"] for answer in answers), strict=True))),
        "seconds": max(answer["seconds"] for answer in answers),
        "loss": statistics.mean(answer["loss"] for answer in answers),
    }


def answer(step: Any, steps: int, memory: Memory) -> None:
    """Prints what a child has measured of `step`, which returns its loss: memory, seconds of a step, and the last loss."""
    for _ in range(2):
        step()
    start = time.perf_counter()
    for _ in range(steps):
        step()
    seconds, losses = (time.perf_counter() - start) / steps, []
    found = growths(memory, lambda: losses.append(step()), steps)
    print(json.dumps({"growths": found, "seconds": seconds, "loss": losses[-1]}), flush=True)


def train_tfdist(args: argparse.Namespace, name: str, is_recomputed: bool) -> None:
    """A child: tfdist at a stage."""
    import keras
    import tensorflow as tf

    import tfdist
    from benchmarks.devices import memory_of, take_devices
    from benchmarks.gpt_arrays import make_batch

    class Block(keras.layers.Layer):
        def __init__(self, name: str):
            super().__init__(name=name)
            self.attention_norm, self.mlp_norm = keras.layers.LayerNormalization(), keras.layers.LayerNormalization()
            self.attention = keras.layers.MultiHeadAttention(case.heads, case.width // case.heads)
            self.mlp = keras.Sequential([keras.layers.Dense(4 * case.width, "gelu"), keras.layers.Dense(case.width)])

        def call(self, x: tf.Tensor) -> tf.Tensor:
            normed = self.attention_norm(x)
            x = x + self.attention(normed, normed, use_causal_mask=True)
            return x + self.mlp(self.mlp_norm(x))

    case = case_of(args, name)
    devices = take_devices(case.devices, case.logical_gpus)
    strategy = tfdist.ShardedStrategy(devices, zero_stage=int(name[-1]))
    keras.utils.set_random_seed(1)
    with strategy.scope():
        blocks = [Block(f"block_{i}") for i in range(case.layers)]
        embedding = keras.layers.Embedding(case.vocabulary, case.width)
        ends = [keras.layers.LayerNormalization(), keras.layers.Dense(case.vocabulary)]
        model = keras.Sequential([keras.Input((case.sequence_length,), dtype="int32"), embedding, *blocks, *ends])
        if is_recomputed:
            tfdist.recompute(model, "block")
        model.compile(keras.optimizers.AdamW(1e-4), keras.losses.SparseCategoricalCrossentropy(from_logits=True))
    dataset = tf.data.Dataset.from_tensor_slices(make_batch(case)).batch(case.global_batch_size)
    batch = next(iter(strategy.experimental_distribute_dataset(dataset)))
    train = tf.function(lambda batch: strategy.run(lambda *data: model.train_step(data)["loss"], args=batch), jit_compile=False)
    answer(lambda: float(strategy.reduce("MEAN", train(batch), axis=None)), args.steps, memory_of(devices))


def table(records: list[dict[str, Any]]) -> str:
    lines = ["case    recompute   step MiB   saved   seconds"]
    kept = {record["contender"]: record["step_bytes"] for record in records if not record["recompute"]}
    for record in records:
        saved = f"{1 - record['step_bytes'] / kept[record['contender']]:7.0%}" if record["recompute"] else " " * 7
        mib = record["step_bytes"] / 2**20
        lines.append(f"{record['contender']:8}{record['recompute']!s:9} {mib:10.1f} {saved} {record['seconds']:9.2f}")
    return "\n".join(lines)


def main() -> None:
    args = parse_args()
    if args.child:
        train_tfdist(args, *json.loads(args.child))
        return
    contenders = [name for name in args.contenders if name != "fsdp2" or args.torch_python]
    records = [measure(sys.argv[1:], args, name, again) for name in contenders for again in (False, True)]
    for kept, again in zip(records[::2], records[1::2], strict=True):
        if abs(kept["loss"] - again["loss"]) > 1e-4 * abs(kept["loss"]):
            sys.exit(f"Losses differ: {kept['loss']} and, recomputed, {again['loss']} of {kept['contender']}.")
    print(table(records))
    for record in records:
        print(json.dumps(record))


if __name__ == "__main__":
    main()
