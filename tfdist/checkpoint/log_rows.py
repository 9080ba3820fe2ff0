"""The file of Keras's `CSVLogger` in a run that goes on: it keeps the rows of epochs that are not trained again."""

from __future__ import annotations

from typing import Any

from keras.src.utils import file_utils


def keep_rows_before(logger: Any, epoch: int) -> None:
    """Drops the rows that this run had written of `epoch` and later ones; rows of runs before, which it has appended to, stay."""
    if not file_utils.exists(logger.filename):
        return
    with file_utils.File(logger.filename, "r") as file:
        lines = file.readlines()
    kept = list(lines)
    following = None  # the epoch of the row behind, which was dropped
    while kept and (found := _epoch_of(kept[-1], logger.sep)) is not None and found >= epoch:
        if following is not None and found != following - 1:
            break
        following = found
        kept.pop()
    if kept != lines:
        with file_utils.File(logger.filename, "w") as file:
            file.write("".join(kept))


def _epoch_of(line: str, separator: str) -> int | None:
    first = line.partition(separator)[0]
    return int(first) if first.isdigit() else None
