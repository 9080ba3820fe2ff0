"""The names by which Keras files the weights of tensor-parallel layers: those of the layers that they are, so that files travel.

Keras puts the weights of a layer in a file under the name of its class, in snake case, and names layers by it too. A
`ColumnParallelDense` is a `Dense` there: "dense", "dense_1", ..., numbered among the others.

`to_snake_case` is private to Keras: tests/layers/test_private_names_of_layers.py fails when it changes.
"""

from __future__ import annotations

from collections.abc import Callable

from keras.src.utils import naming

from tfdist.override import override

_KERAS_NAMES: dict[str, str] = {}


def filed_as(keras_class: type) -> Callable[[type], type]:
    """Declares that layers of a class go by the name of `keras_class`. A class decorator."""

    def declare(layer_class: type) -> type:
        _KERAS_NAMES[layer_class.__name__] = keras_class.__name__
        return layer_class

    return declare


@override("to_snake_case", naming)
def _to_snake_case(original: Callable[[str], str], name: str) -> str:
    return original(_KERAS_NAMES.get(name, name))
