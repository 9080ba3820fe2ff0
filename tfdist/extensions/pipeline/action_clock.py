"""When the actions of a rank start and end: operations of the step that read the time.

The operation is not `tf.timestamp`, which is stateful: a `tf.function` runs stateful operations in the order of tracing, all
those of one rank before those of the next, and ranks of a pipeline wait for each other.
"""

import time
from collections.abc import Sequence

import tensorflow as tf

from tfdist.extensions.pipeline.schedules.actions import Action


class ActionClock:
    """Reads the time before and after each action.

    A clock costs two calls of Python an action, and with it no part of an action begins before all that the action needs has
    arrived.

    Args:
        begin: a time before the step, a float64 scalar that the `tf.function` is given: what depends on nothing that a function
            is given, TensorFlow computes once, before the first step.

    Attributes:
        times: start and end of each action, in seconds from `begin`: float64 scalars.
    """

    def __init__(self, begin: tf.Tensor) -> None:
        self._begin = begin
        self.times: dict[Action, list[tf.Tensor]] = {}

    def read(self, action: Action, after: Sequence[tf.Operation | tf.Tensor]) -> list[tf.Operation]:
        """Notes the time when all of `after` has ended, and returns the operation that reads it."""
        with tf.control_dependencies(after):
            now = tf.ensure_shape(
                tf.numpy_function(lambda begin: time.time() - begin, [self._begin], tf.float64, stateful=False), []
            )
        self.times.setdefault(action, []).append(now)
        return [now.op]
