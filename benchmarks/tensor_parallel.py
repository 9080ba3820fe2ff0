"""Tokens per second and model-state bytes of a rank at 1, 2 and 4 tensor ranks, beside PyTorch's tensor parallelism, in one run.

    python -m benchmarks.tensor_parallel --devices 1 2 4
    python -m benchmarks.tensor_parallel --torch-python PATH_TO_PYTHON

The model is the GPT of `examples/train_gpt.py`, cut by `tfdist.parallelize`: embedding by rows, attention by heads, MLPs as
column and row, the head by column with gathered logits; the batch is whole on every rank, and of static shape. PyTorch's
contender is `parallelize_module` with the same cuts. Both start from the same weights, train on the same batch with Adam, and
their losses after the warm-up must agree.

tfdist's ranks are logical CPUs of one process, PyTorch's are processes that talk over gloo: what each framework offers on one
machine's CPUs. PyTorch is asked for with `--torch-python`, a Python that can import torch and NumPy; without it, this one is
tried.

Every case lives in processes of its own, which build, warm up and then wait. They take turns, round after round, in rotating
order, and the first round is not counted. Per case: the median of the tokens per second; the median, over rounds, of the ratio to
the same framework with one rank in that round, and of tfdist to PyTorch with as many ranks. Ranks share the cores of one
machine: nothing gets faster by more of them.
"""

from __future__ import annotations

import argparse
import contextlib
import os
import pathlib
import statistics
import subprocess
import sys

if not __package__:  # run as a file: its folder stands on the path instead of the repository
    sys.path[0] = str(pathlib.Path(__file__).resolve().parent.parent)

from benchmarks import cases
from benchmarks.cases import TENSOR, TORCH, Case
from benchmarks.job import Job, JobError

# Relative, after the warm-up.
LOSS_TOLERANCE = 1e-5


def parse_args(argv: list[str] | None = None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--devices", type=cases.positive_int, nargs="+", metavar="N", default=[1, 2, 4], help="tensor ranks")
    parser.add_argument("--layers", type=cases.positive_int, default=4, help="default: 4")
    parser.add_argument("--width", type=cases.positive_int, default=128, help="default: 128")
    parser.add_argument("--heads", type=cases.positive_int, default=4, help="default: 4")
    parser.add_argument("--sequence-length", type=cases.positive_int, default=64, help="default: 64")
    parser.add_argument("--vocabulary", type=cases.positive_int, default=256, help="default: 256")
    parser.add_argument("--batch-size", type=cases.positive_int, default=32, help="examples of a step (default: 32)")
    parser.add_argument("--rounds", type=cases.positive_int, default=7, help="turns of every case (default: 7)")
    parser.add_argument("--steps", type=cases.positive_int, default=10, help="steps of one turn (default: 10)")
    parser.add_argument("--torch-python", metavar="PYTHON", default=sys.executable, help="a Python with torch; default: this one")
    parser.add_argument("--torch-preload", metavar="FILE", help="LD_PRELOAD of PyTorch's processes")
    parser.add_argument("--no-torch", action="store_true", help="tfdist alone")
    parser.add_argument("--timeout-seconds", type=cases.positive_float, default=300, help="longest wait for an answer")
    parser.add_argument("--json", type=pathlib.Path, metavar="FILE", help="append the JSON lines to FILE as well")
    args = parser.parse_args(argv)
    if len(set(args.devices)) < len(args.devices):
        parser.error(f"argument --devices: each number at most once. Received: {args.devices}")
    for number in args.devices:
        if args.heads % number or args.width % args.heads or args.vocabulary % number:
            parser.error(f"argument --devices: {number} must divide --heads {args.heads} and --vocabulary {args.vocabulary}")
    return args


def has_torch(python: str) -> bool:
    return subprocess.run([python, "-c", "import torch"], capture_output=True).returncode == 0


def make_case(args: argparse.Namespace, contender: str, devices: int) -> Case:
    return Case(
        contender=contender,
        model="gpt",
        devices=devices,
        layers=args.layers,
        width=args.width,
        global_batch_size=args.batch_size,
        loop="function",
        heads=args.heads,
        sequence_length=args.sequence_length,
        vocabulary=args.vocabulary,
    )


def start(args: argparse.Namespace, case: Case) -> Job:
    environment = {}
    program = [sys.executable, "-m", "benchmarks.child"]
    if case.contender == TORCH:
        program = [args.torch_python, "-m", "benchmarks.torch_child"]
        # Threads that wait sleep: there are more of them than cores, and other contenders are to be left alone.
        threads = max(1, (os.cpu_count() or 1) // case.devices)
        environment = {"OMP_NUM_THREADS": str(threads), "OMP_WAIT_POLICY": "PASSIVE"}
        environment |= {"LD_PRELOAD": args.torch_preload} if args.torch_preload else {}
    return Job("tensor", case, environment=environment, timeout_seconds=args.timeout_seconds, program=program)


def measure(args: argparse.Namespace, contenders: list[str]) -> list[dict]:
    """Runs all cases, in turns; returns their JSON records, a failed one with an `error`."""
    all_cases = [make_case(args, contender, devices) for devices in args.devices for contender in contenders]
    jobs: dict[Case, Job] = {}
    errors: dict[Case, str] = {}
    speeds: dict[Case, list[float]] = {case: [] for case in all_cases}
    tokens = args.batch_size * args.sequence_length * args.steps
    with contextlib.ExitStack() as stack:
        for case in all_cases:
            cases.progress(f"starting {case.label} ...")
            try:
                jobs[case] = stack.enter_context(start(args, case))
            except JobError as error:
                errors[case] = error.reason
                cases.progress(f"FAILED {error}")
        for number in range(args.rounds + 1):
            cases.progress(f"round {number} of {args.rounds} ...")
            shift = number % len(all_cases)
            for case in [*all_cases[shift:], *all_cases[:shift]]:
                if case not in jobs or case in errors:
                    continue
                try:
                    speed = tokens / max(answer["seconds"] for answer in jobs[case].ask({"steps": args.steps}))
                except JobError as error:
                    errors[case] = error.reason
                    cases.progress(f"FAILED {error}")
                    continue
                if number > 0:
                    speeds[case].append(speed)
    reference = next((job.ready[0]["warmup_loss"] for job in jobs.values()), None)
    records = []
    for case in all_cases:
        record = {"benchmark": "tensor_parallel", "case": case.label, **vars(case), "rounds": args.rounds, "steps": args.steps}
        if case in jobs:
            ready = jobs[case].ready
            record |= ready[0] | {"state_bytes": max(answer["state_bytes"] for answer in ready)}
            loss = record["warmup_loss"]
            if not abs(loss - reference) <= LOSS_TOLERANCE * abs(reference):
                errors.setdefault(case, f"the loss, {loss}, is not that of {all_cases[0].label}, {reference}: not the same work")
        if case not in errors:
            record |= figures(speeds, case, all_cases)
        else:
            record["error"] = errors[case]
        records.append({**record, **cases.machine_fields()})
    return records


def figures(speeds: dict[Case, list[float]], case: Case, all_cases: list[Case]) -> dict[str, object]:
    """Returns the speeds of a case and their ratios, by round, to one rank of its framework and to PyTorch."""

    def ratios(contender: str, devices: int) -> list[float]:
        (others,) = ([speeds[x] for x in all_cases if (x.contender, x.devices) == (contender, devices)] or [[]])[:1]
        return [own / other for own, other in zip(speeds[case], others, strict=True)] if others else []

    of_one, of_torch = ratios(case.contender, 1), ratios(TORCH, case.devices)
    return {
        "tokens_per_second": statistics.median(speeds[case]),
        "tokens_per_second_by_round": speeds[case],
        "ratio_to_one_rank": statistics.median(of_one) if of_one else None,
        "ratio_to_torch": statistics.median(of_torch) if of_torch else None,
        "ratio_to_torch_range": [min(of_torch), max(of_torch)] if of_torch else None,
    }


def show(records: list[dict]) -> str:
    rows = []
    for record in records:
        low, high = record.get("ratio_to_torch_range") or (None, None)
        state, mine = record.get("state_bytes"), record["contender"] == TENSOR
        rows.append(
            [
                record["case"],
                None if state is None else f"{state / 1e6:.2f}",
                None if state is None else f"{state / 16 / record['parameters']:.3f}",
                cases.number(record.get("tokens_per_second"), 0),
                cases.number(record.get("ratio_to_one_rank")),
                cases.number(record.get("ratio_to_torch")) if mine else "",
                f"{low:.2f} .. {high:.2f}" if mine and low is not None else "",
                "failed" if "error" in record else "",
            ]
        )
    header = ["tensor ranks", "state MB", "/16 bytes", "tokens/s", "x one rank", "x torch", "range", ""]
    return cases.table(header, rows)


def main(argv: list[str] | None = None) -> int:
    args = parse_args(argv)
    contenders = [TENSOR]
    if not args.no_torch:
        if has_torch(args.torch_python):
            contenders.append(TORCH)
        else:
            cases.progress(f"{pathlib.PurePath(args.torch_python).name} cannot import torch: tfdist alone")
    records = measure(args, contenders)
    for record in records:
        cases.emit(record, args.json)
    print("\n" + show(records))
    return cases.exit_code([], failures=sum("error" in record for record in records), check=False)


if __name__ == "__main__":
    sys.exit(main())
