"""Steps over a slow link: two hosts on one machine, compressed and not, beside MultiWorkerMirroredStrategy and PyTorch.

    python -m benchmarks.links --torch-python PYTHON
    python -m benchmarks.links --models wide --rates 100mbit --contenders zero2 mw-mirrored --compressors int8 int4 --steps 2

The hosts are network namespaces, joined by a veth pair whose ends each send at most `--rates` (`tc tbf`), with a /dev/shm of
their own each, so that nothing takes them for one machine; a rank on each. That needs Linux, root, `ip` and `tc`: elsewhere the
program says what is missing, and ends with 0. There is no delay on such a link but that of its queue.

Contenders are tfdist at its stages, each uncompressed and with each of `--compressors`, which by default also compresses the
parameters (`--parameters exact`: not); `mw-mirrored`; and in PyTorch over gloo DDP plain, DDP with the hook that sends bfloat16,
DDP with PowerSGD of rank 4, and FSDP2. All start from the same weights and train on the same batch with the same AdamW; the
uncompressed ones must have the same loss after three steps, or the case has failed: `mw-mirrored` does on `small`, since it sends
rows of the embedding's gradient, and Keras's AdamW squares those of repeated tokens one by one.

Per case: the median seconds of a step of the slowest rank, after a warm-up; the bytes that a host has sent per step, read from
its interface, beside those that `last_plan.sent_bytes()` counts; and which part of the link's rate that is. Cases run one after
the other, each in processes of its own, which are ended by their ids; the namespaces go at the end, also after Ctrl-C. With
`--json FILE` a line per case is appended, and cases that have one in FILE are not measured again.
"""

from __future__ import annotations

import argparse
import contextlib
import dataclasses
import json
import pathlib
import re
import shutil
import signal
import statistics
import sys
from collections.abc import Iterator, Sequence
from typing import Any, NoReturn

if not __package__:  # run as a file: its folder stands on the path instead of the repository
    sys.path[0] = str(pathlib.Path(__file__).resolve().parent.parent)

from benchmarks import cases, peers
from benchmarks.cases import DDP, DDP_BF16, DDP_POWERSGD, FSDP2, MW_MIRRORED, ZERO_STAGES, Case, Target
from benchmarks.job import Job, JobError
from benchmarks.resident import TUNED
from benchmarks.suites import SIZES, SMALL, WIDE
from tests.soak import hosts

TORCH_CONTENDERS = (DDP, DDP_BF16, DDP_POWERSGD, FSDP2)
CONTENDERS = (*ZERO_STAGES, MW_MIRRORED, *TORCH_CONTENDERS)
# A compressor of gradients, and how parameters travel with it: at stages 1 and 2, and at stage 3, which takes none of 4 bits.
COMPRESSORS = {
    "bfloat16": ("bfloat16", "bfloat16"),
    "int8": ("int8", "int8"),
    "int4": ("int4", "int8"),
    "top_k": ("int8", "int8"),
    "top_k_int4": ("int4", "int8"),
    "top_k_feedback": ("top_k_alone", "int8"),
    "top_k_0.3_feedback": ("top_k_0.3_alone", "int8"),
    "top_k_0.1_feedback": ("top_k_0.1_alone", "int8"),
}
INTERRUPTED = 130  # exit code, as a shell has it
# Of `wide` at stage 2, over uncompressed.
GOALS = {("1gbit", "int8"): 1.8, ("1gbit", "int4"): 2.0, ("100mbit", "int8"): 3.2, ("100mbit", "int4"): 5.0}
UNITS = {"kbit": 1e3, "mbit": 1e6, "gbit": 1e9}


def rate(text: str) -> str:
    """An argparse type: a rate as `tc` takes it, in bits a second."""
    if re.fullmatch(rf"[1-9]\d*({'|'.join(UNITS)})", text) is None:
        raise argparse.ArgumentTypeError(f"must be a whole number and one of {' '.join(UNITS)}. Received: {text}")
    return text


def bits_per_second(text: str) -> float:
    number, unit = int(text[:-4]), text[-4:]
    return number * UNITS[unit]


def parse_args(argv: list[str] | None = None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--models", nargs="+", choices=(SMALL, WIDE), default=[WIDE, SMALL], help="default: both")
    parser.add_argument("--rates", nargs="+", type=rate, default=["1gbit", "100mbit"], help="default: 1gbit 100mbit")
    parser.add_argument("--contenders", nargs="+", choices=CONTENDERS, default=CONTENDERS, metavar="NAME", help="default: all")
    parser.add_argument("--compressors", nargs="*", choices=COMPRESSORS, default=list(COMPRESSORS), metavar="NAME")
    parser.add_argument("--parameters", choices=("compressed", "exact"), default="compressed", help="of compressed cases")
    parser.add_argument("--ranks", type=cases.positive_int, default=2, help="on both hosts together (default: 2)")
    parser.add_argument("--steps", type=cases.positive_int, default=5, help="steps that are timed (default: 5)")
    parser.add_argument("--timeout-seconds", type=cases.positive_float, default=600, help="longest wait for an answer")
    parser.add_argument("--json", type=pathlib.Path, metavar="FILE", help="append a line per case, and go on from those it has")
    parser.add_argument("--check", action="store_true", help="exit with 1 when a target is missed or was not measured")
    peers.add_torch_arguments(parser)
    args = parser.parse_args(argv)
    if args.ranks % 2:
        parser.error(f"argument --ranks: must be even: as many on either host. Received: {args.ranks}")
    return args


def all_cases(args: argparse.Namespace) -> Iterator[tuple[str, Case]]:
    """Yields rates with cases, in the order in which they run."""
    for model in args.models:
        for at in args.rates:
            for contender in args.contenders:
                for compressor in (None, *(args.compressors if contender in ZERO_STAGES else ())):
                    yield at, make_case(args, model, contender, compressor)


def make_case(args: argparse.Namespace, model: str, contender: str, compressor: str | None) -> Case:
    stage = ZERO_STAGES.get(contender, 0)
    parameters = None
    if compressor is not None and args.parameters == "compressed" and stage > 0:
        parameters = COMPRESSORS[compressor][stage == 3]
    case = Case(contender=contender, devices=args.ranks, gradients=compressor, parameters=parameters, **SIZES[model])
    return dataclasses.replace(case, multi_worker=not case.is_torch)


def measure(args: argparse.Namespace, cable: hosts.Cable, at: str, case: Case) -> dict[str, Any]:
    """Runs one case on the hosts of `cable`, whose rate is `at`; returns its figures."""
    environment = {**TUNED, **peers.peer_environment(case, args.torch_preload), "GLOO_SOCKET_IFNAME": "cable"}
    python, module = (args.torch_python, "torch_child") if case.is_torch else (sys.executable, "child")
    program = [shutil.which(python), "-m", f"benchmarks.{module}"]
    with Job("steps", case, environment=environment, timeout_seconds=args.timeout_seconds, program=program, hosts=cable) as job:
        before = cable.sent_bytes()
        answers = job.ask({"steps": args.steps})
        sent = [after - one for one, after in zip(before, cable.sent_bytes(), strict=True)]
    seconds = max(statistics.median(answer["step_seconds"]) for answer in answers)
    wire = statistics.mean(sent) / (args.steps + 1)  # another step comes before those that are timed
    return {
        "parameter_count": job.ready[0]["parameters"],
        "step_seconds": seconds,
        "step_seconds_by_rank": [answer["step_seconds"] for answer in answers],
        "cpu_seconds_per_step": sum(answer["cpu_seconds"] for answer in answers),
        "wire_bytes": wire,
        "counted_bytes": job.ready[0].get("sent_bytes"),
        "part_of_link": wire * 8 / seconds / bits_per_second(at),
        "warmup_loss": job.ready[0]["warmup_loss"],
        "loss": answers[0]["loss"],
    }


def key_of(args: argparse.Namespace, at: str, case: Case) -> dict[str, Any]:
    """Returns what makes two records those of one case."""
    model = next(name for name, size in SIZES.items() if size["model"] == case.model and size["width"] == case.width)
    key = {"benchmark": "links", "model_name": model, "rate": at, "contender": case.contender, "ranks": case.devices}
    return {**key, "gradients": case.gradients, "parameters": case.parameters, "steps": args.steps}


def run_all(args: argparse.Namespace, missing_torch: bool) -> list[dict[str, Any]]:
    """Measures what `--json` does not have; returns the records of all cases, a failed one with an `error`."""
    known = []
    if args.json is not None and args.json.exists():
        known = [record for record in map(json.loads, args.json.read_text("utf-8").splitlines()) if "error" not in record]
    records: list[dict[str, Any]] = []
    with contextlib.ExitStack() as stack:
        cable, cable_rate = None, None
        for at, case in all_cases(args):
            key = key_of(args, at, case)
            old = [record for record in known if key.items() <= record.items()]
            if old:
                records.append(old[-1])
                continue
            if case.is_torch and missing_torch:
                continue
            if cable_rate != at:
                stack.close()
                cable, cable_rate = stack.enter_context(hosts.joined(at)), at
            cases.progress(f"{key['model_name']} at {at}: {label(key)} ...")
            try:
                figures = measure(args, cable, at, case)
            except JobError as error:
                cases.progress(f"FAILED {error}")
                figures = {"error": error.reason}
            record = {**key, **figures, **cases.machine_fields()}
            check_loss(record, records)
            records.append(record)
            cases.emit(record, args.json)
    return records


def check_loss(record: dict[str, Any], others: Sequence[dict[str, Any]]) -> None:
    """Has an exact case fail whose loss is not that of the first one of its model."""
    if record["gradients"] is not None or record["contender"] in (DDP_BF16, DDP_POWERSGD) or "error" in record:
        return
    same = [x for x in others if (x["model_name"], x["gradients"]) == (record["model_name"], None) and "error" not in x]
    reference = [x for x in same if x["contender"] not in (DDP_BF16, DDP_POWERSGD)]
    if reference and not abs(record["warmup_loss"] / reference[0]["warmup_loss"] - 1) <= peers.LOSS_TOLERANCE:
        record["error"] = f"the loss, {record['warmup_loss']}, is not {reference[0]['warmup_loss']}: not the same work"


# What is shown


def label(record: dict[str, Any]) -> str:
    if record["gradients"] is None:
        return record["contender"]
    return f"{record['contender']} {record['gradients']}, {record['parameters'] or 'exact'}"


def find(records: Sequence[dict[str, Any]], **fields: Any) -> dict[str, Any] | None:
    """Returns the record that has these fields and did not fail; None: there is none."""
    return next((record for record in records if "error" not in record and fields.items() <= record.items()), None)


def speedup(records: Sequence[dict[str, Any]], record: dict[str, Any]) -> float | None:
    """Returns by how much a case is faster than the same contender uncompressed."""
    same = {name: record[name] for name in ("model_name", "rate", "contender", "ranks")}
    exact = find(records, **same, gradients=None)
    return None if exact is None or "error" in record else exact["step_seconds"] / record["step_seconds"]


def show(records: Sequence[dict[str, Any]]) -> str:
    rows = []
    for record in records:
        wire, counted = (record.get(name) for name in ("wire_bytes", "counted_bytes"))
        part = record.get("part_of_link")
        rows.append(
            [
                f"{record['model_name']} {record['rate']} {label(record)}",
                cases.number(record.get("step_seconds")),
                cases.number(speedup(records, record)) if record["gradients"] is not None else "",
                None if wire is None else cases.number(wire / 1e6),
                None if counted is None else cases.number(counted / 1e6),
                None if part is None else f"{100 * part:.0f} %",
                "failed" if "error" in record else "",
            ]
        )
    return cases.table(["gradients, parameters", "s/step", "x exact", "MB sent", "counted", "of the link", ""], rows)


def targets(records: Sequence[dict[str, Any]]) -> list[Target]:
    found = []
    for (at, compressor), goal in GOALS.items():
        record = find(records, model_name=WIDE, rate=at, contender="zero2", gradients=compressor, ranks=2)
        value = None if record is None else speedup(records, record)
        text = f"wide, stage 2, {compressor} over uncompressed at {at}, at least {goal:g}"
        found.append(Target(text, value, value is not None and value >= goal))
    for at in ("1gbit", "100mbit"):
        own = {
            name: find(records, model_name=WIDE, rate=at, contender="zero2", gradients=name, ranks=2) for name in (None, "int4")
        }
        for compressor, others in ((None, (MW_MIRRORED, DDP)), ("int4", (DDP_BF16, DDP_POWERSGD))):
            for other in others:
                peer = find(records, model_name=WIDE, rate=at, contender=other, ranks=2)
                mine = own[compressor]
                value = None if peer is None or mine is None else peer["step_seconds"] / mine["step_seconds"]
                text = f"wide, stage 2, {compressor or 'uncompressed'}, times the speed of {other} at {at}, at least 1"
                found.append(Target(text, value, value is not None and value >= 1))
    return found


def _interrupt(*_: Any) -> NoReturn:
    raise KeyboardInterrupt


def main(argv: list[str] | None = None) -> int:
    args = parse_args(argv)
    if reason := hosts.why_not(args.rates[0]):
        print(f"skipped: {reason}")
        return 0
    signal.signal(signal.SIGTERM, _interrupt)  # as Ctrl-C: processes are ended, and the namespaces go
    wants_torch = any(contender in TORCH_CONTENDERS for contender in args.contenders)
    missing_torch = wants_torch and peers.version_in(args.torch_python, "torch") is None
    if missing_torch:
        cases.progress(f"{pathlib.PurePath(args.torch_python).name} (--torch-python) cannot import torch: without its contenders")
    try:
        records = run_all(args, missing_torch)
    except KeyboardInterrupt:
        print("\ninterrupted", file=sys.stderr)
        return INTERRUPTED
    print("\n" + show(records) + "\n")
    found = targets(records)
    print("\n".join(map(str, found)))
    return cases.exit_code(found, failures=sum("error" in record for record in records), check=args.check)


if __name__ == "__main__":
    sys.exit(main())
