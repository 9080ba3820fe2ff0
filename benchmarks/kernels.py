"""What each of tfdist's kernels brings by itself: a training step with one of them, over one with Keras's own functions.

    python -m benchmarks.kernels
    python -m benchmarks.kernels --devices 2 --zero-stage 3 --width 128 --vocabulary 256 --sequence-length 16 --batch-size 128

One process trains the GPT of the suite (its sizes unless told otherwise) in loops that differ in which functions of Keras are
replaced by kernels: none, each one alone, all. A loop takes turns with the one without kernels: off, on, on, off. Shown per
kernel, over that without kernels: the processor time of a step (median over the rounds, and quartiles); its time by the clock,
which says less on a machine that does other work; and the peak of the step's tensors, of those from 256 KiB on, as TensorFlow's
allocator counts them. All losses after the warm-up must agree.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import pathlib
import statistics
import sys
import time
from collections.abc import Iterator, Sequence
from typing import Any

if not __package__:  # run as a file: its folder stands on the path instead of the repository
    sys.path[0] = str(pathlib.Path(__file__).resolve().parent.parent)

from benchmarks import cases, peers, resident, suites
from benchmarks.cases import Case

os.environ |= {"TF_CPP_MIN_LOG_LEVEL": "3", **resident.TUNED}  # read when TensorFlow is imported

from benchmarks.devices import own_devices, tensor_growth
from benchmarks.training import DataLoop, build_strategy
from tfdist.keras_hooks import TABLE

# By kernel: the functions of Keras in whose place it stands.
KERNELS = {
    "gelu": ("gelu",),
    "norms": ("_layer_normalization", "_rms_normalization"),
    "attention": ("_dot_product_attention_xla",),
    "einsum": ("einsum",),
    "crossentropy": ("sparse_categorical_crossentropy",),
}
ALL = "all"
MEMORY_TURNS = 5


def parse_args(argv: Sequence[str] | None = None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--devices", type=cases.positive_int, default=1, help="ranks; default: 1")
    parser.add_argument("--zero-stage", type=int, choices=range(4), default=1, help="default: 1")
    parser.add_argument("--kernels", nargs="+", choices=[*KERNELS, ALL], default=[*KERNELS, ALL], help="default: each, and all")
    small = {name.removeprefix("global_").replace("_", "-"): size for name, size in suites.SIZES[suites.SMALL].items()}
    del small["model"]
    peers.add_sizes(parser, {**small, "rounds": 10, "steps": 2})
    return parser.parse_args(argv)


@contextlib.contextmanager
def only(kernels: Sequence[str]) -> Iterator[None]:
    """Puts Keras's own functions in the place of the other kernels, for what is traced inside."""
    off = {function for name, functions in KERNELS.items() if name not in kernels for function in functions}
    replaced = [(row.name, *row.found()) for row in TABLE.rows if row.name in off]
    for name, owner, function in replaced:
        setattr(owner, name, function.__wrapped__)
    yield
    for name, owner, function in replaced:
        setattr(owner, name, function)


def build_loops(args: argparse.Namespace, case: Case) -> dict[str, DataLoop]:
    strategy = build_strategy(case)
    loops, losses = {}, {}
    for name in ["off", *args.kernels]:
        cases.progress(f"tracing {name} ...")
        with only(KERNELS if name == ALL else [name]):
            loops[name] = DataLoop(case, strategy)
            _, losses[name] = loops[name].run(3)
    for name, loss in losses.items():
        if not abs(loss - losses["off"]) <= peers.LOSS_TOLERANCE * abs(losses["off"]):  # a comparison that NaN fails
            raise SystemExit(f"the loss with {name}, {loss}, is not that without kernels, {losses['off']}: not the same work")
    return loops


def turn(loop: DataLoop, steps: int) -> tuple[float, float]:
    """Runs `steps` steps; returns the seconds of processor time, and of the clock."""
    cpu = time.process_time()
    seconds, _ = loop.run(steps)
    return time.process_time() - cpu, seconds


def peak_bytes(loop: DataLoop, devices: Sequence[str]) -> int | None:
    """Returns what a step's tensors take at most beside those that stay, or None where TensorFlow does not count them."""
    loop.run(1)
    return tensor_growth(devices, lambda: loop.run(1))[0]


def measure(args: argparse.Namespace) -> list[dict[str, Any]]:
    """Returns a record for each loop but the one without kernels."""
    case = peers.make_case(args, f"zero{args.zero_stage}", args.devices, use_kernels=True)
    loops, devices = build_loops(args, case), own_devices(case)
    peaks: dict[str, list[int | None]] = {name: [] for name in loops}
    for _ in range(MEMORY_TURNS):
        for name, loop in loops.items():
            peaks[name].append(peak_bytes(loop, devices))
    off, on = loops.pop("off"), loops
    found: dict[str, list[tuple[float, float]]] = {name: [] for name in on}
    steps: list[float] = []
    for number in range(args.rounds):
        cases.progress(f"round {number + 1} of {args.rounds} ...")
        for name, loop in on.items():
            turns = [turn(each, args.steps) for each in (off, loop, loop, off)]
            found[name].append(tuple((turns[1][i] + turns[2][i]) / (turns[0][i] + turns[3][i]) for i in (0, 1)))
            steps.append((turns[0][0] + turns[3][0]) / (2 * args.steps))
    is_counted = None not in peaks["off"]
    return [
        {
            "benchmark": "kernels",
            "kernel": name,
            **vars(args),
            "cpu_seconds_without": statistics.median(steps),
            "cpu_ratios": [cpu for cpu, _ in ratios],
            "clock_ratios": [clock for _, clock in ratios],
            "peak_bytes_without": statistics.median(peaks["off"]) if is_counted else None,
            "peak_ratio": statistics.median(peaks[name]) / statistics.median(peaks["off"]) if is_counted else None,
            **cases.machine_fields(),
        }
        for name, ratios in found.items()
    ]


def show(records: list[dict[str, Any]]) -> str:
    def quartiles(values: list[float]) -> list[str]:
        low, middle, high = statistics.quantiles(values, n=4) if len(values) > 1 else values * 3
        return [f"{middle:.3f}", f"{low:.3f} .. {high:.3f}"]

    rows = [
        [x["kernel"], *quartiles(x["cpu_ratios"]), *quartiles(x["clock_ratios"]), cases.number(x["peak_ratio"], 3)]
        for x in records
    ]
    one = records[0]
    peak = "" if one["peak_bytes_without"] is None else f", {one['peak_bytes_without'] / 1e6:.0f} MB of tensors at the peak"
    without = f"a step without kernels: {1e3 * one['cpu_seconds_without']:.0f} ms of processor time{peak}"
    return cases.table(["with / without", "CPU", "quartiles", "clock", "quartiles", "peak"], rows) + f"\n{without}"


def main(argv: Sequence[str] | None = None) -> int:
    records = measure(parse_args(argv))
    for record in records:
        print(json.dumps(record))
    print("\n" + show(records))
    return 0


if __name__ == "__main__":
    sys.exit(main())
