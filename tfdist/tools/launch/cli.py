"""The command line: `python -m tfdist run ...`. A command is a parser and a function from its arguments to an exit code."""

import argparse
import asyncio
import os
import pathlib
import signal
import sys
import uuid
from collections.abc import Callable, Sequence
from typing import Any

from tfdist.tools.launch.arguments import add_command, non_negative_int, positive_int, seconds
from tfdist.tools.launch.gpus import device_environments, visible_gpus
from tfdist.tools.launch.job import KILL_SECONDS, Job, run_job

_RUN_DESCRIPTION = """\
Starts N processes of a training script on this machine, with the TF_CONFIG that a multi-worker strategy reads, and watches
them. When one fails the others are ended, and its last output is printed last."""

_RUN_EPILOG = """\
example:
  python -m tfdist run --workers 4 --max-restarts 3 train.py --epochs 10

GPUs are shared out: every worker sees its own. They are those of CUDA_VISIBLE_DEVICES, else all of this machine.

Each worker has these variables:
  TF_CONFIG                  the addresses of all, and which one it is
  TFDIST_ATTEMPT             0, then 1, ... after restarts
  TFDIST_DEVICES_PER_WORKER  the value of --devices-per-worker, if given
  TFDIST_LOGICAL_GPUS        the value of --logical-gpus, if given; then also
  TFDIST_WORKERS_PER_GPU     how many workers share a GPU
  TFDIST_LAUNCHER            1

What a worker started itself ends with the job, unless it has a session of its own.

exit code:
  0 when all workers succeed; else that of the worker that failed first, or 128 + the number of the signal that ended it.
  130 after Ctrl-C, 143 after SIGTERM: the workers get the signal and the grace time; a second Ctrl-C kills them at once."""


def main(argv: Sequence[str] | None = None, more: Sequence[Callable[[Any], None]] = ()) -> int:
    """Runs a command; returns its exit code.

    Args:
        argv: arguments without the program's name; None: those of this process.
        more: functions that add commands of their own, given argparse's subparsers: of packages that this one does not know.

    Raises:
        SystemExit: with code 2, for wrong arguments; with code 0, after `--help`.
    """
    parser = argparse.ArgumentParser(prog="python -m tfdist", description="Tools beside the tfdist package.")
    commands = parser.add_subparsers(required=True, metavar="COMMAND")
    _add_run(commands)
    for add in more:
        add(commands)
    args = parser.parse_args(argv)
    try:
        return args.command(args)
    except BrokenPipeError:
        # Whoever read the output, such as `head`, has gone. At exit Python would flush to it again.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 128 + signal.SIGPIPE


def _add_run(commands: Any) -> None:
    parser = add_command(
        commands,
        "run",
        lambda parser, args: asyncio.run(run_job(_job(parser, args))),
        help="start the workers of a training script on this machine",
        usage="%(prog)s --workers N [options] (train.py | -m module) [ARGS ...]",
        description=_RUN_DESCRIPTION,
        epilog=_RUN_EPILOG,
    )
    parser.add_argument("--workers", type=positive_int, required=True, metavar="N", help="processes in all")
    parser.add_argument("--chief", action="store_true", help="the first process is the task chief 0, not worker 0")
    parser.add_argument(
        "--devices-per-worker",
        type=positive_int,
        metavar="D",
        help="GPUs of each worker (default: an equal share), or logical devices that it splits the CPU in",
    )
    parser.add_argument(
        "--logical-gpus",
        type=positive_int,
        metavar="L",
        help="split one GPU of each worker in L logical ones (tfdist.use_logical_gpus); workers share a GPU where there are more "
        "of them: to try on one card what needs many",
    )
    parser.add_argument("--cpu", action="store_true", help="hide the GPUs from the workers")
    parser.add_argument(
        "--max-restarts",
        type=non_negative_int,
        default=0,
        metavar="R",
        help="after a failure, start all workers again, so many times at most (default: 0). The script is to go on from "
        "its last backup: keras.callbacks.BackupAndRestore. Not after exit code 2, the sign of wrong arguments",
    )
    parser.add_argument(
        "--grace-seconds",
        type=seconds,
        default=20.0,
        metavar="S",
        help=f"what the others get to end by themselves when a worker fails, before SIGTERM and, {KILL_SECONDS:g} s later, "
        "SIGKILL (default: 20)",
    )
    parser.add_argument(
        "--log-dir",
        type=pathlib.Path,
        metavar="DIR",
        help="append what worker i prints to DIR/attempt_K/worker_i.log, and show the first worker only",
    )
    parser.add_argument("-m", dest="is_module", action="store_true", help="the program is a module, as in python -m")
    parser.add_argument("program", metavar="train.py", help="the script, or with -m the module")
    parser.add_argument("args", nargs=argparse.REMAINDER, metavar="ARGS", help="its arguments")


def _job(parser: argparse.ArgumentParser, args: argparse.Namespace) -> Job:
    """Returns what `args` ask for; ends the program, with the reason, where this machine cannot do it."""
    if not hasattr(os, "pidfd_open"):
        parser.error(f"this command needs Linux. Received: {sys.platform}")
    if not args.is_module and not os.path.exists(args.program):
        parser.error(f"argument train.py: must be a script that exists. Received: {args.program}")
    if args.log_dir and args.log_dir.exists() and not args.log_dir.is_dir():
        parser.error(f"argument --log-dir: must be a directory, or not exist yet. Received: {args.log_dir}")
    try:
        environments = device_environments(
            args.workers, args.devices_per_worker, gpus=visible_gpus(), cpu=args.cpu, logical_gpus=args.logical_gpus
        )
    except ValueError as error:
        parser.error(str(error))
    return Job(
        command=(*(["-m"] if args.is_module else []), args.program, *args.args),
        device_environments=tuple(environments),
        chief=args.chief,
        max_restarts=args.max_restarts,
        grace_seconds=args.grace_seconds,
        name=os.environ.get("TFDIST_JOB") or (uuid.uuid4().hex if args.max_restarts else ""),
        log_dir=args.log_dir,
    )
