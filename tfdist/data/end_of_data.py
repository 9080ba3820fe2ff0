"""Where the data end: whether a worker still has a batch when another one has none.

    worker 0, part 0    |####|####|####|####|####|          all workers take five steps: worker 1, whose part ends after
    worker 1, part 1    |####|####|####|####|    |          four batches, takes part in the fifth with no rows

    worker 0, part 0    |####|####|####|####|####|          workers that read the same part must reach its end together:
    worker 1, part 0    |####|####|####|    |    |          the fourth step raises on both of them

Workers that are given the same dataset all read part 0; those that read parts of their own, a part for each copy of the model.
Where every worker knows how long its data are, that is settled once (`parts`, `signature`), and no step asks. Else each step
begins with one message, of one number a worker.
"""

import contextlib
import dataclasses
import re
from collections.abc import Iterator

import tensorflow as tf

from tfdist import errors

_FIX = (
    "Data that all workers are given must be as long on each of them: look for files that are missing on one worker, and for "
    "examples that it drops. Parts of different lengths go through `strategy.distribute_datasets_from_function`."
)


@dataclasses.dataclass(frozen=True)
class EndOfData:
    """The common knowledge of a job's workers by which they end together.

    Args:
        tasks: the workers, in words.
        here: the place of this worker in `tasks`.
        parts: the part of the data that each worker reads, by its number.
    """

    tasks: tuple[str, ...]
    here: int
    parts: tuple[int, ...]

    @property
    def part(self) -> int:
        """The part of the data that this worker reads."""
        return self.parts[self.here]

    def checks(self, have_next: tf.Tensor, batches: tf.Tensor) -> list[tf.Operation]:
        """Raises RuntimeError, on every worker, when one has no batch and another, that reads the same part, has one.

        Args:
            have_next: 1 for each worker that has another batch, else 0.
            batches: how many batches each worker has had, this one included.

        Returns:
            In a graph, what raises InvalidArgumentError instead.
        """
        if len(set(self.parts)) == len(self.parts):
            return []
        others = [[other == part for other in self.parts] for part in self.parts]
        has_peer = tf.reduce_any(tf.logical_and(tf.constant(others), have_next[tf.newaxis, :] > 0), axis=1)
        is_short = tf.logical_and(has_peer, have_next == 0)
        short = tf.argmax(tf.cast(is_short, tf.int64))
        longer = tf.argmax(tf.cast(tf.logical_and(tf.gather(tf.constant(others), short), have_next > 0), tf.int64))
        tasks, number = tf.constant(self.tasks), tf.strings.as_string(tf.gather(batches, short))
        first = ["The data have ended early on ", tf.gather(tasks, short), ", after ", number, " batches: "]
        text = tf.strings.join([*first, tf.gather(tasks, longer), f" has another one. {_FIX}"])
        if not tf.executing_eagerly():
            return [tf.debugging.Assert(tf.logical_not(tf.reduce_any(is_short)), [text])]
        if tf.reduce_any(is_short):
            raise errors.runtime_error(text.numpy().decode())
        return []


@contextlib.contextmanager
def plain_errors() -> Iterator[None]:
    """A block in which data that end early raise RuntimeError with those words alone, in a graph as elsewhere."""
    try:
        yield
    except (tf.errors.InvalidArgumentError, tf.errors.FailedPreconditionError) as error:
        message = str(error)
        begin, end = message.find("The data have ended early on "), message.find(_FIX)
        text = _of_length(message) if begin < 0 or end < begin else message[begin:end] + _FIX
        if text is None:
            raise
        raise RuntimeError(text) from None


def _of_length(message: str) -> str | None:
    """Returns what `parts.times_as_long` has to say, from the `message` of TensorFlow's error; None: it is another error."""
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
