"""The files of Keras's `CSVLogger` in a run that goes on: they keep the rows of epochs that are not trained again."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import keras
from keras.src.utils import file_utils


def keep_rows_before(callbacks: Iterable[Any], epoch: int) -> None:
    """Has each `CSVLogger` in `callbacks` write behind the rows of the epochs that are over.

    Rows that this run had written of `epoch` and later ones are dropped; rows of runs before, which it has appended to, stay.
    """
    for logger in callbacks:
        if isinstance(logger, keras.callbacks.CSVLogger):
            logger.append = True
            if file_utils.exists(logger.filename):
                _drop_rows_from(epoch, logger)


def _drop_rows_from(epoch: int, logger: Any) -> None:
    with file_utils.File(logger.filename, "r") as file:
        lines = file.readlines()
    kept, following = len(lines), None  # the epoch of the row behind, which was dropped
    while kept and (found := _epoch_of(lines[kept - 1], logger.sep)) is not None and found >= epoch:
        if following is not None and found != following - 1:
            break
        kept, following = kept - 1, found
    if kept < len(lines):
        with file_utils.File(logger.filename, "w") as file:
            file.write("".join(lines[:kept]))


def _epoch_of(line: str, separator: str) -> int | None:
    first = line.partition(separator)[0]
    return int(first) if first.isdigit() else None
