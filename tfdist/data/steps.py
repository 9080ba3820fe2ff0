"""The steps of an epoch, as many on every worker: what Keras is told of them, beside the length of a dataset.

A `keras.utils.PyDataset` says how many batches it has, which is not the length of the dataset that Keras makes of it; and
`steps_per_epoch` may be given on one worker only. A worker that takes a step more than the others waits for them.
"""

from __future__ import annotations

import contextlib
import json
import re
from collections.abc import Iterator, Sequence
from typing import Any

import tensorflow as tf

from tfdist import errors
from tfdist.data.ends import told


def description(epoch_iterator: Any) -> str:
    """Returns what decides how many steps Keras's `epoch_iterator` takes, for other workers."""
    numbers = {
        "steps": epoch_iterator.steps_per_epoch,
        "batches of the data": epoch_iterator.data_adapter.num_batches,
        "steps_per_execution": epoch_iterator.steps_per_execution,
    }
    return json.dumps(numbers)


def check_same(descriptions: Sequence[str], tasks: Sequence[str]) -> None:
    """Raises ValueError, on every worker, when `tasks`, the workers, would take different numbers of steps."""
    first, *others = map(json.loads, descriptions)
    for task, numbers in zip(tasks[1:], others, strict=True):
        for name, number in numbers.items():
            if number != first[name]:
                raise errors.value_error(
                    f"Every worker must take the same steps, but the number of {name} is {first[name]} on {tasks[0]} and "
                    f"{number} on {task}.",
                    fix="Give all workers the same `steps_per_epoch` (`steps`, `validation_steps`), and data of one length. "
                    "Parts of different lengths go through `strategy.distribute_datasets_from_function`.",
                )


@contextlib.contextmanager
def plain_errors() -> Iterator[None]:
    """A block in which data that end early raise RuntimeError with those words alone, in a graph as elsewhere."""
    try:
        yield
    except (tf.errors.InvalidArgumentError, tf.errors.FailedPreconditionError) as error:
        text = told(str(error)) or _of_length(str(error))
        if text is None:
            raise
        raise RuntimeError(text) from None


def _of_length(message: str) -> str | None:
    """Returns what `parts.of_known_length` has to say, from the `message` of TensorFlow's error; None: it is another error."""
    found = re.search(r"Input dataset was expected to contain (\d+) elements but contained (only|at least) (\d+)", message)
    if found is None:
        return None
    said, least, read = found.groups()
    return errors.message(
        f"The data have ended early on this worker: they have {read} batches, and have said that they have {said}."
        if least == "only"
        else f"The data have at least {read} batches on this worker, and have said that they have {said}.",
        fix="The other workers count on it. Look for files that are missing and for examples that are dropped "
        "(`ignore_errors`), or say the right number in `tf.data.experimental.assert_cardinality`.",
    )
