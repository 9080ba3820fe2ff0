"""The calls of a subclassed model's blocks: watched, or answered.

A subclassed model is no graph that could be split: it is a Python function, `call`. But if it is known which layers are its
blocks, that function can be run up to any of their calls, and from any of them on: the list of blocks is replaced by stand-ins,
which say what is called with what, and return what they are told.
"""

import contextlib
import functools
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
    places = [_place(model, name) for name in names]
    with contextlib.ExitStack() as undo:
        for attributes, name in places:
            blocks = attributes[name]
            undo.callback(attributes.__setitem__, name, blocks)
            stand_ins = [_StandIn(block, on_call) for block in layers_in(blocks)]
            attributes[name] = _chain(blocks, stand_ins) if isinstance(blocks, keras.Sequential) else stand_ins
        yield


def blocks_of(model: keras.Model, names: Sequence[str]) -> list[keras.layers.Layer]:
    """Returns the blocks that `blocks_replaced` replaces."""
    return [block for attributes, name in (_place(model, name) for name in names) for block in layers_in(attributes[name])]


def layers_in(held: Any) -> list[keras.layers.Layer]:
    """Returns the layers of a list, a tuple or a Sequential. What TensorFlow wraps a tuple in has `layers`, too, but none."""
    return list(held.layers if isinstance(held, keras.Sequential) else held)


def _place(model: keras.Model, name: str) -> tuple[dict[str, Any], str]:
    """Returns the attributes of the object that has the attribute `name` of `model`, a name with dots, and its last part."""
    *path, last = str(name).split(".")
    owner: Any = model
    for part in path:
        owner = getattr(owner, part, None)
    attributes = getattr(owner, "__dict__", {})
    if _holds_blocks(attributes.get(last)):
        return attributes, last
    lists = [key for key, value in vars(model).items() if not key.startswith("_") and _holds_blocks(value)]
    raise errors.value_error(
        f"`blocks` must name attributes of {type(model).__name__} that hold its blocks, layers in a list or in a Sequential.",
        blocks=name,
        fix=f"Lists that it has: {', '.join(map(repr, lists)) or 'none'}.",
    )


def _holds_blocks(held: Any) -> bool:
    if isinstance(held, list | tuple):
        return bool(held) and all(isinstance(block, keras.layers.Layer) for block in held)
    return isinstance(held, keras.Sequential)


class _StandIn:
    """Stands for a block, or a Sequential of blocks: it can be called, and has the attributes of what it stands for."""

    layers: "list[_StandIn]"  # of a Sequential

    def __init__(self, block: keras.layers.Layer, on_call: OnCall):
        self._block = block
        self._on_call = on_call

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        return self._on_call(self._block, args, kwargs)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._block, name)


def _chain(sequential: keras.Sequential, stand_ins: "list[_StandIn]") -> "_StandIn":
    """Returns what stands for a Sequential of blocks: it calls their stand-ins one after the other."""

    def on_call(_: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        del kwargs  # `training`, which Keras passes to the layers; and `mask`, which the tensor bears
        return functools.reduce(lambda x, layer: layer(x), stand_ins, *args)

    chain = _StandIn(sequential, on_call)
    chain.layers = stand_ins
    return chain
