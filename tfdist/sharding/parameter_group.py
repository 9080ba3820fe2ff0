"""The unit of gathering: the variables of one Keras layer."""

from __future__ import annotations

import weakref
from typing import Any

from tfdist.sharding import keras_scope


class ParameterGroup:
    """Variables that are gathered in one message, because they are used together: those of one Keras layer.

    The group is packed for transport only; each variable is stored, loaded, frozen and updated on its own. A variable that is
    not made by a Keras layer is a group of its own.
    """

    def __init__(self, name: str):
        self.name = name
        self._members: list[weakref.ref] = []

    def add(self, variable: Any) -> None:
        self._members.append(weakref.ref(variable))

    @property
    def variables(self) -> list[Any]:
        """The members that still exist, in the order in which they were made."""
        return [variable for variable in (member() for member in self._members) if variable is not None]


class ParameterGroups:
    """The parameter groups of one strategy, by the layer that owns them."""

    def __init__(self) -> None:
        self._by_layer: weakref.WeakKeyDictionary[Any, ParameterGroup] = weakref.WeakKeyDictionary()

    def adopt(self, variable: Any, maker: Any | None) -> ParameterGroup:
        """Returns the group of a variable that is read for the first time, and puts its layer's other variables in it.

        The layer is the one being called, or `maker`, the one that was being built when the variable was made, whichever owns the
        variable: a layer may read another's weights, and Keras makes the variables of a lazily built model after it has left the
        layers. A variable that neither owns is a group of its own.
        """
        for layer in (keras_scope.current_layer(), maker):
            own = [] if layer is None else keras_scope.own_variables(layer)
            if any(member is variable for member, _, _ in own):
                for member, keras_variable, is_autocast in own:
                    if getattr(member, "is_parameter", False) and member.group is None:
                        member.group = self._add(layer, member)
                        member.is_autocast = is_autocast
                        member.keras_variable = weakref.ref(keras_variable)
                return variable.group
        group = ParameterGroup(variable.name.partition("/")[0])
        group.add(variable)
        return group

    def _add(self, layer: Any, variable: Any) -> ParameterGroup:
        if layer not in self._by_layer:
            self._by_layer[layer] = ParameterGroup(getattr(layer, "name", type(layer).__name__))
        self._by_layer[layer].add(variable)
        return self._by_layer[layer]
