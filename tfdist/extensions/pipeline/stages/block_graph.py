"""A subclassed model as a graph of its blocks, and of parts of its `call` before, between and after them.

    def call(self, tokens):                 part 0     embed and position, up to the first block's call
        x = self.embed(tokens)              block 0
        for block in self.blocks:           block 1    no part between: what it is called on is what the block before returned
            x = block(x)                    ...
        return self.head(x)                 part n     what the last block returned -> outputs

`call` is run once on symbols, for training and once for inference, while every block's call is watched. A part then runs `call`
itself up to where the part ends. Blocks called before return what they did return, as far as the part needs it, or zeros; code
before the part is computed with weights only as far as the part depends on it, else with zeros, and TensorFlow drops what nobody
uses. So a part is what the author wrote: with Python that looks at `training`, operations of TensorFlow, and weights of its own.

A weight on which several parts depend, such as an embedding that is the output head, is tied. What one part draws at random no
later part can compute again: such models are refused.

`_losses` is private to Keras: test_private_names_of_pipeline.py fails when it changes.
"""

import contextlib
import dataclasses
from collections.abc import Sequence
from typing import Any

import keras
import tensorflow as tf
from keras import tree

from tfdist import errors, temporary
from tfdist.extensions.pipeline.stages.block_calls import Reached, blocks_of, blocks_replaced
from tfdist.extensions.pipeline.stages.stage import added_losses
from tfdist.graphs import tape
from tfdist.sharding import keras_scope


@dataclasses.dataclass(eq=False)
class _Call:
    """A call of a block, as it was watched: with symbols of the watching graph."""

    block: keras.layers.Layer
    args: tuple[Any, ...]
    kwargs: dict[str, Any]
    outputs: Any


class _Watch(keras.StatelessScope):
    """One run of a model's `call` on symbols, and its scope: blocks' calls and reads of variables are noted, which are symbols.

    Attributes:
        calls: the calls, in order.
        results: what the model returned, flat.
        inputs: the model's inputs, flat.
        reads: by part, the variables that the part reads or assigns.
        symbols: the symbol that stands for each variable, by id of the variable.
        known: the Keras tensors of the graph that is being made, by the names of their symbols here.
    """

    def __init__(self, model: keras.Model, names: Sequence[str], inputs: Any, training: bool):
        super().__init__(collect_losses=True, initialize_variables=False)
        self.model, self.names, self.given = model, names, inputs
        self.calls: list[_Call] = []
        self.reads: list[dict[int, keras.Variable]] = [{}]
        self.symbols: dict[int, tuple[keras.Variable, tf.Tensor]] = {}
        self._is_in_block = False
        specs = [tf.TensorSpec(x.shape, x.dtype) for x in tree.flatten(inputs)]

        def run(*flat: tf.Tensor) -> None:
            self.inputs = list(flat)
            with keras_scope.SymbolicScope(), self, blocks_replaced(model, names, self._on_call):
                self.results = model(tree.pack_sequence_as(inputs, list(flat)), training=training)

        self.graph = tf.function(run, autograph=False).get_concrete_function(*specs).graph
        self.known = dict(zip((x.name for x in self.inputs), tree.flatten(inputs), strict=True))

    def get_current_value(self, variable: keras.Variable) -> Any:
        self._note(variable)
        known = super().get_current_value(variable)
        if known is None and id(variable) not in self.symbols:
            with self.inputs[0].graph.as_default():
                self.symbols[id(variable)] = (variable, tf.compat.v1.placeholder(variable.dtype, variable.shape))
        return self.symbols[id(variable)][1] if known is None else known

    def add_update(self, update: Any) -> None:
        self._note(update[0])
        super().add_update(update)

    def _note(self, variable: keras.Variable) -> None:
        """Notes that the part that is run reads `variable`, or assigns to it."""
        if not self._is_in_block:
            self.reads[-1][id(variable)] = variable

    def _on_call(self, block: keras.layers.Layer, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        with temporary.attributes(self, _is_in_block=True):
            made = block(*args, **kwargs)
        outputs = tree.map_structure(_symbol_like, made)
        self.calls.append(_Call(block, args, kwargs, outputs))
        self.reads.append({})
        return outputs

    def arguments(self, part: int) -> list[Any]:
        """Returns the results of a part, flat: what the next block is called on, or what the model returns."""
        if part == len(self.calls):
            return tree.flatten(self.results)
        return tree.flatten((self.calls[part].args, self.calls[part].kwargs))


class _Absent(keras.StatelessScope):
    """A scope of code before a part: nothing is assigned, and variables that the part does not need are zeros."""

    def __init__(self, needed: set[int]):
        super().__init__(collect_losses=True, initialize_variables=False)
        self._needed = needed

    def get_current_value(self, variable: keras.Variable) -> Any:
        known = super().get_current_value(variable)
        if known is not None:
            return known
        if id(variable) in self._needed:
            return None if self.original_scope is None else self.original_scope.get_current_value(variable)
        return tf.zeros(variable.shape, variable.dtype)


def _symbol_like(x: Any) -> Any:
    """Returns a new symbol for what a block returned, with a mask where that bears one."""
    if not tf.is_tensor(x):
        return x
    symbol = tf.compat.v1.placeholder(x.dtype, x.shape)
    mask = getattr(x, "_keras_mask", None)
    if mask is not None:
        symbol._keras_mask = tf.compat.v1.placeholder(mask.dtype, mask.shape)
    return symbol


class _Part(keras.layers.Layer):
    """Runs a model's `call` from one block's call to the next one, on the model's inputs and what blocks before have returned."""

    def __init__(
        self,
        watch: _Watch,
        number: int,
        *,
        needs: Sequence[tuple[int, int]],  # (call, place) of the blocks' outputs that are given, after the model's inputs
        own: dict[int, keras.Variable],
        early: set[int],  # variables that code before the part reads, and the part depends on
        wanted: Sequence[int],  # places of the results that it returns
    ):
        super().__init__(name=f"{watch.model.name}_part_{number}", autocast=False)
        self._convert_input_args = False
        self.supports_masking = True
        self._watch, self._number = watch, number
        self._needs, self._own, self._early, self._wanted = needs, own, early, wanted
        self._losses_of_part: list[Any] = []
        self.built = True

    @property
    def variables(self) -> list[keras.Variable]:
        return list(self._own.values())

    weights = variables

    def compute_mask(self, *args: Any, **kwargs: Any) -> None:
        """Returns no mask: layers of the part put theirs on what they return."""

    def compute_output_spec(self, given: Any, training: bool | None = None) -> list[keras.KerasTensor]:
        del given, training
        results = self._watch.arguments(self._number)
        return [keras.KerasTensor(results[place].shape, results[place].dtype) for place in self._wanted]

    def call(self, given: Sequence[Any], training: bool | None = None) -> list[Any]:
        watch, model, count = self._watch, self._watch.model, len(self._watch.inputs)
        known = dict(zip(self._needs, given[count:], strict=True))
        rows = tf.shape(given[0])[0]
        before, position, others = contextlib.ExitStack(), 0, set(map(id, added_losses(model)))

        def on_call(block: keras.layers.Layer, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
            nonlocal position
            del block
            if position == self._number:
                raise Reached((args, kwargs))
            symbols = tree.flatten(watch.calls[position].outputs)
            flat = [known.get((position, place), _zeros_like(symbol, rows)) for place, symbol in enumerate(symbols)]
            position += 1
            if position == self._number:
                before.close()
            return tree.pack_sequence_as(watch.calls[position - 1].outputs, flat)

        try:
            with before, blocks_replaced(model, watch.names, on_call):
                if self._number:
                    before.enter_context(_Absent(self._early))
                made = tree.flatten(model(tree.pack_sequence_as(watch.given, list(given[:count])), training=training))
        except Reached as reached:
            made = tree.flatten(reached.arguments)
        self._losses_of_part = [loss for loss in added_losses(model) if id(loss) not in others]
        for layer in model._flatten_layers():  # they are taken off the layers that added them
            layer._losses[:] = [loss for loss in layer._losses if id(loss) in others]
        return [made[place] for place in self._wanted]

    def _get_own_losses(self) -> list[Any]:
        return self._losses_of_part


def graph_of_blocks(model: keras.Model, names: Sequence[str], inputs: Any) -> keras.Model:
    """Returns a functional model of the same layers, which computes what a subclassed `model` computes of `inputs`.

    Args:
        model: a model whose layers are built.
        names: the attributes that hold its blocks (see `blocks_replaced`).
        inputs: symbolic Keras tensors, in the structure that the model takes.

    Raises:
        NotImplementedError: `call` calls its blocks otherwise when it trains, or draws before a block what is used after it.
        ValueError: `names` name no blocks, or blocks that the model does not call.
    """
    watches = [_Watch(model, names, inputs, training) for training in (True, False)]
    _check_calls(*watches)
    watch = watches[0]
    for number, call in enumerate(watch.calls):
        _add_part(number, watches)
        arguments = [watch.known.get(_name(x), x) for x in watch.arguments(number)]
        args, kwargs = tree.pack_sequence_as((call.args, call.kwargs), arguments)
        kwargs.pop("training", None)  # which a stage says
        made = tree.flatten(call.block(*args, **kwargs))
        for one in watches:
            symbols = tree.flatten(one.calls[number].outputs)
            one.known.update((x.name, new) for x, new in zip(symbols, made, strict=True) if tf.is_tensor(x))
    _add_part(len(watch.calls), watches)
    results = [watch.known[x.name] for x in tree.flatten(watch.results)]
    return keras.Model(inputs, tree.pack_sequence_as(watch.results, results), name=f"{model.name}_of_blocks")


def _add_part(number: int, watches: Sequence[_Watch]) -> None:
    """Adds the part that ends at call `number`, if something that the call takes is not known yet."""
    model, inputs = watches[0].model, watches[0].given
    results = [watch.arguments(number) for watch in watches]
    new = [place for place, x in enumerate(results[0]) if _name(x) and _name(x) not in watches[0].known]
    own = {key: variable for watch in watches for key, variable in watch.reads[number].items()}
    if not new and not own:
        return
    needed: set[tuple[int, int]] = set()
    early: dict[int, keras.Variable] = {}
    for watch, result in zip(watches, results, strict=True):
        found = tape.ancestors([result[place] for place in new], watch.graph.get_operations(), by_control=False)
        before = {key for reads in watch.reads[:number] for key in reads}
        early.update((key, v) for key, (v, symbol) in watch.symbols.items() if key in before and symbol.op in found)
        for index, call in enumerate(watch.calls[:number]):
            for place, symbol in enumerate(tree.flatten(call.outputs)):
                if any(tf.is_tensor(x) and x.op in found for x in (symbol, getattr(symbol, "_keras_mask", None))):
                    needed.add((index, place))
    drawn = [variable.path for variable in early.values() if not variable.dtype.startswith(("float", "bfloat"))]
    if drawn:
        raise errors.not_implemented(
            f"{type(model).__name__} uses after a block what it has drawn at random, or counted, before another one; its stages "
            "would draw it twice.",
            variables=drawn,
            fix="Let a layer of the block draw it, or make the model a graph of layers (`keras.Model(inputs, outputs)`).",
        )
    needs = sorted(needed)
    part = _Part(watches[0], number, needs=needs, own={**early, **own}, early=set(early), wanted=new)
    of_blocks = [tree.flatten(watches[0].calls[index].outputs)[place] for index, place in needs]
    made_here = part([*tree.flatten(inputs), *(watches[0].known[x.name] for x in of_blocks)])
    for watch, result in zip(watches, results, strict=True):
        watch.known.update((_name(result[place]), x) for place, x in zip(new, made_here, strict=True))


def _check_calls(training: _Watch, inference: _Watch) -> None:
    """Raises if the model does not call all its blocks, in training as in inference."""
    model, names = training.model, training.names
    called = [call.block for call in training.calls]
    missed = [block.name for block in blocks_of(model, names) if block not in called]
    if missed:
        raise errors.value_error(
            f"`blocks` must be layers that {type(model).__name__} calls, by way of their list.",
            blocks=list(names),
            not_called=missed,
        )
    alike = called == [call.block for call in inference.calls] and all(
        len(training.arguments(number)) == len(inference.arguments(number)) for number in range(len(called) + 1)
    )
    fixed = [call.block.name for call in training.calls if call.kwargs.get("training") is False]
    if not alike or fixed:
        raise errors.not_implemented(
            f"{type(model).__name__} must call its blocks alike when it trains and when it does not, with the `training` that it "
            "was called with.",
            fix="Let the blocks look at `training` themselves.",
            **({"called_with_training_False": fixed} if fixed else {}),
        )


def _name(x: Any) -> str:
    """Returns the name of a symbol of a watching graph; "" for anything else."""
    return x.name if tf.is_tensor(x) and tf.is_symbolic_tensor(x) else ""


def _zeros_like(symbol: Any, rows: tf.Tensor) -> Any:
    """Returns zeros in the place of what a block returned, which nothing that counts depends on."""
    if not tf.is_tensor(symbol):
        return symbol
    sizes = [1 if size is None else size for size in symbol.shape]
    zeros = tf.zeros([rows, *sizes[1:]] if symbol.shape.rank else [], symbol.dtype)
    return tf.ensure_shape(zeros, symbol.shape)
