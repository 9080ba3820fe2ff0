"""Commands of the program, and types of their arguments: text in, a value in its range out, or what is said of a wrong one."""

import argparse
import json
import pathlib
from collections.abc import Callable
from typing import Any

_LONGEST_TIME = 24 * 3600.0  # seconds


def add_command(
    commands: Any, name: str, run: Callable[[argparse.ArgumentParser, argparse.Namespace], int], **texts: str
) -> argparse.ArgumentParser:
    """Adds a command to those of the program, argparse's subparsers; `run(parser, args)` returns its exit code."""
    parser: argparse.ArgumentParser = commands.add_parser(
        name, formatter_class=argparse.RawDescriptionHelpFormatter, allow_abbrev=False, **texts
    )
    parser.set_defaults(command=lambda args: run(parser, args))
    return parser


def publish(report: Any, file: str | None) -> None:
    """Prints a report, and writes it to `file`, if any, as JSON; for "-" prints the JSON alone."""
    text = json.dumps(report.to_json(), indent=2)
    print(text if file == "-" else report)
    if file not in (None, "-"):
        pathlib.Path(file).write_text(f"{text}\n", encoding="utf-8")


def positive_int(text: str) -> int:
    return _number(int, text, least=1, expected="a positive integer")


def non_negative_int(text: str) -> int:
    return _number(int, text, least=0, expected="an integer of at least 0")


def seconds(text: str) -> float:
    return _number(float, text, least=0, most=_LONGEST_TIME, expected=f"a number of seconds from 0 to {_LONGEST_TIME:g}")


def output_file(text: str) -> str:
    """A file to be written, or "-"."""
    if not pathlib.Path(text).absolute().parent.is_dir():
        raise argparse.ArgumentTypeError(f"must be a file in a directory that exists. Received: {text}")
    return text


def _number(kind: type, text: str, *, least: float, most: float = float("inf"), expected: str) -> Any:
    try:
        value = kind(text)
    except ValueError:
        value = None
    if value is None or not least <= value <= most:
        raise argparse.ArgumentTypeError(f"must be {expected}. Received: {text}")
    return value
