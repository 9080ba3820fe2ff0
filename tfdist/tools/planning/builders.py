"""The function that makes a model, by the name that stands on a command line."""

import functools
import importlib
import json
from collections.abc import Callable, Mapping
from typing import Any

import keras

from tfdist import errors

_FIX = 'Name it as "package.module:build" or "package.Class"; the module is searched from the current directory, too.'


def named_builder(name: str, arguments: Mapping[str, Any] | None = None) -> Callable[[], keras.Model]:
    """Returns the function or class called `name`, with its arguments: any that returns a Keras model.

        named_builder("mypackage.models:build")
        named_builder("keras_hub.models.Llama3Backbone", {"vocabulary_size": 128256, "num_layers": 32, ...})

    Args:
        name: "module:attribute", or a dotted name whose last part is the attribute.
        arguments: keyword arguments of each call.

    Raises:
        ValueError: there is no such module or attribute, or it cannot be called.
    """
    module_name, _, attribute = name.partition(":") if ":" in name else name.rpartition(".")
    try:
        found: Any = importlib.import_module(module_name) if module_name else None
    except ImportError as error:
        expected = f"`model` must name a function of a module that can be imported ({error})."
        raise errors.value_error(expected, model=name, fix=_FIX) from None
    for part in attribute.split("."):
        found = getattr(found, part, None)
    if not callable(found):
        raise errors.value_error("`model` must name a function or class that makes a model.", model=name, fix=_FIX)
    return functools.update_wrapper(functools.partial(found, **arguments), found, ("__name__",), ()) if arguments else found


def arguments_of(text: str) -> dict[str, Any]:
    """Returns the arguments that a JSON object names. Raises ValueError when `text` is none."""
    try:
        found = json.loads(text)
    except json.JSONDecodeError as error:
        raise errors.value_error(f"`arguments` must be a JSON object ({error}).", arguments=text) from None
    if not isinstance(found, dict):
        raise errors.value_error('`arguments` must be a JSON object, such as {"num_layers": 12}.', arguments=text)
    return found
