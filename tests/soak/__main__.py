"""`python -m tests.soak`: disturbs jobs, compares them with the undisturbed run, and prints a table."""

from __future__ import annotations

import argparse
import collections
import dataclasses
import fnmatch
import functools
import json
import os

os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "2")

import pathlib
import platform
import random
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator

import tabulate
import tqdm

from tests import workers
from tests.soak import hosts, judging
from tests.soak.faults import Fault, Phases, Planned
from tests.soak.jobs import Job
from tests.soak.running import Run
from tests.soak.table import FAULTS


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m tests.soak", description=__doc__)
    parser.add_argument("--list", action="store_true", help="print the faults and their jobs, and run nothing")
    parser.add_argument(
        "--only", action="append", metavar="FAULT/JOB", help="rows whose name fits, with * and ?; may be repeated"
    )
    parser.add_argument("--job", action="append", metavar="JOB", help="these jobs instead of the fault's own")
    parser.add_argument("--seed", type=int, default=0, help="chooses moments and victims (default: 0)")
    parser.add_argument("--rounds", type=int, default=1, help="times each row is run, with the next seed each (default: 1)")
    parser.add_argument("--out", type=pathlib.Path, default=pathlib.Path("out/soak"), help="where rows.jsonl and table.md go")
    parser.add_argument("--keep", action="store_true", help="keep the folders of rows that hold, too")
    args = parser.parse_args()
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))  # ends the job that runs, too
    rows = list(_rows(args))
    if args.list:
        print("\n".join(f"{fault.name}/{job.name}" for fault, job, _ in rows))
        return 0
    if not rows:
        parser.error(f"no row fits. Received: --only {args.only}")
    return run(rows, args.out, keep=args.keep)


def _rows(args: argparse.Namespace) -> Iterator[tuple[Fault, Job, int]]:
    for seed in range(args.seed, args.seed + (1 if args.list else args.rounds)):
        for fault in FAULTS:
            for job in [Job.from_name(name) for name in args.job] if args.job else fault.jobs:
                name = f"{fault.name}/{job.name}"
                if not args.only or any(fnmatch.fnmatch(name, f"{only}*") for only in args.only):
                    yield fault, job, seed


def run(rows: list[tuple[Fault, Job, int]], out: pathlib.Path, *, keep: bool = False) -> int:
    """Runs the rows, with progress, and writes each as a line of JSON when it is there; returns the exit code."""
    out.mkdir(parents=True, exist_ok=True)
    folder = pathlib.Path(tempfile.mkdtemp(prefix=time.strftime("%H%M%S_"), dir=out))
    references = References(folder)
    done: list[judging.Row] = []
    with open(out / "rows.jsonl", "a", encoding="utf-8") as file, tqdm.tqdm(rows, unit="row", disable=None) as progress:
        for number, (fault, job, seed) in enumerate(progress):
            progress.set_description(f"{fault.name}/{job.name}#{seed}")
            reason = _why_not(fault, job)
            if reason:
                tqdm.tqdm.write(f"skipped  {fault.name}/{job.name}: {reason}")
                continue
            row = one(fault, job, seed, folder / f"{number}_{fault.name}", references)
            done.append(row)
            made = {"at": time.strftime("%F %T"), "tree": tree(), "machine": machine()}
            file.write(json.dumps({**made, **dataclasses.asdict(row)}) + "\n")
            file.flush()
            words = "" if row.holds else f"\n         {'; '.join(row.problems)}\n         {folder / f'{number}_{fault.name}'}"
            took = f", {row.seconds} s, {row.repeated} steps again" if row.seconds is not None else ""
            tqdm.tqdm.write(f"{row.verdict:8s} {fault.name}/{job.name}#{seed}: {', '.join(row.done)}{took}{words}")
            if row.holds and not keep:
                shutil.rmtree(folder / f"{number}_{fault.name}")
    text = table(done)
    (out / "table.md").write_text(text, "utf-8")
    failing = sum(row.verdict == "FAILS" for row in done)
    print(f"{text}\n{len(done)} rows, of which {failing} do not hold")
    return int(failing > 0)


def one(fault: Fault, job: Job, seed: int, folder: pathlib.Path, references: References) -> judging.Row:
    """Runs one row, and the undisturbed run if it has not been made."""
    needs_reference = fault.needs_strike or fault.ends == "same"
    try:
        reference, phases = references.of(job) if needs_reference else (folder, {})
    except Undisturbed as error:
        return judging.Row(fault.name, job.name, seed, problems=[str(error)])
    disturbed = Run(job, folder, plan(fault, job, seed, phases))
    disturbed.run()
    return judging.judge(fault, seed, disturbed, reference)


def plan(fault: Fault, job: Job, seed: int, phases: Phases) -> Planned:
    """Returns what is done in the row of this seed."""
    return fault.plan(random.Random(f"{fault.name}/{job.name}/{seed}"), job, phases)


class Undisturbed(Exception):
    """The undisturbed run did not end well."""


class References:
    """The undisturbed runs, each made once."""

    def __init__(self, folder: pathlib.Path):
        self._folder = folder
        self._made: dict[Job, tuple[pathlib.Path, Phases] | Undisturbed] = {}

    def of(self, job: Job) -> tuple[pathlib.Path, Phases]:
        """Returns the folder of the undisturbed run, and its phases."""
        job = job.reference
        if job not in self._made:
            run = Run(job, self._folder / job.name, [])
            outcome = run.run()
            if outcome.exit_code != 0 or outcome.left or outcome.attempts > 1:
                self._made[job] = Undisturbed(f"the undisturbed run ended with {outcome.exit_code}, {outcome.left}: {run.folder}")
            else:
                self._made[job] = run.folder, run.phases()
        if isinstance(self._made[job], Undisturbed):
            raise self._made[job]
        return self._made[job]


def _why_not(fault: Fault, job: Job) -> str:
    if job.launch == "hosts":
        return hosts.why_not()
    if fault.needs_root and os.geteuid() != 0:
        return "needs root"
    return ""


@functools.cache
def tree() -> str:
    """Returns the commit that is disturbed, with "-dirty" behind it if something is not committed; "" outside of a repository."""
    command = ["git", "describe", "--always", "--dirty"]
    return subprocess.run(command, cwd=workers.ROOT, capture_output=True, text=True, check=False).stdout.strip()


def machine() -> str:
    return f"{platform.machine()}, {os.cpu_count()} cores, Python {platform.python_version()}"


def table(rows: list[judging.Row]) -> str:
    """Returns a table of Markdown: a line for each fault and job."""
    groups: dict[tuple[str, str], list[judging.Row]] = collections.defaultdict(list)
    for row in rows:
        groups[row.fault, row.job].append(row)
    lines = []
    for (fault, job), own in groups.items():
        seconds = [row.seconds for row in own if row.seconds is not None]
        lines.append(
            {
                "fault": fault,
                "job": job,
                "rows": len(own),
                "faults": sum(len(row.done) for row in own),
                "hold": sum(row.holds for row in own),
                "exit code": ", ".join(sorted({str(row.exit_code) for row in own})),
                "seconds": f"{min(seconds):.1f} .. {max(seconds):.1f}" if seconds else "",
                "steps again": max(row.repeated for row in own),
                "does not hold": "; ".join(sorted({problem for row in own for problem in row.problems}))[:200],
            }
        )
    return tabulate.tabulate(lines, headers="keys", tablefmt="github")


if __name__ == "__main__":
    sys.exit(main())
