"""The files of Keras's `CSVLogger` in a run that goes on: they keep the rows of epochs that are not trained again."""

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
    firsts = [line.partition(logger.sep)[0] for line in lines]
    epochs = [int(first) if first.isdigit() else -1 for first in firsts]
    kept = len(lines)
    # Behind a row of this run that was dropped is none, or that of the next epoch.
    while kept and epochs[kept - 1] >= epoch and epochs[kept : kept + 1] in ([], [epochs[kept - 1] + 1]):
        kept -= 1
    if kept < len(lines):
        with file_utils.File(logger.filename, "w") as file:
            file.write("".join(lines[:kept]))
