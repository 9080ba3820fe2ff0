"""The unit of gathering: the variables of a Keras layer, or of several small ones of one model."""

from __future__ import annotations

import dataclasses
import itertools
import weakref
from collections.abc import Sequence
from typing import Any

from tfdist.sharding import keras_scope


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
    have is in a group of each. What is read while nothing is called (for a penalty on weights) is in the group it was last read
    with, or in its layer's.

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
        members, filled = _new_members(layer, grouped), _bytes_of(layer)
        for following in itertools.islice(itertools.dropwhile(lambda known: known is not layer, layers), 1, None):
            more = _new_members(following, grouped)
            filled += _bytes_of(following)
            # A group is gathered once for each dtype in which it is read.
            alike = getattr(following, "compute_dtype", None) == getattr(layer, "compute_dtype", None)
            if filled > self._group_bytes or not more or not alike:
                break
            members |= more
        return ParameterGroup(getattr(layer, "name", type(layer).__name__), list(members.values()))


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
    return [member for member, _, _ in keras_scope.own_variables(layer) if getattr(member, "is_parameter", False)]


def _new_members(layer: Any, grouped: dict[int, ParameterGroup]) -> dict[int, Any]:
    """Returns the parameters of `layer` that have no group yet, by id, and notes on each what its layer knows of it."""
    found = {}
    for member, keras_variable, is_autocast in keras_scope.own_variables(layer):
        if getattr(member, "is_parameter", False) and id(member) not in grouped:
            member.is_autocast = is_autocast
            member.keras_variable = weakref.ref(keras_variable)
            found[id(member)] = member
    return found


def _bytes_of(layer: Any) -> int:
    return sum(variable.layout.local_elements * variable.dtype.size for variable in _parameters(layer))
