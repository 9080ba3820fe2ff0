"""What the ZeRO stages cost in a pipeline: memory, processors' time and bytes of a step whose weights are most of what it holds.

    python -m benchmarks.pipeline_zero
    python -m benchmarks.pipeline_zero --layers 4 --width 16 --steps 1    (tiny)

Dense layers on two pipe ranks and two data ranks, four logical CPUs of one process, by 1F1B, or interleaved. Each case is trained
alone in a process of its own. Figures are of all ranks together, in multiples of what the model's parameters take (`x model`),
but for the time:

    rest       resident between steps, less what was resident before the model was made: weights, slots, and what a program takes
    step       the most that is resident during a step, less what was before it: gathered weights, gradients, messages. The median
               of some steps, each of which begins with the freed memory given back (see `benchmarks.resident`)
    gathered   the whole tensors that all-gathers of a step bring to the ranks of one copy of the model, and
    scattered  those that its reduce-scatters take from them, counted from the traced plan
    seconds    processors' time of a step, all threads together: waiting for a processor does not count

Losses must be the same in all cases.
"""

from __future__ import annotations

import argparse
import json
import math
import os
import statistics
import subprocess
import sys
import time
from typing import Any

from benchmarks.cases import add_logical_gpus, positive_int
from benchmarks.memory import growths
from benchmarks.resident import MALLOC, give_back

CASES: dict[str, dict[str, Any]] = {
    "stage 2": {"zero_stage": 2},
    "stage 3": {"zero_stage": 3},
    "stage 3, anew": {"zero_stage": 3, "reshard_after_microbatch": True},
}
PIPE, DATA = 2, 2


def parse_args(argv: list[str] | None = None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    sizes = {"layers": 16, "width": 1024, "rows": 64, "microbatches": 4, "steps": 5, "stages-per-rank": 1}
    for name, default in sizes.items():
        parser.add_argument(f"--{name}", type=positive_int, default=default, help=f"default: {default}")
    add_logical_gpus(parser)
    parser.add_argument("--child", choices=list(CASES), help=argparse.SUPPRESS)
    return parser.parse_args(argv)


def train(args: argparse.Namespace, zero_stage: int, reshard_after_microbatch: bool = False) -> None:
    """A child: trains, measures and prints its record."""
    import keras
    import numpy as np
    import tensorflow as tf

    import tfdist
    from benchmarks.devices import memory_of, take_devices

    devices = take_devices(PIPE * DATA, args.logical_gpus)
    memory = memory_of(devices)
    strategy = tfdist.ShardedStrategy(devices, zero_stage=zero_stage, pipeline_parallel_size=PIPE, bucket_bytes=4 * 2**20)
    x = np.random.default_rng(0).normal(size=(args.rows, args.width)).astype("float32")
    float(tf.reduce_sum(x))  # TensorFlow's own memory
    give_back()
    before = memory.in_use()
    keras.utils.set_random_seed(1)
    with strategy.scope():
        layers = [keras.layers.Dense(args.width, "tanh", use_bias=False, name=f"dense_{k}") for k in range(args.layers)]
        model = tfdist.PipelineModel(
            keras.Sequential([keras.Input((args.width,)), *layers]),
            num_microbatches=args.microbatches,
            schedule="1f1b" if args.stages_per_rank == 1 else "interleaved",
            stages_per_rank=args.stages_per_rank,
            stages=[f"dense_{k}" for k in range(0, args.layers, args.layers // (PIPE * args.stages_per_rank))][1:],
            reshard_after_microbatch=reshard_after_microbatch,
        )
        model.compile(keras.optimizers.Adam(1e-4), "mse")
        model.optimizer.build(model.trainable_variables)
    dataset = tf.data.Dataset.from_tensor_slices((x, x)).batch(args.rows)
    batch = next(iter(strategy.experimental_distribute_dataset(dataset)))
    step = tf.function(lambda batch: strategy.run(lambda *data: model.train_step(data)["loss"], args=batch))
    losses = [float(strategy.reduce("MEAN", step(batch), axis=None)) for _ in range(2)]
    give_back()
    rest = memory.in_use() - before
    start = time.process_time()
    for _ in range(args.steps):
        losses.append(float(strategy.reduce("MEAN", step(batch), axis=None)))
    seconds = (time.process_time() - start) / args.steps
    grown = growths(memory, lambda: losses.append(float(strategy.reduce("MEAN", step(batch), axis=None))), args.steps)
    model_bytes = 4 * args.layers * args.width**2

    def moved(*kinds: str) -> float:
        """How much the whole tensors are that messages of these kinds bring or take, for a data rank."""
        records = [(r, len(r.ranks)) for mine in strategy.last_plan.records for r in mine]
        sizes = {"unshard": lambda size: size, "all_gather": lambda size: size, "reduce_scatter": lambda _: 1}
        found = [
            math.prod(r.shape) * tf.as_dtype(r.dtype).size * sizes[kind](size)
            for r, size in records
            for kind in kinds
            if r.label.startswith(kind) and size == DATA
        ]
        return sum(found) / DATA / model_bytes

    record = {
        "rest": rest / model_bytes,
        "step": statistics.median(grown) / model_bytes,
        "gathered": moved("unshard", "all_gather"),
        "scattered": moved("reduce_scatter"),
        "seconds": seconds,
        "loss": losses[-1],
    }
    print(json.dumps(record), flush=True)


def main() -> None:
    args = parse_args()
    if args.child:
        train(args, **CASES[args.child])
        return
    records = {}
    for name in CASES:
        command = [sys.executable, "-m", "benchmarks.pipeline_zero", *sys.argv[1:], "--child", name]
        done = subprocess.run(command, env={**os.environ, **MALLOC}, capture_output=True, text=True, check=False)
        if done.returncode:
            sys.exit(f"{name}: {done.stderr[-2000:]}")
        records[name] = json.loads(done.stdout.splitlines()[-1])
    losses = [record.pop("loss") for record in records.values()]
    if max(losses) - min(losses) > 1e-4 * max(losses):
        sys.exit(f"Losses differ: {losses}")
    columns = list(next(iter(records.values())))
    print(f"{'x model':16}" + "".join(f"{column:>10}" for column in columns))
    for name, record in records.items():
        print(f"{name:16}" + "".join(f"{record[column]:10.2f}" for column in columns))
    print(json.dumps({"benchmark": "pipeline_zero", **vars(args), "records": records}))


if __name__ == "__main__":
    main()
