"""Peak memory of training under each ZeRO stage, TensorFlow's mirrored strategy and one device, against the stage's formula.

    python -m benchmarks.memory --devices 4 --layers 16 --width 1024
    python -m benchmarks.memory --workers 4 --layers 16 --width 2048

With `--devices` all ranks are logical CPUs of one process, whose resident memory is that of all ranks together; the strategies
are `ShardedStrategy` and `MirroredStrategy`. With `--workers` every rank is a process of one TF_CONFIG job, each of which
measures itself, and figures are per worker: the largest, and each one's; the strategies are `MultiWorkerShardedStrategy` and
`MultiWorkerMirroredStrategy`. Per case, in processes of its own:

    imported    resident after `import tensorflow, keras, tfdist`, making the strategy and initialising its devices (a worker
                has met the others and runs its server)
    baseline    resident after training a tiny model of the same kind in the same way for a few steps and dropping it:
                thread pools, kernels' code and Keras's own first-use costs are in. Without that model, which is the default
                with `--workers`, it is `imported`
    peak        the most while the model is built, compiled, traced and trained
    floor       the stage's formula: ranks of the process x bytes per parameter (parameter, gradient, two Adam slots, float32)

Reported are peak - baseline (`growth`), over the floor, over the parameters' bytes P and over the mirrored strategy's growth
in the same run, and peak - imported (`growth_from_import`). Growth holds more than tensors: the graphs of all ranks, in
Python and in TensorFlow, are in it, whatever the model's width. `--width 16` shows about that part alone.

With `--workers` a second comparison is for the building of model and optimizer alone. Initial values are drawn on the first
worker and sent one variable at a time, so beside what stays two variables should be there in full: `built` is the parameters
and slots that a worker keeps, and twice the largest variable.

Each case is measured with two allocators, since a resident set shows what an allocator keeps, not what is in use:

    malloc      TensorFlow's tensors come from the C library, which returns every freed block of 64 KiB and more
                (`MALLOC_MMAP_THRESHOLD_`, `MALLOC_TRIM_THRESHOLD_`; glibc raises them otherwise). The oneDNN kernels
                are off, because they bring the other allocator. The targets are read from these figures.
    bfc         TensorFlow's default on x86: an arena that never shrinks. Its resident growth is what a user of the
                default sees; its own count of the bytes in use is exact, and is reported as `tensors`. Not with
                `--workers`, unless asked for.
"""

from __future__ import annotations

import argparse
import itertools
import pathlib
import sys

if not __package__:  # run as a file: its folder stands on the path instead of the repository
    sys.path[0] = str(pathlib.Path(__file__).resolve().parent.parent)

from benchmarks import cases
from benchmarks.cases import SINGLE, Case, Target
from benchmarks.job import Job, JobError
from benchmarks.resident import ALLOCATORS

# By whether the ranks are workers: what is measured unless told otherwise, and the limits, by field of a record.
DEFAULTS = {
    False: {"width": 1024, "allocators": list(ALLOCATORS), "warmup": True},
    True: {"width": 2048, "allocators": ["malloc"], "warmup": False},
}
LIMITS = {
    False: {
        "growth_over_floor": ("growth over 16 bytes per parameter", 1.5),
        "growth_over_mirrored": ("growth over MirroredStrategy's", 0.6),
    },
    True: {"growth_over_floor": ("growth of a worker over 16 / 4 bytes per parameter", 1.6)},
}


def parse_args(argv: list[str] | None = None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    ranks = parser.add_mutually_exclusive_group()
    ranks.add_argument("--devices", type=cases.positive_int, default=4, help="logical CPUs of one process (default: 4)")
    ranks.add_argument("--workers", type=cases.positive_int, nargs="+", metavar="N", help="processes of a job, one device each")
    parser.add_argument("--layers", type=cases.positive_int, default=16, help="Dense layers (default: 16)")
    parser.add_argument("--width", type=cases.positive_int, help="units of each (default: 1024, with --workers 2048)")
    parser.add_argument("--per-device-batch-size", type=cases.positive_int, default=8, help="examples (default: 8)")
    parser.add_argument("--steps", type=cases.positive_int, default=6, help="training steps (default: 6)")
    parser.add_argument("--loop", choices=cases.LOOPS, default="function", help="a tf.function, or model.fit (default: function)")
    allocators_help = "default: malloc bfc, with --workers malloc"
    parser.add_argument("--allocators", nargs="+", choices=ALLOCATORS, help=allocators_help)
    warmup_help = "a tiny model before the baseline (default: yes, with --workers no)"
    parser.add_argument("--warmup", action=argparse.BooleanOptionalAction, help=warmup_help)
    cases.add_common_arguments(parser, timeout_seconds=900)
    args = parser.parse_args(argv)
    cases.check_common_arguments(parser, args)
    for name, value in DEFAULTS[bool(args.workers)].items():
        if getattr(args, name) is None:
            setattr(args, name, value)
    if len(set(args.allocators)) < len(args.allocators):
        parser.error(f"argument --allocators: each at most once. Received: {' '.join(args.allocators)}")
    # Mirrored first: the others are compared with it.
    args.contenders = sorted(args.contenders, key=lambda contender: contender != args.mirrored)
    return args


def measure(args: argparse.Namespace, devices: int, contender: str, allocator: str) -> dict:
    """Runs one case in a job and returns its JSON record: that of the process that has grown most, and all growths."""
    case = Case(
        contender=contender,
        model="mlp",
        devices=devices,
        layers=args.layers,
        width=args.width,
        global_batch_size=args.per_device_batch_size * (1 if contender == SINGLE else devices),
        loop=args.loop,
        multi_worker=bool(args.workers),
        bucket_bytes=args.bucket_bytes,
        prefetch=args.prefetch,
        pack_bytes=args.pack_bytes,
    )
    with Job("memory", case, environment=ALLOCATORS[allocator], timeout_seconds=args.timeout_seconds) as job:
        answers = job.ask({"steps": args.steps, "warmup": args.warmup})
    growths = [answer["peak_rss_bytes"] - answer["baseline_rss_bytes"] for answer in answers]
    growth = max(growths)
    found = answers[growths.index(growth)]
    phases = {
        phase: max(answer["phase_peak_rss_bytes"][phase] - answer["baseline_rss_bytes"] for answer in answers)
        for phase in found["phase_peak_rss_bytes"]
    }
    return {
        "benchmark": "memory",
        "case": case.label,
        **vars(case),
        "allocator": allocator,
        "steps": args.steps,
        "warmup": args.warmup,
        **found,
        "growth_bytes": growth,
        "growth_bytes_by_process": growths,
        "growth_from_import_bytes": found["peak_rss_bytes"] - found["imported_rss_bytes"],
        "growth_over_floor": growth / found["floor_bytes"],
        "growth_over_parameters": growth / found["parameter_bytes"],
        "phase_growth_bytes": phases,
        "build_growth_over_floor": phases["build"] / found["build_floor_bytes"],
        "environment": ALLOCATORS[allocator],
        **cases.machine_fields(),
    }


def targets(records: list[dict], multi_worker: bool) -> list[Target]:
    """Returns what is promised of stage 3, for 16 layers of the default width on 4 ranks; other sizes promise nothing."""
    width, warmup = DEFAULTS[multi_worker]["width"], DEFAULTS[multi_worker]["warmup"]
    promised = {"contender": "zero3", "devices": 4, "layers": 16, "width": width, "allocator": "malloc", "warmup": warmup}
    found = next((record for record in records if promised.items() <= record.items()), {})
    ranks = "4 workers" if multi_worker else "x4"
    return [
        Target(
            f"zero3 {ranks}, 16 x Dense({width}), malloc: {text}, at most {limit}",
            found.get(field),
            field in found and found[field] <= limit,
        )
        for field, (text, limit) in LIMITS[multi_worker].items()
    ]


def show(records: list[dict], multi_worker: bool) -> str:
    header = ["MiB per worker" if multi_worker else "MiB"]
    header += "allocator,P,floor,growth,/floor,/P,/mirrored,from import,build,1st step,later,at rest,tensors,/floor".split(",")
    header += ["built", "build/built", "growth of each worker"] if multi_worker else []
    return cases.table(header, [_row(record, multi_worker) for record in records])


def _row(record: dict, multi_worker: bool) -> list[str | None]:
    def mib(size: float | None) -> str | None:
        return None if size is None else cases.number(size / 2**20, 1)

    tensors = record["tensor_peak_bytes"]
    row = [
        record["case"],
        record["allocator"],
        mib(record["parameter_bytes"]),
        mib(record["floor_bytes"]),
        mib(record["growth_bytes"]),
        cases.number(record["growth_over_floor"]),
        cases.number(record["growth_over_parameters"]),
        cases.number(record.get("growth_over_mirrored")),
        mib(record["growth_from_import_bytes"]),
        *map(mib, record["phase_growth_bytes"].values()),
        mib(record["at_rest_rss_bytes"] - record["baseline_rss_bytes"]),
        mib(tensors),
        None if tensors is None else cases.number(tensors / record["floor_bytes"]),
    ]
    if multi_worker:
        each = " ".join(mib(growth) for growth in record["growth_bytes_by_process"])
        row += [mib(record["build_floor_bytes"]), cases.number(record["build_growth_over_floor"]), each]
    return row


def main(argv: list[str] | None = None) -> int:
    args = parse_args(argv)
    records, failures = [], 0
    mirrored: dict[tuple[int, str], int] = {}  # growth by devices and allocator
    ranks = args.workers or [args.devices]
    for devices, contender, allocator in itertools.product(ranks, args.contenders, args.allocators):
        if contender == SINGLE and devices != ranks[0]:
            continue  # the same for all
        cases.progress(f"measuring {contender} on {devices}, {allocator} ...")
        try:
            record = measure(args, devices, contender, allocator)
        except JobError as error:
            failures += 1
            cases.progress(f"FAILED {error}")
            case = {"contender": contender, "devices": devices, "multi_worker": bool(args.workers), "allocator": allocator}
            cases.emit({"benchmark": "memory", **case, "error": error.reason, **cases.machine_fields()}, args.json)
            continue
        if contender == args.mirrored:
            mirrored[devices, allocator] = record["growth_bytes"]
        if (devices, allocator) in mirrored:
            record["growth_over_mirrored"] = record["growth_bytes"] / mirrored[devices, allocator]
        records.append(record)
        cases.emit(record, args.json)
    found = targets(records, bool(args.workers))
    print("\n" + "\n".join([show(records, bool(args.workers)), "", *map(str, found)]))
    return cases.exit_code(found, failures=failures, check=args.check)


if __name__ == "__main__":
    sys.exit(main())
