"""Symbols to call a model with, from what the model says of its inputs."""

import itertools
from collections.abc import Iterator
from typing import Any

import keras

# The positional and keyword arguments of a call.
Call = tuple[tuple[Any, ...], dict[str, Any]]

BATCH = 2  # examples, where the model does not fix their number
# Sizes tried in place of those that the model leaves open, such as a sequence's length: until every layer can be followed.
OPEN_SIZES = (128, 16)
# A subclassed model does not know its dtypes. An Embedding takes indices of any, but other steps may want integers.
OPEN_DTYPES = ("float32", "int32")


def symbolic_calls(model: keras.Model) -> Iterator[tuple[Call, int | None]]:
    """Yields calls of the model on symbols, the likeliest first, each with the size that stands for those left open, if any are.

    Nothing is yielded if the model does not know the shapes of its inputs.
    """
    specs, is_keyword = _input_specs(model)
    flat = keras.tree.flatten(specs)
    sizes = OPEN_SIZES if any(None in spec.shape[1:] for spec in flat) else (None,)
    dtypes = OPEN_DTYPES if any(spec.dtype is None for spec in flat) else (None,)
    for size, dtype in itertools.product(sizes, dtypes) if flat else ():
        symbols = []
        for spec in flat:
            shape = [known or (size if axis else BATCH) for axis, known in enumerate(spec.shape)]
            symbols.append(keras.KerasTensor(shape, spec.dtype or dtype, sparse=getattr(spec, "sparse", False)))
        structure = keras.tree.pack_sequence_as(specs, symbols)
        yield (((), structure) if is_keyword else ((structure,), {})), size


def _input_specs(model: keras.Model) -> tuple[Any, bool]:
    """Returns the structure of the inputs, and whether they are keyword arguments; an empty one if it is not known."""
    inputs = getattr(model, "inputs", None)
    if isinstance(inputs, list) and inputs and all(isinstance(x, keras.KerasTensor) for x in inputs):
        return (inputs[0] if isinstance(model, keras.Sequential) else model.input), False
    config = model.get_build_config() or {}
    if config.get("input_shape") is not None:
        return _specs(config["input_shape"]), False
    shapes = config.get("shapes_dict") or {}
    return _specs({name.removesuffix("_shape"): shape for name, shape in shapes.items()}), True


def _specs(shapes: Any) -> Any:
    return keras.tree.map_shape_structure(lambda shape: keras.InputSpec(shape=shape), shapes)
