"""The unit of gathering: the variables of a Keras layer, or of several small ones of one model."""

import dataclasses
import itertools
import weakref
from collections.abc import Collection, Iterable, Mapping, Sequence
from typing import Any, TypeVar

from tfdist.sharding import keras_scope

Key = TypeVar("Key")


@dataclasses.dataclass(eq=False)
class ParameterGroup:
    """Variables that are gathered in one message, because they are used together: those of a Keras layer, or of small neighbours.

    What a group holds is fixed when it is made. The group is packed for transport only; each variable is stored, loaded, frozen
    and updated on its own.
    """

    name: str
    variables: Sequence[Any]


class ParameterGroups:
    """The parameter groups of one trace of a step: what the first rank reads fixes them for the others.

    Small layers of one model share a group, in the order in which they were made, so that a message carries more than a bias:
    layers are added while the group holds at most `group_bytes`. A larger layer has a group of its own. The model is the
    outermost layer that is being called: no group spans two models that are called one beside the other, and a layer that both
    have is in a group of each. A parameter that is read while nothing is called (for a penalty on weights) is in the group it was
    last read with, or in its layer's.

    Groups follow from what the model is made of when the step is traced, and not from what else lives or has lived: workers that
    trace the same step make the same groups.

    Args:
        group_bytes: the size to aim at, in bytes of full (local) parameters; 0: one layer each.
    """

    def __init__(self, group_bytes: int):
        self._group_bytes = group_bytes
        self._called: list[Any] = []  # the models: nothing else is given their ids while the trace lasts
        self._by_model: dict[int, dict[int, ParameterGroup]] = {}  # by the ids of the model and of the variable
        self._latest: dict[int, ParameterGroup] = {}  # by id of the variable

    def group_of(self, variable: Any) -> ParameterGroup:
        """Returns what `variable` is gathered with where it is read now."""
        model = keras_scope.outermost_layer()
        groups = self._latest if model is None else self._by_model.setdefault(id(model), {})
        if id(variable) not in groups:
            self._called.append(model)
            group = self._new_group(variable, _layers_of(model), groups)
            groups.update((id(member), group) for member in group.variables)
        self._latest[id(variable)] = groups[id(variable)]
        return groups[id(variable)]

    def _new_group(self, variable: Any, layers: Sequence[Any], grouped: dict[int, ParameterGroup]) -> ParameterGroup:
        """Returns the group of a variable that is in none of `grouped`: its layer's, with those of `layers` made next."""
        layer = _owner(variable, layers)
        if layer is None:
            return ParameterGroup(variable.name.partition("/")[0], [variable])
        following = itertools.islice(itertools.dropwhile(lambda known: known is not layer, layers), 1, None)
        parameters = [(one, {id(member): member for member in _parameters(one)}) for one in (layer, *following)]
        sizes = [(one, {key: v.layout.local_elements * v.dtype.size for key, v in own.items()}) for one, own in parameters]
        known = {key: member for _, own in parameters for key, member in own.items()}
        members = [known[key] for key in gathered_together(sizes, grouped, self._group_bytes)]
        return ParameterGroup(getattr(layer, "name", type(layer).__name__), members)


def gathered_together(layers: Iterable[tuple[Any, Mapping[Key, int]]], grouped: Collection[Key], group_bytes: int) -> list[Key]:
    """Returns the keys of the first layer's parameters, and of those of small layers after it, that are not `grouped` yet.

    Args:
        layers: layers of a model, in the order in which they made their first parameters, each with the bytes of its own.
        grouped: the keys of parameters that have a group.
        group_bytes: as of `ParameterGroups`.
    """
    members: dict[Key, None] = {}
    filled, dtypes = 0, set()
    for layer, sizes in layers:
        more = dict.fromkeys(key for key in sizes if key not in grouped)
        filled += sum(sizes.values())
        dtypes.add(getattr(layer, "compute_dtype", None))  # a group is gathered once for each dtype in which it is read
        if members and (filled > group_bytes or not more or len(dtypes) > 1):
            break
        members |= more
    return list(members)


def _layers_of(model: Any | None) -> list[Any]:
    """Returns the layers within `model` that have parameters of their own, in the order in which they made the first."""
    numbered = [([v.number for v in _parameters(layer)], layer) for layer in keras_scope.layers_within(model)]
    return [layer for numbers, layer in sorted(((n, x) for n, x in numbered if n), key=lambda entry: min(entry[0]))]


def _owner(variable: Any, layers: Sequence[Any]) -> Any | None:
    """Returns the layer that owns `variable`: one of `layers`, or the one being called, or the one that made it, or None.

    A layer may read another's weights, it may be hidden from its model, and Keras makes the variables of a lazily built model
    after it has left the layers.
    """
    for layer in (*layers, keras_scope.current_layer(), variable.maker()):
        if layer is not None and any(member is variable for member in _parameters(layer)):
            return layer
    return None


def _parameters(layer: Any) -> list[Any]:
    """Returns the parameters of `layer`, and notes on each what its layer knows of it."""
    found = []
    for member, keras_variable, is_autocast in keras_scope.own_variables(layer):
        if getattr(member, "is_parameter", False):
            member.is_autocast, member.keras_variable = is_autocast, weakref.ref(keras_variable)
            found.append(member)
    return found
