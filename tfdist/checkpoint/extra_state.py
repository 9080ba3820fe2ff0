"""The state of a run beyond Keras's weights file, which it needs to go on as if it had never stopped.

Keras saves what its walk over a model finds: the variables that layers store, and the optimizer's. It leaves out

    the states of seed generators       those of layers, and the one that `keras.random` draws from without a seed
    what a layer stores otherwise       kernels that are saved with their LoRA factors added to them, what is an asset
    variables that are TensorFlow's     `tf.Variable`, `tf.random.Generator`
    summands                            of a gradient that is accumulated over steps the file has the sum over ranks
    the states of metrics               of the epoch that is running

`extra_state` reads these, and `restore_extra_state` puts them back when the weights are loaded. Metrics are read and put back by
themselves (`metrics_state`), since `fit` empties them when an epoch begins. What is a rank's own comes back to that rank.

A state is a dictionary of arrays; its names are the same in every run of one program. All workers call these functions at once;
they raise ValueError for a state of another model.

Keras's walk and `_iterations`, `_trainable_variables`, `_value` are private to Keras:
tests/checkpoint/test_private_names_of_saving.py fails when they change.
"""

from collections.abc import Iterable, Iterator
from typing import Any

import keras
import numpy as np
import tensorflow as tf
from keras.src.saving import saving_lib
from keras.src.saving.keras_saveable import KerasSaveable

from tfdist import errors
from tfdist.checkpoint.discarding import DiscardingStore
from tfdist.checkpoint.saving import read_state
from tfdist.sharding import PartialSyncOnReadVariable
from tfdist.sharding.keras_scope import global_generator, set_global_generator
from tfdist.sharding.rank_values import assign_rank_values, holds_summands, rank_values, whole_of
from tfdist.sharding.separate_thread import in_separate_thread

State = dict[str, np.ndarray]

# What stands after the name of a variable of which each rank's value is stored.
_COPIES, _SUMMANDS = "/copies", "/summands"
_SMALL = 1024  # elements: what is smaller is read together, in one message a dtype


def extra_state(model: Any) -> State:
    """Returns what Keras's weights file lacks of `model`, without the states of metrics."""
    saved = _saved_by_keras(model)
    return _read({name: variable for name, variable in _variables(model).items() if id(variable) not in saved})


def restore_extra_state(model: Any, state: State) -> None:
    """Puts back what `extra_state` has returned, in this process or another; the weights have been loaded."""
    if global_generator() is None and any(name.startswith("keras.random/") for name in state):
        set_global_generator(in_separate_thread(lambda: keras.random.SeedGenerator(0)))
    _assign(_variables(model), state)


def metrics_state(model: Any) -> State:
    """Returns the states of the metrics of `model`, the loss among them."""
    return _read(_numbered("metrics", model.metrics_variables))


def restore_metrics_state(model: Any, state: State) -> None:
    """Puts back what `metrics_state` has returned; the metrics are built."""
    _assign(_numbered("metrics", model.metrics_variables), state)


def trained_variables(model: Any) -> list[list[int]]:
    """Returns what `build_optimizers` needs: for each optimizer of `model` the numbers of the variables that it trains; none of
    one that is not built, or trains other variables than the model's."""
    numbers = {id(variable): number for number, variable in enumerate(model.variables)}
    trained = [[numbers.get(id(variable)) for variable in optimizer._trainable_variables] for optimizer in optimizers_of(model)]
    return [[] if None in of_one else of_one for of_one in trained]


def build_optimizers(model: Any, trained: list[list[int]]) -> None:
    """Builds the optimizers of `model` for the variables that they have trained: Keras loads no state into one that is not built,
    and builds `model.optimizer` alone."""
    optimizers, variables = optimizers_of(model), model.variables
    if len(optimizers) != len(trained) or any(number >= len(variables) for of_one in trained for number in of_one):
        raise errors.value_error(
            f"The state to restore is that of another model: it has {len(trained)} optimizers, and the model has "
            f"{len(optimizers)}, of {len(variables)} variables.",
            fix="Restore it into the model, compiled as it was, that it was taken of.",
        )
    for optimizer, numbers in zip(optimizers, trained, strict=True):
        if numbers and not optimizer.built:
            optimizer.build([variables[number] for number in numbers])


# Which


def _variables(model: Any) -> dict[str, Any]:
    """Returns the variables, of Keras or TensorFlow, of a model, of its optimizers, and of what it draws from; no metrics'."""
    found = _numbered("model", model.variables)
    parts = list(tf.train.TrackableView(model).descendants())
    for number, optimizer in enumerate(optimizers_of(model)):
        found |= _numbered(f"optimizer_{number}", optimizer.variables)
    of_keras = {id(variable._value) for variable in [*found.values(), *model.metrics_variables]}
    kinds = tf.Variable | tf.distribute.DistributedValues
    found |= _numbered("tensorflow", [part for part in parts if isinstance(part, kinds) and id(part) not in of_keras])
    generator = global_generator()
    return found if generator is None else found | _numbered("keras.random", [generator.state])


def optimizers_of(model: Any) -> list[Any]:
    """Returns the optimizers of a model, those that Keras alone sees, as in a list, and those within them."""
    parts = [*tf.train.TrackableView(model).descendants(), *_saveables(model, set())]
    found = list({id(part): part for part in parts if isinstance(part, keras.optimizers.Optimizer)}.values())
    for optimizer in found:  # grows: TensorFlow does not see those in a `MultiOptimizer`
        found += [one for one in getattr(optimizer, "optimizers", ()) if one not in found]
    return found


def _saveables(part: Any, seen: set[int]) -> Iterator[Any]:
    """Yields what Keras's walk over a model finds, in its order."""
    if id(part) in seen:
        return
    seen.add(id(part))
    if isinstance(part, KerasSaveable):
        yield part
        children = [child for _, child in saving_lib._walk_saveable(part)]
    else:
        children = list(part.values() if isinstance(part, dict) else part)
    for child in children:
        if isinstance(child, KerasSaveable | list | dict | tuple):
            yield from _saveables(child, seen)


def _numbered(group: str, variables: Iterable[Any]) -> dict[str, Any]:
    return {f"{group}/{number}": variable for number, variable in enumerate(variables)}


class _Recorder(DiscardingStore):
    """Takes what Keras would save, and keeps which variables are stored as they are."""

    def __init__(self) -> None:
        super().__init__()
        self.saved: set[int] = set()

    def __setitem__(self, key: str, value: Any) -> None:
        if isinstance(value, keras.Variable):
            self.saved.add(id(value))
            value = np.zeros([0])  # not read
        super().__setitem__(key, value)


def _saved_by_keras(model: Any) -> set[int]:
    """Returns the ids of the variables that come back from Keras's weights file as they are on every rank."""
    optimizers = optimizers_of(model)
    store = _Recorder()
    read_state(model, store, skipped=optimizers)  # which read their variables to save them, and save them all
    saved = store.saved | {id(variable) for optimizer in optimizers for variable in optimizer.variables}
    for optimizer in optimizers:
        # Between two updates each rank holds a sum of its own; after an update it is empty.
        steps = optimizer.gradient_accumulation_steps
        if steps and int(optimizer._iterations) % steps:
            saved -= {id(variable) for variable in optimizer.variables if holds_summands(variable._value)}
    return saved


# Reading and assigning


def _read(variables: dict[str, Any]) -> State:
    state: State = {}
    small: dict[tuple[Any, str], dict[str, Any]] = {}  # by dtype and kind
    for name, variable in variables.items():
        value = getattr(variable, "_value", variable)
        kind = _kind(value)
        if value is None:  # of a layer that is in no stage of a pipeline
            continue
        if not kind:
            state[name] = keras.ops.convert_to_numpy(variable)
        elif value.layout.num_elements <= _SMALL:
            small.setdefault((value.dtype, kind), {})[name] = value
        else:
            (state[name + kind],) = rank_values([value])
    for (_, kind), found in small.items():
        for name, values in zip(found, rank_values(list(found.values())), strict=True):
            state[name + kind] = values
    return state


def _kind(value: Any) -> str:
    """Returns how a variable of TensorFlow is stored: what ranks count is their own."""
    layout = getattr(value, "layout", None)
    if layout is None or layout.is_data_sharded or layout.is_tensor_sharded or layout.data_owner is not None:
        return ""
    if holds_summands(value):
        return _SUMMANDS
    return _COPIES if isinstance(value, PartialSyncOnReadVariable) or not value.dtype.is_floating else ""


def _assign(variables: dict[str, Any], state: State) -> None:
    for key, values in state.items():
        kind = next((kind for kind in (_COPIES, _SUMMANDS) if key.endswith(kind)), "")
        variable = variables.get(key.removesuffix(kind))
        shape = values.shape[1:] if kind else values.shape
        if variable is None or tuple(variable.shape) != shape:
            raise errors.value_error(
                "The state to restore is that of another model, or of other settings: "
                f"{key!r} is of shape {shape}, and the model has {'none' if variable is None else tuple(variable.shape)} there.",
                fix="Restore it into the model, compiled as it was, that it was taken of.",
            )
        value = getattr(variable, "_value", variable)
        if kind and hasattr(value, "layout"):
            if isinstance(value, PartialSyncOnReadVariable) and kind == _SUMMANDS:
                value.hold_summands()
            assign_rank_values(value, values)
        else:
            variable.assign(whole_of(values, kind == _SUMMANDS) if kind else values)
