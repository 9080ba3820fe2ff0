"""The calls of a subclassed model's blocks: watched, or answered.

A subclassed model is no graph that could be split: it is a Python function, `call`. But if it is known which layers are its
blocks, that function can be run up to any of their calls, and from any of them on: the list of blocks is replaced by stand-ins,
which say what is called with what, and return what they are told.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import keras

from tfdist import errors

OnCall = Callable[[keras.layers.Layer, tuple[Any, ...], dict[str, Any]], Any]


class Reached(BaseException):
    """Ends a model's `call` at a call of a block. No Exception: Keras adds notes to those, and a model may catch them."""

    def __init__(self, arguments: Any):
        super().__init__()
        self.arguments = arguments


@contextlib.contextmanager
def blocks_replaced(model: keras.Model, names: Sequence[str], on_call: OnCall) -> Iterator[None]:
    """A block in which calls of the blocks of `model` are calls of `on_call(block, args, kwargs)`.

    Args:
        names: the attributes of the model that hold the blocks, such as "blocks" or "encoder.blocks": a list, a tuple or a
            `keras.Sequential`.

    Raises:
        ValueError: there is no such attribute, or it holds something else.
    """
    replaced = []
    for name in names:
        owner, last = _owner(model, name)
        replaced.append((vars(owner), last, vars(owner)[last]))
    try:
        for attributes, last, held in replaced:
            stand_ins = [_StandIn(block, on_call) for block in layers_in(held)]
            attributes[last] = _Chain(held, stand_ins) if isinstance(held, keras.Sequential) else stand_ins
        yield
    finally:
        for attributes, last, held in replaced:
            attributes[last] = held


def blocks_of(model: keras.Model, names: Sequence[str]) -> list[keras.layers.Layer]:
    """Returns the blocks that `blocks_replaced` replaces."""
    found = []
    for name in names:
        owner, last = _owner(model, name)
        found.extend(layers_in(vars(owner)[last]))
    return found


def layers_in(held: Any) -> list[keras.layers.Layer]:
    """Returns the layers of a list or of a Sequential."""
    return list(held.layers) if isinstance(held, keras.Sequential) else list(held)


def _owner(model: keras.Model, name: str) -> tuple[Any, str]:
    """Returns the object that has the attribute `name`, a dotted name, of `model`, and the attribute's own name."""
    *path, last = str(name).split(".")
    owner: Any = model
    for part in path:
        owner = getattr(owner, part, None)
    held = getattr(owner, "__dict__", {}).get(last)
    if _are_layers(held) or isinstance(held, keras.Sequential):
        return owner, last
    lists = [
        key
        for key, value in vars(model).items()
        if not key.startswith("_") and (isinstance(value, keras.Sequential) or _are_layers(value))
    ]
    raise errors.value_error(
        f"`blocks` must name attributes of {type(model).__name__} that hold its blocks, layers in a list or in a Sequential.",
        blocks=name,
        fix=f"Lists that it has: {', '.join(map(repr, lists)) or 'none'}.",
    )


def _are_layers(held: Any) -> bool:
    return isinstance(held, list | tuple) and bool(held) and all(isinstance(block, keras.layers.Layer) for block in held)


class _StandIn:
    """Stands for a block in the list of blocks: it can be called, and has the block's attributes."""

    def __init__(self, block: keras.layers.Layer, on_call: OnCall):
        self._block = block
        self._on_call = on_call

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        return self._on_call(self._block, args, kwargs)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._block, name)


class _Chain:
    """Stands for a Sequential of blocks: it calls them one after the other."""

    def __init__(self, sequential: keras.Sequential, stand_ins: Sequence[_StandIn]):
        self._sequential = sequential
        self.layers = list(stand_ins)

    def __call__(self, x: Any, **kwargs: Any) -> Any:
        del kwargs  # `training`, which the layers are told by Keras; and `mask`, which the tensor bears
        for layer in self.layers:
            x = layer(x)
        return x

    def __getattr__(self, name: str) -> Any:
        return getattr(self._sequential, name)
