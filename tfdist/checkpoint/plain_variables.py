"""Exporting a model: while its functions are traced and written, its variables are TensorFlow's plain ones, on the host.

A SavedModel holds functions and the variables that they read. Those of a strategy read components on several devices, or shards
that are put together, so that what is served would know of the devices that it was trained on, or could not be written at all. So
for an export every Keras variable of the model gets, in the place of its value, a plain variable that holds all of it:

    assemble variable 0, copy it to the host, drop it; variable 1; ...; trace; write; give the values back

No device holds more than one whole variable at a time; the host holds a copy of what is exported until it is written. What comes
out is what one device would have exported.
"""

import contextlib
import functools
import inspect
from collections.abc import Iterable, Iterator
from typing import Any

import keras
import tensorflow as tf
from tensorflow.python.ops import resource_variable_ops

from tfdist import errors
from tfdist.collectives import rank_program

_HOLDERS = (keras.layers.Layer, keras.optimizers.Optimizer, keras.metrics.Metric)


@contextlib.contextmanager
def plain(variables: Iterable[keras.Variable], *, only_read: bool = False) -> Iterator[None]:
    """A block in which `variables` are plain variables on the host, and so are those that are made in it.

    Args:
        variables: Keras variables of a strategy.
        only_read: whether the values are read and dropped, as a worker that writes nothing does.

    Raises:
        RuntimeError: called in the function given to `strategy.run`.
    """
    if rank_program() is not None:
        raise errors.runtime_error(
            "A model is exported in the function given to `strategy.run`.", fix="Export it after the step."
        )
    before: list[tuple[keras.Variable, Any]] = []
    try:
        with tf.variable_creator_scope(_creator):
            for variable in variables:
                value = variable._value.numpy()
                if not only_read:
                    before.append((variable, variable._value))
                    with tf.device("CPU:0"):
                        variable._value = _plain(initial_value=value, trainable=variable.trainable, name=variable.name)
            yield
    finally:
        for variable, value in before:
            variable._value = value


def variables_of(resources: Iterable[Any]) -> list[keras.Variable]:
    """Returns the Keras variables in `resources` that a strategy has made, each once."""
    found: dict[int, keras.Variable] = {}
    for resource in resources:
        for one in tf.train.TrackableView(resource).descendants():
            held = one.variables if isinstance(one, _HOLDERS) else [one]
            if isinstance(one, keras.Model):
                held = [*held, *one.metrics_variables, *getattr(getattr(one, "optimizer", None), "variables", ())]
            for variable in held:
                if isinstance(variable, keras.Variable) and isinstance(variable._value, tf.distribute.DistributedValues):
                    found[id(variable)] = variable
    return list(found.values())


def called_by(function: Any) -> list[keras.layers.Layer]:
    """Returns the layers that a Python function, or one that TensorFlow traces, is a method of or refers to by name."""
    function = getattr(function, "python_function", function)
    while isinstance(function, functools.partial):
        function = function.func
    candidates = [getattr(function, "__self__", None)]
    if inspect.isfunction(function):
        names = inspect.getclosurevars(function)
        candidates += [*names.nonlocals.values(), *names.globals.values()]
    return [one for one in candidates if isinstance(one, keras.layers.Layer)]


def _creator(next_creator: Any, **kwargs: Any) -> tf.Variable:
    return _plain(**kwargs) if tf.distribute.has_strategy() else next_creator(**kwargs)


def _plain(**kwargs: Any) -> tf.Variable:
    """Makes a variable of one device, also in the scope of a strategy; without a value, as one is that is loaded."""
    has_value = kwargs.get("initial_value") is not None
    kind = resource_variable_ops.ResourceVariable if has_value else resource_variable_ops.UninitializedVariable
    known = inspect.signature(kind.__init__).parameters
    return kind(**{name: value for name, value in kwargs.items() if name in known})
