"""Steps per second under each ZeRO stage, TensorFlow's mirrored strategy and one device, all in one run.

    python -m benchmarks.throughput --devices 2 4 --model mlp
    python -m benchmarks.throughput --workers 2 4 --model mlp

With `--devices` the ranks of a contender are logical CPUs of one process, with `--workers` one process each, of one TF_CONFIG
job; there the mirrored strategy is `MultiWorkerMirroredStrategy`, and `single` takes part only when asked for.

Every contender lives in a job of its own, which builds and traces its step and then waits. The parent lets them take turns, one
at a time, round after round, so that a machine whose speed drifts slows all of them; the order rotates by one each round, and a
first round is not counted. All workers of a job get the command at once, and its time is that of the slowest. Per contender: the
median of steps per second, and the median over rounds of the ratio to the mirrored strategy in the same round. All contenders
train the same model on the same global batch from the same weights; their losses after the warm-up must agree.

The ranks share the cores of one machine: the ratios say what a strategy adds, not how it scales.
"""

from __future__ import annotations

import argparse
import contextlib
import pathlib
import statistics
import sys

if not __package__:  # run as a file: its folder stands on the path instead of the repository
    sys.path[0] = str(pathlib.Path(__file__).resolve().parent.parent)

from benchmarks import cases
from benchmarks.cases import SINGLE, Case, Target
from benchmarks.job import Job, JobError

SIZES = {"mlp": {"layers": 8, "width": 1024}, "gpt": {"layers": 4, "width": 128}}
LIMITS = {  # by whether the ranks are workers: of the mirrored strategy's steps per second
    False: {"zero1": 1.0, "zero2": 1.0, "zero3": 0.85},
    True: {"zero1": 1.0, "zero2": 1.0, "zero3": 0.8},
}
# Relative, after the warm-up. Sums are made in other orders, and without tfdist Keras's Adam takes the gradient of an
# embedding as sparse rows, which is not quite the same update.
LOSS_TOLERANCE = 1e-3


def parse_args(argv: list[str] | None = None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    ranks = parser.add_mutually_exclusive_group()
    devices_help = "logical CPUs of one process (default: 2 4)"
    ranks.add_argument("--devices", type=cases.positive_int, nargs="+", metavar="N", default=[2, 4], help=devices_help)
    ranks.add_argument("--workers", type=cases.positive_int, nargs="+", metavar="N", help="processes of a job, one device each")
    parser.add_argument("--model", choices=cases.MODELS, default="mlp", help="default: mlp")
    parser.add_argument("--layers", type=cases.positive_int, help="default: 8 (mlp), 4 (gpt)")
    parser.add_argument("--width", type=cases.positive_int, help="default: 1024 (mlp), 128 (gpt)")
    parser.add_argument("--heads", type=cases.positive_int, default=4, help="of the gpt (default: 4)")
    parser.add_argument("--batch-size", type=cases.positive_int, default=64, help="examples over all devices (default: 64)")
    parser.add_argument("--rounds", type=cases.positive_int, default=7, help="turns of every contender (default: 7)")
    parser.add_argument("--steps", type=cases.positive_int, default=10, help="steps of one turn (default: 10)")
    parser.add_argument("--loop", choices=cases.LOOPS, default="function", help="a tf.function, or model.fit (default: function)")
    cases.add_common_arguments(parser, timeout_seconds=300)
    args = parser.parse_args(argv)
    if args.workers and not args.contenders:
        args.contenders = [contender for contender in cases.WORKER_CONTENDERS if contender != SINGLE]
    cases.check_common_arguments(parser, args)
    args.layers = args.layers or SIZES[args.model]["layers"]
    args.width = args.width or SIZES[args.model]["width"]
    if len(set(args.devices)) < len(args.devices):
        parser.error(f"argument --devices: each number at most once. Received: {args.devices}")
    for number in args.workers or args.devices:
        if args.batch_size % number:
            parser.error(f"argument --batch-size: must be divisible by {number} ranks. Received: {args.batch_size}")
    if args.model == "gpt" and args.width % args.heads:
        parser.error(f"argument --width: must be divisible by --heads {args.heads}. Received: {args.width}")
    return args


def measure(args: argparse.Namespace, devices: int) -> list[dict]:
    """Runs all contenders on `devices` devices, in turns; returns their JSON records, a failed one with an `error`."""
    jobs: dict[str, Job] = {}
    errors: dict[str, str] = {}
    all_cases = {contender: _case(args, devices, contender) for contender in args.contenders}
    speeds: dict[str, list[float | None]] = {contender: [] for contender in args.contenders}
    with contextlib.ExitStack() as stack:
        for contender, case in all_cases.items():
            cases.progress(f"starting {case.label} ...")
            try:
                job = Job("throughput", case, environment={}, timeout_seconds=args.timeout_seconds)
            except JobError as error:
                errors[contender] = error.reason
                cases.progress(f"FAILED {error}")
                continue
            jobs[contender] = stack.enter_context(job)
        for number in range(args.rounds + 1):
            cases.progress(f"{devices} ranks, round {number} of {args.rounds} ...")
            shift = number % len(args.contenders)
            for contender in [*args.contenders[shift:], *args.contenders[:shift]]:
                speed = None
                if contender in jobs and contender not in errors:
                    try:
                        answers = jobs[contender].ask({"steps": args.steps})
                        speed = args.steps / max(answer["seconds"] for answer in answers)
                    except JobError as error:
                        errors[contender] = error.reason
                        cases.progress(f"FAILED {error}")
                if number > 0:
                    speeds[contender].append(speed)
    reference = jobs[args.mirrored].ready[0]["warmup_loss"] if args.mirrored in jobs else None
    return [
        {
            "benchmark": "throughput",
            "case": case.label,
            **vars(case),
            "rounds": args.rounds,
            "steps": args.steps,
            **(jobs[contender].ready[0] if contender in jobs else {}),
            **(
                {"error": errors[contender]}
                if contender in errors
                else _figures(jobs[contender].ready, reference, speeds[contender], speeds.get(args.mirrored, []))
            ),
            **cases.machine_fields(),
        }
        for contender, case in all_cases.items()
    ]


def _case(args: argparse.Namespace, devices: int, contender: str) -> Case:
    return Case(
        contender=contender,
        model=args.model,
        devices=devices,
        layers=args.layers,
        width=args.width,
        global_batch_size=args.batch_size,
        loop=args.loop,
        multi_worker=bool(args.workers),
        bucket_bytes=args.bucket_bytes,
        prefetch=args.prefetch,
        pack_bytes=args.pack_bytes,
        heads=args.heads,
    )


def _figures(
    ready: list[dict], reference_loss: float | None, speeds: list[float], mirrored: list[float | None]
) -> dict[str, object]:
    ratios = [own / other for own, other in zip(speeds, mirrored, strict=False) if other is not None]
    figures = {
        "steps_per_second": statistics.median(speeds),
        "steps_per_second_by_round": speeds,
        "ratio_to_mirrored": statistics.median(ratios) if ratios else None,
        "ratio_to_mirrored_range": [min(ratios), max(ratios)] if ratios else None,
        "ratio_to_mirrored_by_round": ratios,
    }
    losses = [answer["warmup_loss"] for answer in ready]
    tolerance = LOSS_TOLERANCE * abs(reference_loss or 0)
    # A comparison that NaN fails.
    if reference_loss is not None and not all(abs(loss - reference_loss) <= tolerance for loss in losses):
        figures["error"] = f"the loss, {losses}, is not the mirrored strategy's, {reference_loss}: not the same work"
    return figures


def targets(records: list[dict], multi_worker: bool) -> list[Target]:
    """Returns what is promised per contender and number of ranks, for those that were asked for."""
    workers, name = (" workers", "MultiWorkerMirroredStrategy") if multi_worker else ("", "MirroredStrategy")
    return [
        Target(
            f"{record['case']}{workers}, {record['model']}: steps per second over {name}'s, at least {limit}",
            record.get("ratio_to_mirrored"),
            (record.get("ratio_to_mirrored") or 0) >= limit,
        )
        for record in records
        if (limit := LIMITS[multi_worker].get(record["contender"])) is not None
    ]


def show(records: list[dict], multi_worker: bool) -> str:
    rows = []
    for record in records:
        low, high = record.get("ratio_to_mirrored_range") or (None, None)
        rows.append(
            [
                record["case"],
                record["devices"],
                cases.number(record.get("steps_per_second")),
                cases.number(record.get("ratio_to_mirrored")),
                None if low is None else f"{low:.2f} .. {high:.2f}",
                "failed" if "error" in record else "",
            ]
        )
    return cases.table(["contender", "workers" if multi_worker else "devices", "steps/s", "x mirrored", "range", ""], rows)


def main(argv: list[str] | None = None) -> int:
    args = parse_args(argv)
    records = []
    for devices in args.workers or args.devices:
        for record in measure(args, devices):
            records.append(record)
            cases.emit(record, args.json)
    multi_worker = bool(args.workers)
    found = targets(records, multi_worker)
    print("\n" + "\n".join([show(records, multi_worker), "", *map(str, found)]))
    return cases.exit_code(found, failures=sum("error" in record for record in records), check=args.check)


if __name__ == "__main__":
    sys.exit(main())
