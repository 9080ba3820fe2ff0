"""`tf.train.Checkpoint` over several workers: all read the variables, and of workers with one path the chief alone writes.

    chief     where?   barrier   read all, write, record, remove old ones     share the outcome
    reader    where?   barrier   read all                                     share the outcome

So a loop with `tf.train.CheckpointManager`, the same on all workers, has one checkpoint, which all restore. A worker writes its
own, as TensorFlow does, where it was given another path, or where that path is on a disk of its own: it does not see what the
chief has put into the folder.

The mistake to avoid: `if chief: checkpoint.save(...)`, which waits for the others for ever, as `model.save` does.

What TensorFlow's saver keeps is private to it: tests/checkpoint/test_tensorflow_checkpoints.py fails when it changes.
"""

import contextlib
import contextvars
import json
import os
import uuid
from collections.abc import Callable
from typing import Any

import tensorflow as tf

from tfdist import errors, temporary
from tfdist.checkpoint.writing_role import cluster_strategy_of, is_chief
from tfdist.sharding.compression import COMPRESSION

# Whether this worker writes, records and removes no files, here and now: they are left to the chief.
only_reads: contextvars.ContextVar[bool] = contextvars.ContextVar("only_reads", default=False)
_TOKEN = ".tfdist-writing"


def refuse_background(checkpoint: Any) -> None:
    """Raises NotImplementedError for a checkpoint to be written in the background whose variables are of several workers."""
    if cluster_strategy_of(tf.train.TrackableView(checkpoint).descendants()) is not None:
        raise errors.not_implemented(
            "`tf.train.Checkpoint` cannot be written in the background under several workers: reading its variables is a "
            "collective.",
            experimental_enable_async_checkpoint=True,
            fix="Leave this option out.",
        )


def write_checkpoint(checkpoint: Any, path: str, write: Callable[[], Any]) -> Any:
    """Has TensorFlow write a checkpoint, by `write()`, and returns what that returns; all workers call it at once.

    Raises:
        OSError: what the chief has met with; what a worker itself has met with is raised as it is.
    """
    if not tf.executing_eagerly():
        return write()
    variables = tf.train.TrackableView(checkpoint).descendants()
    strategy = cluster_strategy_of(variables)
    if strategy is None:
        COMPRESSION.now.complete_copies(variables)
        return write()
    failure, written = None, None
    leaves_files = not _writes_files(strategy, path)
    try:
        with temporary.context_value(only_reads, leaves_files):
            COMPRESSION.now.complete_copies(variables)
            written = write()
    except (tf.errors.OpError, OSError) as error:  # others may wait for this worker
        failure = error
    said = strategy.share("tf.train.Checkpoint/end", "" if failure is None else f"{path} was not written: {failure}")
    if failure is not None or said:
        raise failure or OSError(said)
    return written


def read_tensors(saver: Any) -> None:
    """Reads what TensorFlow's `MultiDeviceSaver` would write, in the same order, and drops it."""

    def read() -> None:
        for task, shards in saver._get_shards_by_task(None):
            with tf.device(task):
                for tensor in (tensor for shard in shards for slices in shard.values() for tensor in slices.values()):
                    if tensor is not None:
                        tf.convert_to_tensor(tensor)

    # As TensorFlow does: collectives of a traced function meet none of an eager call.
    (tf.function(read, jit_compile=False) if saver._num_unique_tasks > 1 else read)()


def _writes_files(strategy: Any, path: str) -> bool:
    """Returns whether this worker writes files, when all workers are there."""
    folder = os.path.dirname(path) or "."
    token, sign = os.path.join(folder, _TOKEN), ""
    if is_chief(strategy):
        with contextlib.suppress(tf.errors.OpError, OSError):  # writing meets with it again
            tf.io.gfile.makedirs(folder)
            with tf.io.gfile.GFile(token, "w") as file:
                file.write(uuid.uuid4().hex)
            sign = _content(token)
    chiefs_path, sign = json.loads(strategy.share("tf.train.Checkpoint/where", json.dumps([_whole(path), sign])))
    writes = is_chief(strategy) or chiefs_path != _whole(path) or sign not in ("", _content(token))
    strategy.barrier("tf.train.Checkpoint/begin")
    if is_chief(strategy) and sign:
        with contextlib.suppress(tf.errors.OpError, OSError):
            tf.io.gfile.remove(token)
    return writes


def _content(token: str) -> str:
    """Returns what the chief has put into the folder, "" where a worker does not see it."""
    try:
        with tf.io.gfile.GFile(token, "r") as file:
            return file.read()
    except (tf.errors.OpError, OSError):
        return ""


def _whole(path: str) -> str:
    return path if "://" in path else os.path.abspath(path)
