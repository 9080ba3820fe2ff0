"""Models whose weights hold no values: built in seconds and hundreds of megabytes, whatever their size, to be traced."""

import contextlib
import copy
import inspect
import itertools
from collections.abc import Callable, Iterator
from typing import Any

import keras
import tensorflow as tf

from tfdist import errors
from tfdist.graphs import tape
from tfdist.sharding import keras_scope

_MOST_ELEMENTS = 2**16
_FIX = "It must return a Keras model that is built: functional, or with `model.build(input_shape)` called in it."


@contextlib.contextmanager
def weightless(strategy: tf.distribute.Strategy | None = None) -> Iterator[None]:
    """A block in which variables made from an initializer get a shape and a dtype, and no memory. The initializer does not run.

    They have a `number`, in the order in which they are made, and are there to be traced with, not to be computed with. Variables
    made from a value, as counters are, have it, and so have small ones that are not trained: layers compute with such statistics
    when they are built (`keras.layers.Normalization`).

    Args:
        strategy: in whose scope the block is, one of tfdist's: what each of its ranks stores has no memory then.
    """
    scratch, numbers = tf.Graph(), itertools.count()

    def with_spec(next_creator: Callable[..., tf.Variable], **settings: Any) -> tf.Variable:
        initial = settings.get("initial_value")
        if callable(initial):
            shape, dtype = _spec(initial, scratch)
            is_statistic = settings.get("trainable") is False and shape.num_elements() <= _MOST_ELEMENTS
            if strategy is not None or not is_statistic:
                settings["initial_value"] = tf.TensorSpec(shape, settings.get("dtype") or dtype)
        return next_creator(**settings)

    def without_value(next_creator: Callable[..., tf.Variable], **settings: Any) -> tf.Variable:
        spec = settings.get("initial_value")
        if not isinstance(spec, tf.TensorSpec):
            return next_creator(**settings)
        is_trainable = settings.get("trainable") is not False
        made = tape.variable_without_value(spec.shape, spec.dtype, is_trainable, settings.get("name"), "CPU:0")
        made.number = next(numbers)
        return made

    # The last creator is asked first; that of a strategy's scope makes of one variable those of its ranks.
    with (
        tf.variable_creator_scope(without_value),
        contextlib.nullcontext() if strategy is None else strategy.scope(),
        tf.variable_creator_scope(with_spec),
    ):
        yield


def weightless_model(build: Callable[[], Any], strategy: tf.distribute.Strategy | None = None) -> keras.Model:
    """Returns the model that `build` makes, its weights without values; in the scope of `strategy`, if there is one.

    Raises:
        ValueError: `build` cannot be called, fails, needs the values of weights, or returns no built Keras model.
    """
    if not callable(build) or isinstance(build, keras.Model):
        raise errors.value_error("`build` must be a function without arguments that returns a Keras model.", build=build)
    try:
        with names_are_free_again(), weightless(strategy):
            model = build()
    except tf.errors.OpError as error:  # of an eager computation
        raise errors.value_error(
            f"`build` computes with the values of weights, which do not exist while a model is planned ({type(error).__name__}).",
            fix="Leave out what calls the model on data, adapts layers or loads weights; `model.build(input_shape)` builds it.",
            build=name_of(build),
        ) from error
    except Exception as error:  # whatever a user's code raises
        expected = f"`build` must return a Keras model, but failed: {type(error).__name__}: {error}"
        fix = "It is called without arguments, and weights have no values in it: leave out what reads, sets or loads them."
        raise errors.value_error(expected, build=name_of(build), fix=fix) from error
    if not isinstance(model, keras.Model):
        raise errors.value_error("`build` must return a Keras model.", returned=model, fix=_FIX)
    if not model.built or not model.weights:
        raise errors.value_error("`build` returned a model without weights.", model=model.name, fix=_FIX)
    return model


@contextlib.contextmanager
def names_are_free_again() -> Iterator[None]:
    """A block after which Keras's state of the thread is as before: the names that layers get in it are free again."""
    state = keras_scope.thread_state()
    copied = {key: copy.copy(value) if isinstance(value, dict | list | set) else value for key, value in state.items()}
    with keras_scope.thread_state_of(copied):
        yield


def name_of(build: Callable[..., Any]) -> str:
    """Returns what to call a function."""
    return getattr(build, "__name__", type(build).__name__)


def _spec(initial: Callable[[], Any], scratch: tf.Graph) -> tuple[tf.TensorShape, tf.DType]:
    """Returns shape and dtype of an initial value: those of the Keras variable that it is for, else of what it makes."""
    variable = inspect.getclosurevars(initial).nonlocals.get("self") if inspect.isfunction(initial) else None
    if isinstance(variable, keras.Variable):
        return variable.shape, tf.as_dtype(variable.dtype)
    with scratch.as_default():
        made = tf.convert_to_tensor(initial())
    return made.shape, made.dtype
