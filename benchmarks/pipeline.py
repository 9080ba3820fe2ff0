"""Step time and peak memory of pipeline schedules over 2 and 4 workers, beside PyTorch's pipelining, in one run.

    python -m benchmarks.pipeline --torch-python PATH_TO_PYTHON
    python -m benchmarks.pipeline --ranks 2 --microbatches 4 --layers 4 --width 32 --rounds 1 --steps 1    (tiny)

The model is the GPT of `examples/train_gpt.py` in a `tfdist.PipelineModel`, as many blocks in each stage, two stages a rank
where the schedule is "interleaved". Every rank is a worker process of a TF_CONFIG job; with `--one-process`, a logical CPU of one
process. PyTorch's contenders are `ScheduleGPipe`, `Schedule1F1B` and `ScheduleInterleaved1F1B` of `torch.distributed.pipelining`
with the same stages, a process a rank, over gloo. All start from the same weights and train with AdamW on the same batch, cut in
the same microbatches; their losses after the warm-up must agree to 1e-5, relative. While speed is measured freed memory stays
mapped and TensorFlow's oneDNN is on.

Speed: the cases of one number of ranks and of microbatches are alive together and take turns, round after round, in rotating
order; the first round is not counted. `x gpipe` is the median, over rounds, of the speed over that of the same framework's GPipe
in the round, `x torch` over PyTorch's same schedule. Ranks share the cores of one machine, so that waiting for another rank costs
little here: what idles leaves its core to the others. The bubble shows with a core for each rank.

Memory: each case alone, in processes of its own, with the C library's allocator (see `benchmarks.resident`). Per rank:

    rest      resident between steps, less what was resident after the imports: weights, slots, graphs, buffers
    step      the most that is resident during a step, less what was before it: activations, gradients, messages. The median of
              some steps, each of which begins with the freed memory given back
    tensors   the same of tfdist's tensors as TensorFlow's own allocator counts them, from the turns of the speed: of those from
              256 KiB on, as long as oneDNN is on

1F1B is to hold at most p/m of the `step` of GPipe on the same rank, plus 20 %. That is about activations: choose sizes with which
the gradients of a rank, 4 bytes a parameter, are little beside them. With `--one-process` all ranks are one process, whose memory
says nothing about one rank: it is shown, and not checked.
"""

from __future__ import annotations

import argparse
import itertools
import pathlib
import statistics
import sys
from typing import Any

if not __package__:  # run as a file: its folder stands on the path instead of the repository
    sys.path[0] = str(pathlib.Path(__file__).resolve().parent.parent)

from benchmarks import cases, peers
from benchmarks.cases import TFDIST, TORCH, Case, Target
from benchmarks.job import JobError
from benchmarks.peers import Result
from benchmarks.resident import MALLOC

SCHEDULES = {TFDIST: ("gpipe", "1f1b", "interleaved", "zero_bubble"), TORCH: ("gpipe", "1f1b", "interleaved")}
MEASURES = ("speed", "memory")
MEMORY_MARGIN = 1.2


def parse_args(argv: list[str] | None = None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--ranks", type=cases.positive_int, nargs="+", metavar="N", default=[2, 4], help="default: 2 4")
    microbatches = {"nargs": "+", "metavar": "M", "default": [4, 8, 16], "help": "of a batch, default: 4 8 16"}
    parser.add_argument("--microbatches", type=cases.positive_int, **microbatches)
    parser.add_argument("--schedules", nargs="+", choices=SCHEDULES[TFDIST], default=list(SCHEDULES[TFDIST]), help="default: all")
    parser.add_argument("--measure", nargs="+", choices=MEASURES, default=list(MEASURES), help="default: both")
    parser.add_argument("--one-process", action="store_true", help="tfdist's ranks are logical CPUs of one process")
    parser.add_argument("--memory-steps", type=cases.positive_int, default=5, help="steps whose memory is measured; default: 5")
    parser.add_argument("--check", action="store_true", help="exit with 1 when a target is missed or not measured")
    peers.add_arguments(parser, layers=8, rounds=5, steps=5)
    args = parser.parse_args(argv)
    for name in ("ranks", "microbatches", "schedules", "measure"):
        if len(set(getattr(args, name))) < len(getattr(args, name)):
            parser.error(f"argument --{name}: each at most once. Received: {' '.join(map(str, getattr(args, name)))}")
    if args.width % args.heads:
        parser.error(f"argument --width: must be divisible by --heads {args.heads}. Received: {args.width}")
    for number in args.microbatches:
        if args.batch_size % number:
            parser.error(f"argument --batch-size: must be divisible by {number} microbatches. Received: {args.batch_size}")
    for ranks, schedule, number in itertools.product(args.ranks, args.schedules, args.microbatches):
        case = peers.make_case(args, TFDIST, ranks, schedule=schedule)
        if ranks < 2 or number % ranks:  # what PyTorch's interleaved schedule asks for
            parser.error(f"argument --ranks: each must be above 1 and divide --microbatches {number}. Received: {ranks}")
        if args.layers % case.num_stages:
            stages = f"the {case.num_stages} stages of {schedule} on {ranks} ranks"
            parser.error(f"argument --layers: must be divisible by {stages}. Received: {args.layers}")
    return args


def measure(args: argparse.Namespace, contenders: list[str], ranks: int, num_microbatches: int) -> list[dict[str, Any]]:
    """Runs all schedules; returns their JSON records, a failed one with an `error`."""
    all_cases = [
        peers.make_case(
            args,
            contender,
            ranks,
            schedule=schedule,
            num_microbatches=num_microbatches,
            multi_worker=contender == TFDIST and not args.one_process,
        )
        for schedule in args.schedules
        for contender in contenders
        if schedule in SCHEDULES[contender]
    ]
    results = {case: Result() for case in all_cases}
    if "speed" in args.measure:
        results = peers.take_turns("pipeline", all_cases, args)
    records = {
        case: {
            "benchmark": "pipeline",
            "case": case.label,
            **vars(case),
            "stages_per_rank": case.stages_per_rank,
            "rounds": args.rounds,
            "steps": args.steps,
            **(result.ready[0] if result.ready else {}),
            **speed_figures(results, case, args.batch_size * args.sequence_length * args.steps, args.steps),
            **({} if result.error is None else {"error": result.error}),
        }
        for case, result in results.items()
    }
    for case in all_cases if "memory" in args.measure else ():
        try:
            records[case] |= memory_figures(args, case)
        except JobError as error:
            records[case].setdefault("error", error.reason)
            cases.progress(f"FAILED {error}")
    for case, record in records.items():
        gpipe = next((records[x] for x in all_cases if (x.contender, x.schedule) == (case.contender, "gpipe")), {})
        if "step_bytes" in record and all(gpipe.get("step_bytes", [0])):
            record["step_bytes_over_gpipe"] = [x / y for x, y in zip(record["step_bytes"], gpipe["step_bytes"], strict=True)]
        record |= cases.machine_fields()
    return list(records.values())


def speed_figures(results: dict[Case, Result], case: Case, tokens: int, steps: int) -> dict[str, Any]:
    """Returns the speeds of a case, their ratios, by round, to GPipe of its framework and to PyTorch, and its tensors' bytes."""
    speeds = {(x.contender, x.schedule): result.speeds(tokens) for x, result in results.items()}
    own = speeds[case.contender, case.schedule]
    if not own:
        return {}
    of_gpipe, of_torch = (peers.ratios(own, speeds.get(key, [])) for key in ((case.contender, "gpipe"), (TORCH, case.schedule)))
    by_rank = zip(*results[case].answers, strict=True)
    tensors = [[answer.get("tensor_bytes") for answer in answers] for answers in by_rank]
    return {
        "tokens_per_second": statistics.median(own),
        "tokens_per_second_by_round": own,
        "step_seconds": tokens / steps / statistics.median(own),
        "ratio_to_gpipe": of_gpipe["median"],
        "ratio_to_torch": of_torch["median"],
        "ratio_to_torch_range": of_torch["range"],
        **({} if None in itertools.chain(*tensors) else {"tensor_bytes": [max(found) for found in tensors]}),
    }


def memory_figures(args: argparse.Namespace, case: Case) -> dict[str, Any]:
    """Runs a case by itself; returns what each process holds at rest, and at most more during a step."""
    cases.progress(f"memory of {case.label} ...")
    with peers.start("pipeline_memory", case, args, MALLOC) as job:
        answers = job.ask({"steps": args.memory_steps})
    return {
        "rest_bytes": [answer["rest_bytes"] for answer in answers],
        "step_bytes": [statistics.median(answer["step_bytes"]) for answer in answers],
        "step_bytes_by_step": [answer["step_bytes"] for answer in answers],
        "memory_environment": MALLOC,
    }


def targets(records: list[dict[str, Any]]) -> list[Target]:
    """Returns, for tfdist's workers, the speed over PyTorch's, and for each rank of 1F1B how much of GPipe's peak it holds."""
    found = []
    for record in records:
        if record["contender"] != TFDIST or not record["multi_worker"]:
            continue
        if record["schedule"] in SCHEDULES[TORCH]:
            ratio = record.get("ratio_to_torch")
            found.append(Target(f"{record['case']}: tokens/s over PyTorch's, at least 1", ratio, (ratio or 0) >= 1))
        if record["schedule"] == "1f1b":
            limit = MEMORY_MARGIN * record["devices"] / record["num_microbatches"]
            for rank in range(record["devices"]):
                ratios = record.get("step_bytes_over_gpipe")
                ratio = None if ratios is None else ratios[rank]
                text = f"{record['case']}, rank {rank}: peak over GPipe's, at most 1.2 p/m = {limit:.2f}"
                found.append(Target(text, ratio, ratio is not None and ratio <= limit))
    return found


def show(records: list[dict[str, Any]]) -> str:
    def megabytes(sizes: list[float] | None) -> str | None:
        return None if sizes is None else " ".join(f"{size / 1e6:.1f}" for size in sizes)

    rows = []
    for record in records:
        low, high = record.get("ratio_to_torch_range") or (None, None)
        mine = record["contender"] == TFDIST
        rows.append(
            [
                record["case"],
                cases.number(record.get("step_seconds"), 3),
                cases.number(record.get("tokens_per_second"), 0),
                cases.number(record.get("ratio_to_gpipe")),
                cases.number(record.get("ratio_to_torch")) if mine else "",
                f"{low:.2f} .. {high:.2f}" if mine and low is not None else "",
                *(megabytes(record.get(field)) for field in ("rest_bytes", "step_bytes", "tensor_bytes")),
                "failed" if "error" in record else "",
            ]
        )
    header = ["ranks, microbatches", "step s", "tokens/s", "x gpipe", "x torch", "range", "rest MB", "step MB", "tensors MB", ""]
    return cases.table(header, rows)


def main(argv: list[str] | None = None) -> int:
    args = parse_args(argv)
    contenders, records = peers.contenders(args), []
    for ranks, num_microbatches in itertools.product(args.ranks, args.microbatches):
        cases.progress(f"{ranks} ranks, {num_microbatches} microbatches")
        for record in measure(args, contenders, ranks, num_microbatches):
            records.append(record)
            cases.emit(record, args.json)
    found = targets(records)
    print("\n" + "\n".join([show(records), "", *map(str, found)]))
    return cases.exit_code(found, failures=sum("error" in record for record in records), check=args.check)


if __name__ == "__main__":
    sys.exit(main())
