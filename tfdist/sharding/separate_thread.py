"""A separate thread for what is done while a step is being traced: making variables.

Keras makes what is not built yet in the first step: weights, slots, metrics. TensorFlow takes a variable that is made while a
function is traced for one that only that trace may make, traces the function a second time, and cannot make it within a loop or a
branch, where `steps_per_execution` puts the step. A thread of its own is in no graph and in no rank, whatever the caller is in:
what it makes is there as if it had always been.
"""

import contextvars
from collections.abc import Callable, Iterable
from concurrent import futures
from typing import Any

import keras
import tensorflow as tf

from tfdist.collectives.where import is_traced_rank_thread
from tfdist.runtime import helping_another
from tfdist.sharding import keras_scope


def in_separate_thread(function: Callable[[], Any]) -> Any:
    """Returns what `function` returns in a thread of its own, which is in no scope of Keras and of no strategy either."""

    def helping() -> Any:
        with helping_another():
            return function()

    with futures.ThreadPoolExecutor(1) as thread:
        return thread.submit(helping).result()


def outside_ranks(function: Callable[[], None]) -> None:
    """Calls `function`: of a rank that is being traced in a separate thread, in the strategy's scope; else where it is called.

    Of the caller's thread it keeps what Keras knows (which layer is being built) and what variables are asked for with.
    """
    if not is_traced_rank_thread():
        function()
        return
    strategy, known, asked_for = tf.distribute.get_strategy(), keras_scope.thread_state(), contextvars.copy_context()

    def in_scope() -> None:
        with keras_scope.thread_state_of(known), strategy.scope():
            asked_for.run(function)

    in_separate_thread(in_scope)


def move(variables: Iterable[keras.Variable], strategy: tf.distribute.Strategy) -> None:
    """Makes `variables` anew under `strategy`, with the values that they have; those that are its own, or not made yet, stay.

    In a separate thread: a step that is being traced finds a moved variable as one that was always there. The mistake to avoid:
    moving what a traced function has read. The function goes on with the variable that it knows.

    `_value` and `_initialize_with_initializer` are private to Keras: test_private_names_of_layers.py fails when they change.
    """
    others = [variable for variable in variables if variable._value is not None and made_by(variable) is not strategy]

    def make_anew() -> None:
        with strategy.scope():
            for variable in others:
                value = tf.constant(variable._value.numpy())
                variable._initialize_with_initializer(lambda *_, value=value, **__: value)

    if others:
        in_separate_thread(make_anew)


def made_by(variable: keras.Variable) -> tf.distribute.Strategy | None:
    """Returns the strategy under which `variable` was made; None: none, or it is not made yet."""
    return getattr(variable._value, "distribute_strategy", None)
