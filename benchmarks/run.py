"""The suite: data parallel training in tfdist, TensorFlow, PyTorch and DeepSpeed, side by side on the same work.

    python -m benchmarks.run --suite quick --torch-python PYTHON --torch-preload FILE
    python -m benchmarks.run --suite full --torch-python PYTHON --torch-preload FILE

Every case runs in processes of its own. A round runs each contender once, in an order that rotates; there are some rounds, so
that a machine whose speed drifts slows all alike. All start from the same weights and train on the same batch with the same
AdamW; their losses after three steps must agree, or the case has failed. Kinds:

    speed       tokens (small, a GPT) or examples (wide, an MLP) per second: the median step of the slowest rank
    memory      peak resident memory of a process while it builds and trains, less what was resident after the imports
    scaling     how building, tracing and the step grow with the layers of a narrow GPT, on 4 logical CPUs of one process

A suite names kinds, models, ranks, contenders, rounds and steps; each flag replaces the suite's own. Peers that cannot be
imported are recorded as missing.

Records go to DIR/results.jsonl, one JSON line per case and round. Started again with the same folder, the program goes on: what
is there is not measured again, what failed is. At the end it prints tables and targets, and writes them to DIR/table.txt, with
plots beside it. Ctrl-C ends the processes of the case that is running and leaves the folder as it is.
"""

from __future__ import annotations

import argparse
import dataclasses
import pathlib
import shutil
import signal
import statistics
import sys
from collections.abc import Sequence
from typing import Any, NoReturn

if not __package__:  # run as a file: its folder stands on the path instead of the repository
    sys.path[0] = str(pathlib.Path(__file__).resolve().parent.parent)

from tqdm import tqdm

from benchmarks import cases, figures, peers, plots, promises, results, suites, summary
from benchmarks.job import JobError
from benchmarks.results import Results
from benchmarks.suites import MEMORY, SCALING, SUITES, Measure

FILE = "results.jsonl"
INTERRUPTED = 130  # exit code, as a shell has it
# By kind: what the processes of a case are asked to do, see `benchmarks.child`.
MEASUREMENTS = {suites.SPEED: "steps", SCALING: "steps", MEMORY: "memory"}


def parse_args(argv: list[str] | None = None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--suite", choices=SUITES, default="quick", help="default: quick")
    parser.add_argument("--kinds", nargs="+", choices=suites.KINDS, help="what is measured")
    parser.add_argument("--models", nargs="+", choices=suites.MODELS, help="on which sizes; narrow is that of scaling")
    ranks_help = "how many share the batch; the singles are measured with any"
    parser.add_argument("--ranks", nargs="+", type=cases.positive_int, metavar="N", help=ranks_help)
    contenders_help = f"some of {' '.join(suites.CONTENDERS)}"
    parser.add_argument("--contenders", nargs="+", choices=suites.CONTENDERS, metavar="NAME", help=contenders_help)
    parser.add_argument("--rounds", type=cases.positive_int, help="turns of every case; memory has one")
    steps_help = f"steps that are timed, at least {suites.MIN_STEPS}"
    parser.add_argument("--steps", type=cases.positive_int, help=steps_help)
    out_help = "folder of records, tables and plots (default: out/benchmarks)"
    parser.add_argument("--out", type=pathlib.Path, metavar="DIR", default=pathlib.Path("out/benchmarks"), help=out_help)
    fresh_help = "measure all again; the records of DIR are kept as results.old.jsonl"
    parser.add_argument("--fresh", action="store_true", help=fresh_help)
    cases.add_logical_gpus(parser)
    peers.add_torch_arguments(parser)
    timeout_help = "longest wait for an answer (default: 600)"
    parser.add_argument("--timeout-seconds", type=cases.positive_float, default=600, help=timeout_help)
    check_help = "exit with 1 when a target of the cases asked for is missed or not measured"
    parser.add_argument("--check", action="store_true", help=check_help)
    args = parser.parse_args(argv)
    for name in ("kinds", "models", "ranks", "contenders", "rounds", "steps"):
        if getattr(args, name) is None:
            setattr(args, name, getattr(SUITES[args.suite], name))
    for name in ("kinds", "models", "ranks", "contenders"):
        if len(set(getattr(args, name))) < len(getattr(args, name)):
            parser.error(f"argument --{name}: each at most once. Received: {' '.join(map(str, getattr(args, name)))}")
    if args.steps < suites.MIN_STEPS:
        parser.error(f"argument --steps: must be at least {suites.MIN_STEPS}, for a median. Received: {args.steps}")
    if args.logical_gpus and max(args.ranks) > args.logical_gpus:
        parser.error(
            f"argument --logical-gpus: must be at least the most ranks, {max(args.ranks)}. Received: {args.logical_gpus}"
        )
    for number in args.ranks:
        for model in suites.MODELS:
            size = suites.SIZES[model]["global_batch_size"]
            if model in args.models and (number < 2 or size % number):
                parser.error(f"argument --ranks: must be above 1 and divide the {size} examples of {model}. Received: {number}")
    args.measures = suites.select(
        **{name: getattr(args, name) for name in ("kinds", "models", "ranks", "contenders", "rounds", "steps")}
    )
    if not args.measures:
        own = f"narrow, with {suites.SCALING_RANKS} ranks, of {' '.join(suites.SCALING_CONTENDERS)}"
        parser.error(f"nothing to measure: scaling is of {own}, the other kinds are of small and wide")
    if shutil.which(args.torch_python) is None:
        parser.error(f"argument --torch-python: must be a program. Received: {args.torch_python}")
    if args.torch_preload is not None and not pathlib.Path(args.torch_preload).is_file():  # it would be ignored
        parser.error(f"argument --torch-preload: must be a file. Received: {args.torch_preload}")
    if args.out.exists() and not args.out.is_dir():
        parser.error(f"argument --out: must be a folder. Received: {args.out}")
    return args


# Measuring


def run_case(args: argparse.Namespace, measure: Measure) -> dict[str, Any]:
    """Runs one case in processes of its own; returns its figures."""
    environment = suites.ENVIRONMENTS[measure.kind]
    case = dataclasses.replace(measure.case, logical_gpus=args.logical_gpus)
    with peers.start(MEASUREMENTS[measure.kind], case, args, environment) as job:
        answers = job.ask({"steps": measure.steps})
        if measure.kind == MEMORY:
            return memory_fields(measure, answers)
        return step_fields(measure, job.ready, answers)


def step_fields(measure: Measure, ready: list[dict[str, Any]], answers: list[dict[str, Any]]) -> dict[str, Any]:
    """Returns the figures of timed steps: the slowest rank's, and the processor time of all ranks."""
    seconds = max(statistics.median(answer["step_seconds"]) for answer in answers)
    parameters = ready[0]["parameters"]
    phases = {name: max(answer[name] for answer in ready) for name in ("build_seconds", "first_step_seconds")}
    return {
        "parameters": parameters,
        "step_seconds": seconds,
        "step_seconds_by_rank": [answer["step_seconds"] for answer in answers],
        "tokens_per_second": measure.examples_per_step / seconds,
        "step_seconds_per_parameter": seconds / parameters,
        "cpu_seconds_per_step": sum(answer["cpu_seconds"] for answer in answers),
        **phases,
        "build_and_trace_seconds": sum(phases.values()),
        "warmup_losses": [answer["warmup_loss"] for answer in ready],
        "losses": [answer["loss"] for answer in answers],
    }


def memory_fields(measure: Measure, answers: list[dict[str, Any]]) -> dict[str, Any]:
    """Returns the figures of resident memory: those of the rank that has grown most, and the growth of each."""
    growths = [answer["peak_rss_bytes"] - answer["imported_rss_bytes"] for answer in answers]
    found = answers[growths.index(max(growths))]
    ranks_here = measure.case.num_ranks // measure.case.num_processes
    floor = ranks_here * measure.case.floor_bytes_per_parameter * found["parameters"]
    return {
        "parameters": found["parameters"],
        "imported_rss_bytes": found["imported_rss_bytes"],
        "phase_growth_bytes": {
            phase: peak - found["imported_rss_bytes"] for phase, peak in found["phase_peak_rss_bytes"].items()
        },
        "growth_bytes": max(growths),
        "growth_bytes_by_rank": growths,
        "floor_bytes": floor,
        "growth_over_floor": max(growths) / floor,
        "has_high_water_mark": all(answer["has_high_water_mark"] for answer in answers),
        "warmup_losses": [answer["warmup_loss"] for answer in answers],
        "losses": [answer["loss"] for answer in answers],
    }


# The loop


def keyed(args: argparse.Namespace) -> list[tuple[Measure, dict[str, Any]]]:
    """Returns the measurements with the keys of their records."""
    return [
        (x, results.key_of(x, {**suites.ENVIRONMENTS[x.kind], **peers.peer_environment(x.case, args.torch_preload)}))
        for x in args.measures
    ]


def run_all(args: argparse.Namespace, found: Results, reasons: dict[str, str]) -> None:
    """Measures what `found` does not have.

    Args:
        args: see `parse_args`.
        found: gets a record of every case.
        reasons: why a package is missing, by its name.
    """
    todo = [(measure, key) for measure, key in keyed(args) if not found.is_done(key)]
    done = len(args.measures) - len(todo)
    if done:
        cases.progress(f"{done} of {len(args.measures)} measured before, in {args.out}: not again")
    with tqdm(total=len(args.measures), initial=done, unit="case", dynamic_ncols=True) as bar:
        for measure, key in todo:
            bar.set_description(f"round {measure.round_index + 1} of {args.rounds}, {measure.label}")
            missing = reasons.get(suites.package_of(measure.contender) or "")
            record = {"benchmark": "suite", "case": measure.label, **key}
            record |= _attempt(args, measure) if missing is None else {"missing": missing}
            if (error := figures.loss_error(record, [*found.all(), record])) is not None:
                record["error"] = error
            if "error" in record:
                tqdm.write(f"FAILED {measure.label}: {record['error']}", file=sys.stderr)
            if missing is None or missing != (found.get(key) or {}).get("missing"):
                found.append({**record, **cases.machine_fields()})
            bar.update()


def _attempt(args: argparse.Namespace, measure: Measure) -> dict[str, Any]:
    """Returns the figures of a case, or why there are none."""
    try:
        return run_case(args, measure)
    except JobError as error:
        tqdm.write(str(error), file=sys.stderr)
        return {"error": error.reason}


def report(args: argparse.Namespace, found: Results) -> int:
    """Prints and writes tables, targets and plots of what was asked for; returns the exit code."""
    own = [record for _, key in keyed(args) if (record := found.get(key)) is not None]
    shown = figures.Figures(figures.checked(own))
    every = sorted(promises.promises(shown), key=lambda promise: promise.target.value is None)  # those that were measured first
    text = "\n".join([summary.tables(shown), "", *(str(promise.target) for promise in every)])
    print("\n" + text)
    (args.out / "table.txt").write_text(text + "\n")
    written = plots.draw_all(shown, args.out)
    print("\n" + "\n".join(map(str, [args.out / FILE, args.out / "table.txt", *written])))
    failures = sum("error" in record for record in shown.records)
    checked = [promise.target for promise in every if promise.is_asked_of(args.measures)]
    return cases.exit_code(checked, failures=failures, check=args.check)


def find_packages(args: argparse.Namespace) -> tuple[dict[str, str | None], dict[str, str]]:
    """Returns the versions of the packages that this run needs of PyTorch's Python, and why those are missing that are."""
    needed = sorted({suites.package_of(measure.contender) for measure in args.measures} - {None})
    versions = {package: peers.version_in(args.torch_python, package) for package in needed}
    name = pathlib.PurePath(args.torch_python).name
    return versions, {x: f"{name} (--torch-python) cannot import {x}" for x, version in versions.items() if version is None}


def _interrupt(*_: Any) -> NoReturn:
    raise KeyboardInterrupt


def main(argv: Sequence[str] | None = None) -> int:
    args = parse_args(None if argv is None else list(argv))
    signal.signal(signal.SIGTERM, _interrupt)  # as Ctrl-C: the processes of the case are ended
    file = args.out / FILE
    if args.fresh and file.exists():
        file.replace(file.with_name("results.old.jsonl"))
    versions, reasons = find_packages(args)
    try:
        found = Results(file, results.conditions({**versions, "logical_gpus": args.logical_gpus}))
    except (results.ConditionsError, results.BrokenFileError) as error:
        print(f"{error}: use another --out, or --fresh to begin again", file=sys.stderr)
        return 2
    for reason in reasons.values():
        cases.progress(f"missing: {reason}")
    try:
        run_all(args, found, reasons)
    except KeyboardInterrupt:
        print(f"\ninterrupted; the same command goes on with {file}", file=sys.stderr)
        return INTERRUPTED
    return report(args, found)


if __name__ == "__main__":
    sys.exit(main())
