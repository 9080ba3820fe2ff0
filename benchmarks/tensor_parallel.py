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
import pathlib
import statistics
import sys

if not __package__:  # run as a file: its folder stands on the path instead of the repository
    sys.path[0] = str(pathlib.Path(__file__).resolve().parent.parent)

from benchmarks import cases, peers
from benchmarks.cases import TFDIST, TORCH, Case
from benchmarks.peers import Result


def parse_args(argv: list[str] | None = None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--devices", type=cases.positive_int, nargs="+", metavar="N", default=[1, 2, 4], help="tensor ranks")
    peers.add_arguments(parser, layers=4, rounds=7, steps=10)
    args = parser.parse_args(argv)
    if len(set(args.devices)) < len(args.devices):
        parser.error(f"argument --devices: each number at most once. Received: {args.devices}")
    for number in args.devices:
        if args.heads % number or args.width % args.heads or args.vocabulary % number:
            parser.error(f"argument --devices: {number} must divide --heads {args.heads} and --vocabulary {args.vocabulary}")
    return args


def measure(args: argparse.Namespace, contenders: list[str]) -> list[dict]:
    """Runs all cases, in turns; returns their JSON records, a failed one with an `error`."""
    all_cases = [peers.make_case(args, contender, devices) for devices in args.devices for contender in contenders]
    results = peers.take_turns("tensor", all_cases, args)
    records = []
    for case, result in results.items():
        record = {"benchmark": "tensor_parallel", "case": case.label, **vars(case), "rounds": args.rounds, "steps": args.steps}
        if result.ready is not None:
            record |= result.ready[0] | {"state_bytes": max(answer["state_bytes"] for answer in result.ready)}
        if result.error is None:
            record |= figures(results, case, args.batch_size * args.sequence_length * args.steps)
        else:
            record["error"] = result.error
        records.append({**record, **cases.machine_fields()})
    return records


def figures(results: dict[Case, Result], case: Case, tokens: int) -> dict[str, object]:
    """Returns the speeds of a case and their ratios, by round, to one rank of its framework and to PyTorch."""
    speeds = {(x.contender, x.devices): result.speeds(tokens) for x, result in results.items()}
    own = speeds[case.contender, case.devices]
    of_one, of_torch = (peers.ratios(own, speeds.get(key, [])) for key in ((case.contender, 1), (TORCH, case.devices)))
    return {
        "tokens_per_second": statistics.median(own),
        "tokens_per_second_by_round": own,
        "ratio_to_one_rank": of_one["median"],
        "ratio_to_torch": of_torch["median"],
        "ratio_to_torch_range": of_torch["range"],
    }


def show(records: list[dict]) -> str:
    rows = []
    for record in records:
        low, high = record.get("ratio_to_torch_range") or (None, None)
        state, mine = record.get("state_bytes"), record["contender"] == TFDIST
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
    records = measure(args, peers.contenders(args))
    for record in records:
        cases.emit(record, args.json)
    print("\n" + show(records))
    return cases.exit_code([], failures=sum("error" in record for record in records), check=False)


if __name__ == "__main__":
    sys.exit(main())
