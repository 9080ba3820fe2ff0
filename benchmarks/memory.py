"""Peak memory of training under each ZeRO stage, MirroredStrategy and one device, against the stage's formula.

    python -m benchmarks.memory --devices 4 --layers 16 --width 1024

All ranks are logical CPUs of one process, so the process's resident memory is that of all ranks together. Per case, in
a process of its own:

    imported    resident after `import tensorflow, keras, tfdist`, device initialisation and making the strategy
    baseline    resident after training a tiny model of the same kind in the same way for a few steps and dropping it:
                thread pools, kernels' code and Keras's own first-use costs are in (with --no-warmup, no such model)
    peak        the most while the model is built, compiled, traced and trained
    floor       the stage's formula: N ranks x bytes per parameter (parameter, gradient, two Adam slots, float32)

Reported are peak - baseline (`growth`), over the floor, over the parameters' bytes P and over MirroredStrategy's growth
in the same run, and peak - imported (`growth_from_import`). Growth holds more than tensors: the graphs of all ranks, in
Python and in TensorFlow, are in it, whatever the model's width. `--width 16` shows about that part alone.

Each case is measured with two allocators, since a resident set shows what an allocator keeps, not what is in use:

    malloc      TensorFlow's tensors come from the C library, which returns every freed block of 1 MiB and more
                (`MALLOC_MMAP_THRESHOLD_`, `MALLOC_TRIM_THRESHOLD_`; glibc raises them otherwise). The oneDNN kernels
                are off, because they bring the other allocator. The targets are read from these figures.
    bfc         TensorFlow's default on x86: an arena that never shrinks. Its resident growth is what a user of the
                default sees; its own count of the bytes in use is exact, and is reported as `tensors`.
"""

from __future__ import annotations

import argparse
import itertools
import pathlib
import sys

if not __package__:  # run as a file: its folder stands on the path instead of the repository
    sys.path[0] = str(pathlib.Path(__file__).resolve().parent.parent)

from benchmarks import cases
from benchmarks.cases import MIRRORED, Case, Child, ChildError, Target

_THRESHOLDS = {"MALLOC_MMAP_THRESHOLD_": str(2**20), "MALLOC_TRIM_THRESHOLD_": str(2**20)}
ALLOCATORS = {  # the environment of a child
    "malloc": {**_THRESHOLDS, "TF_ENABLE_ONEDNN_OPTS": "0"},
    "bfc": {**_THRESHOLDS, "TF_ENABLE_ONEDNN_OPTS": "1"},
}
FLOOR_LIMIT, MIRRORED_LIMIT = 1.5, 0.6  # of stage 3


def parse_args(argv: list[str] | None = None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--devices", type=cases.positive_int, default=4, help="logical CPUs (default: 4)")
    parser.add_argument("--layers", type=cases.positive_int, default=16, help="Dense layers (default: 16)")
    parser.add_argument("--width", type=cases.positive_int, default=1024, help="units of each (default: 1024)")
    parser.add_argument("--per-device-batch-size", type=cases.positive_int, default=8, help="examples (default: 8)")
    parser.add_argument("--steps", type=cases.positive_int, default=6, help="training steps (default: 6)")
    parser.add_argument("--loop", choices=cases.LOOPS, default="function", help="a tf.function, or model.fit (default: function)")
    parser.add_argument("--allocators", nargs="+", choices=ALLOCATORS, default=list(ALLOCATORS), help="default: malloc bfc")
    parser.add_argument("--no-warmup", dest="warmup", action="store_false", help="no tiny model before the baseline")
    cases.add_common_arguments(parser, timeout_seconds=900)
    args = parser.parse_args(argv)
    cases.check_common_arguments(parser, args)
    if len(set(args.allocators)) < len(args.allocators):
        parser.error(f"argument --allocators: each at most once. Received: {' '.join(args.allocators)}")
    # Mirrored first: the others are compared with it.
    args.contenders = sorted(args.contenders, key=lambda contender: contender != MIRRORED)
    return args


def measure(args: argparse.Namespace, contender: str, allocator: str) -> dict:
    """Runs one case in a child and returns its JSON record."""
    case = Case(
        contender=contender,
        model="mlp",
        devices=args.devices,
        layers=args.layers,
        width=args.width,
        global_batch_size=args.per_device_batch_size * (1 if contender == cases.SINGLE else args.devices),
        loop=args.loop,
        bucket_bytes=args.bucket_bytes,
        prefetch=args.prefetch,
    )
    with Child("memory", case, environment=ALLOCATORS[allocator], timeout_seconds=args.timeout_seconds) as child:
        found = child.ask({"steps": args.steps, "warmup": args.warmup})
    growth = found["peak_rss_bytes"] - found["baseline_rss_bytes"]
    return {
        "benchmark": "memory",
        "case": case.label,
        **vars(case),
        "allocator": allocator,
        "steps": args.steps,
        "warmup": args.warmup,
        **found,
        "growth_bytes": growth,
        "growth_from_import_bytes": found["peak_rss_bytes"] - found["imported_rss_bytes"],
        "growth_over_floor": growth / found["floor_bytes"],
        "growth_over_parameters": growth / found["parameter_bytes"],
        "environment": ALLOCATORS[allocator],
        **cases.machine_fields(),
    }


def targets(records: list[dict]) -> list[Target]:
    """Returns what is promised of stage 3, for 16 x Dense(1024) on 4 devices; other sizes promise nothing."""
    promised = ("zero3", 4, 16, 1024, "malloc", True)
    keys = ("contender", "devices", "layers", "width", "allocator", "warmup")
    found = next((record for record in records if tuple(record[key] for key in keys) == promised), {})
    floor, mirrored = found.get("growth_over_floor"), found.get("growth_over_mirrored")
    return [
        Target(f"zero3 x4, 16 x Dense(1024), malloc: {text}, at most {limit}", value, value is not None and value <= limit)
        for text, value, limit in (
            ("growth over 16 bytes per parameter", floor, FLOOR_LIMIT),
            ("growth over MirroredStrategy's", mirrored, MIRRORED_LIMIT),
        )
    ]


def show(records: list[dict]) -> str:
    header = [
        "MiB",
        "allocator",
        "P",
        "floor",
        "growth",
        "/floor",
        "/P",
        "/mirrored",
        "from import",
        "build",
        "1st step",
    ]
    header += ["later", "at rest", "tensors", "/floor"]
    return cases.table(header, [_row(record) for record in records])


def _row(record: dict) -> list[str | None]:
    def mib(size: float | None) -> str | None:
        return None if size is None else cases.number(size / 2**20, 1)

    baseline = record["baseline_rss_bytes"]
    tensors = record["tensor_peak_bytes"]
    return [
        record["case"],
        record["allocator"],
        mib(record["parameter_bytes"]),
        mib(record["floor_bytes"]),
        mib(record["growth_bytes"]),
        cases.number(record["growth_over_floor"]),
        cases.number(record["growth_over_parameters"]),
        cases.number(record.get("growth_over_mirrored")),
        mib(record["growth_from_import_bytes"]),
        *(mib(peak - baseline) for peak in record["phase_peak_rss_bytes"].values()),
        mib(record["at_rest_rss_bytes"] - baseline),
        mib(tensors),
        None if tensors is None else cases.number(tensors / record["floor_bytes"]),
    ]


def main(argv: list[str] | None = None) -> int:
    args = parse_args(argv)
    records, failures = [], 0
    mirrored: dict[str, int] = {}  # growth by allocator
    for contender, allocator in itertools.product(args.contenders, args.allocators):
        cases.progress(f"measuring {contender}, {allocator} ...")
        try:
            record = measure(args, contender, allocator)
        except ChildError as error:
            failures += 1
            cases.progress(f"FAILED {error}")
            failed = {"benchmark": "memory", "contender": contender, "allocator": allocator, "error": error.reason}
            cases.emit({**failed, **cases.machine_fields()}, args.json)
            continue
        if contender == MIRRORED:
            mirrored[allocator] = record["growth_bytes"]
        if allocator in mirrored:
            record["growth_over_mirrored"] = record["growth_bytes"] / mirrored[allocator]
        records.append(record)
        cases.emit(record, args.json)
    found = targets(records)
    print("\n" + "\n".join([show(records), "", *map(str, found)]))
    return cases.exit_code(found, failures=failures, check=args.check)


if __name__ == "__main__":
    sys.exit(main())
