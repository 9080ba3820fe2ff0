"""Two source trees, before and after a change, measured in turns: ratios of speed, processor time and memory of each case.

    python -m benchmarks.compare_trees --before ../before --after .
    python -m benchmarks.compare_trees --before ../before --after . --kinds speed memory --contenders zero1 zero3 --rounds 7

A tree is a checkout. In each round a case runs in one tree and right after that in the other, and in the next round the other
tree comes first, so that a machine whose speed drifts slows both. What runs is each tree's own `benchmarks.run`, one case at a
time: a case must have the same name in both trees. A ratio is after / before within a round; shown are its median over the
rounds, and the least and the most.

    speed           tokens, or examples, per second
    CPU             processor time of a step, all ranks together
    first step      seconds of the first step, which traces
    peak memory     what the rank that grows most grows by

Records are those of `benchmarks.run`, in DIR/before/N and DIR/after/N for round N. Started again with the same folder and the
same trees, the program goes on: what is there is not measured again.
"""

from __future__ import annotations

import argparse
import itertools
import json
import os
import pathlib
import subprocess
import sys
from collections.abc import Sequence
from typing import Any

if not __package__:  # run as a file: its folder stands on the path instead of the repository
    sys.path[0] = str(pathlib.Path(__file__).resolve().parent.parent)

from tqdm import tqdm

from benchmarks import cases, suites
from benchmarks.figures import Spread
from benchmarks.suites import MEMORY, SPEED, SUITES

BEFORE, AFTER = TREES = ("before", "after")
# By kind: the fields of a record whose ratios are shown, with the headings of their columns.
FIELDS = {
    SPEED: {"tokens_per_second": "speed", "cpu_seconds_per_step": "CPU", "first_step_seconds": "first step"},
    MEMORY: {"growth_bytes": "peak memory"},
}
Case = tuple[str, str, str, int]  # kind, model, contender, ranks
Records = dict[str, list[dict[str, Any]]]  # by tree, of one case


def parse_args(argv: Sequence[str] | None = None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    for name in TREES:
        parser.add_argument(f"--{name}", type=pathlib.Path, required=True, metavar="TREE", help=f"the checkout {name} the change")
    parser.add_argument("--suite", choices=SUITES, default="quick", help="has the defaults of what follows; default: quick")
    parser.add_argument("--kinds", nargs="+", choices=FIELDS, help="what is measured")
    parser.add_argument("--models", nargs="+", choices=(suites.SMALL, suites.WIDE), help="on which sizes")
    parser.add_argument("--ranks", nargs="+", type=cases.positive_int, metavar="N", help="how many share the batch")
    possible = [name for name in suites.CONTENDERS if suites.package_of(name) is None]
    parser.add_argument("--contenders", nargs="+", choices=possible, metavar="NAME", help="default: the suite's ZeRO stages")
    parser.add_argument("--steps", type=cases.positive_int, help="steps that are timed")
    parser.add_argument("--rounds", type=cases.positive_int, default=5, help="turns of every case; default: 5")
    parser.add_argument("--out", type=pathlib.Path, metavar="DIR", default=pathlib.Path("out/compare_trees"))
    args = parser.parse_args(argv)
    suite = SUITES[args.suite]
    args.kinds = args.kinds or [kind for kind in suite.kinds if kind in FIELDS]
    args.models = args.models or [model for model in suite.models if model != suites.NARROW]
    args.contenders = args.contenders or [name for name in suite.contenders if name in cases.ZERO_STAGES]
    args.ranks, args.steps = args.ranks or list(suite.ranks), args.steps or suite.steps
    for name in TREES:
        root = getattr(args, name)
        if not (root / "benchmarks" / "run.py").is_file():
            parser.error(f"argument --{name}: must be a checkout, with benchmarks/run.py. Received: {root}")
    return args


def run_case(args: argparse.Namespace, tree: str, case: Case, round_index: int) -> dict[str, Any]:
    """Runs a case in a tree, unless the tree's folder of that round has it; returns the record."""
    root = getattr(args, tree).resolve()
    folder = (args.out / tree / str(round_index)).resolve()
    settings = {**dict(zip(("kinds", "models", "contenders", "ranks"), case, strict=True)), "rounds": 1, "steps": args.steps}
    words = [word for name, value in settings.items() for word in (f"--{name}", str(value))]
    ended = subprocess.run(
        [sys.executable, "-m", "benchmarks.run", *words, "--out", str(folder)],
        cwd=root,
        env={**os.environ, "PYTHONPATH": str(root)},  # of that tree alone
        capture_output=True,
        text=True,
    )
    if ended.returncode not in (0, 1):  # 1: the case has failed, as its record says
        return {"error": f"benchmarks.run ended with {ended.returncode}: {ended.stderr.strip()[-500:]}"}
    records = map(json.loads, reversed((folder / "results.jsonl").read_text().splitlines()))
    kind, model, contender, ranks = case
    own = (kind, model, contender, 1 if contender in cases.SINGLES else ranks)
    return next(x for x in records if tuple(x.get(name) for name in ("kind", "model", "contender", "ranks")) == own)


def ratios(records: Records, field: str) -> Spread | None:
    """Returns after / before of a field, over the rounds in which both have it."""
    pairs = zip(records[BEFORE], records[AFTER], strict=True)
    return Spread.of([after[field] / before[field] for before, after in pairs if field in before and field in after])


def table(found: dict[Case, Records]) -> str:
    """Returns the ratios of each case as text, with the errors below."""
    headings = [heading for fields in FIELDS.values() for heading in fields.values()]
    rows, errors = [], []
    for (kind, model, contender, ranks), records in found.items():
        row = {"kind": kind, "model": model, "contender": suites.named(contender, ranks)}
        for field, heading in FIELDS[kind].items():
            if (spread := ratios(records, field)) is not None:
                row[heading] = f"{spread.median:.3f} ({spread.low:.2f} .. {spread.high:.2f})"
        rows.append([row.get(name, "") for name in ("kind", "model", "contender", *headings)])
        for tree in TREES:
            label = f"{kind} {model} {row['contender']}, {tree}"
            errors += dict.fromkeys(f"failed: {label}: {record['error']}" for record in records[tree] if "error" in record)
    shown = cases.table(["kind", "model", "contender, after / before", *headings], rows)
    return "\n".join([shown, *errors])


def main(argv: Sequence[str] | None = None) -> int:
    args = parse_args(argv)
    args.out.mkdir(parents=True, exist_ok=True)
    all_cases = list(itertools.product(args.kinds, args.models, args.contenders, args.ranks))
    found: dict[Case, Records] = {case: {BEFORE: [], AFTER: []} for case in all_cases}
    with tqdm(total=2 * args.rounds * len(all_cases), unit="run", dynamic_ncols=True) as bar:
        for round_index, case in itertools.product(range(args.rounds), all_cases):
            for tree in TREES if round_index % 2 == 0 else TREES[::-1]:
                bar.set_description(f"round {round_index + 1} of {args.rounds}, {' '.join(map(str, case))}, {tree}")
                found[case][tree].append(run_case(args, tree, case, round_index))
                bar.update()
    text = table(found)
    print("\n" + text)
    (args.out / "table.txt").write_text(text + "\n")
    return int(any("error" in record for records in found.values() for own in records.values() for record in own))


if __name__ == "__main__":
    sys.exit(main())
