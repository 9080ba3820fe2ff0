"""`python -m tfdist schedule ...`: shows a pipeline's schedule and what it costs, without running it."""

import argparse
import pathlib
from collections.abc import Sequence
from typing import Any

from tfdist.extensions.pipeline.schedules.drawing import draw
from tfdist.extensions.pipeline.schedules.make_schedule import make_schedule
from tfdist.extensions.pipeline.schedules.schedule import Schedule
from tfdist.extensions.pipeline.schedules.simulation import DURATIONS, Simulation, simulate
from tfdist.tools.launch.arguments import add_command

_DESCRIPTION = """\
Prints the grid of a pipeline's schedule (a row for each rank; 2F0: stage 2, forward, microbatch 0), the part of the time
in which ranks idle, and how many activations each rank holds. A schedule that cannot run is refused, with the reason."""

_EPILOG = """\
examples:
  python -m tfdist schedule --schedule 1f1b --stages 4 --microbatches 8
  python -m tfdist schedule --schedule interleaved --stages 8 --stages-per-rank 2 --microbatches 8 --png schedule.png
  python -m tfdist schedule --file my_schedule.txt"""


def add_schedule(commands: Any) -> None:
    """Adds the command to those of the program."""
    parser = add_command(
        commands, "schedule", _show, help="show a pipeline's schedule and what it costs", description=_DESCRIPTION, epilog=_EPILOG
    )
    source = parser.add_mutually_exclusive_group(required=True)
    source.add_argument("--schedule", metavar="NAME", help="gpipe, 1f1b, interleaved or zero_bubble")
    source.add_argument("--file", type=pathlib.Path, metavar="FILE", help="the text of a schedule of your own: such a grid")
    parser.add_argument("--stages", type=int, metavar="S", help="stages in all; a file says it itself")
    parser.add_argument("--microbatches", type=int, metavar="M", help="microbatches of a batch; a file says it itself")
    parser.add_argument("--stages-per-rank", type=int, metavar="V", help="stages on each rank (default: 1)")
    parser.add_argument("--png", type=pathlib.Path, metavar="FILE", help="draw it to this file; needs matplotlib")


def _show(parser: argparse.ArgumentParser, args: argparse.Namespace) -> int:
    if args.schedule and (args.stages is None or args.microbatches is None):
        parser.error("argument --schedule: needs --stages and --microbatches")
    try:
        given = args.schedule or Schedule.from_text(args.file.read_text(encoding="utf-8"), name=args.file.stem)
        schedule = make_schedule(given, args.stages, args.microbatches, args.stages_per_rank)
        simulation = simulate(schedule)
        if args.png:
            draw(simulation.spans, args.png, title=_title(schedule))
    except (ValueError, OSError, ImportError) as error:
        parser.error(str(error))
    print(_report(simulation))
    return 0


def _title(schedule: Schedule) -> str:
    return (
        f"{schedule.name}: {schedule.num_stages} stages on {schedule.num_ranks} ranks, {schedule.num_microbatches} microbatches"
    )


def _report(simulation: Simulation) -> str:
    schedule = simulation.schedule
    durations = ", ".join(f"{phase.value} {duration:g}" for phase, duration in DURATIONS.items())
    held = [simulation.peak_in_flight(rank) for rank in range(schedule.num_ranks)]
    lines = [
        _title(schedule),
        schedule.render(),
        f"bubble fraction: {simulation.bubble_fraction:.4g} (idle / busy time, with durations {durations})",
        f"peak in flight:  {_numbers(held)} (activations held on each rank, in microbatches of one stage)",
    ]
    if schedule.stages_per_rank > 1:
        shares = [simulation.peak_microbatches(rank) for rank in range(schedule.num_ranks)]
        lines.append(f"                 {_numbers(shares)} (in microbatches of all stages of the rank)")
    return "\n".join(lines)


def _numbers(values: Sequence[float]) -> str:
    return ", ".join(f"{value:.4g}" for value in values)
