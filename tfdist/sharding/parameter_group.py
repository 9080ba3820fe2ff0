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

    def group_for(self, variable_name: str) -> ParameterGroup:
        """Returns the group that a variable made right now belongs to."""
        layer = keras_scope.current_layer()
        if layer is None:
            return ParameterGroup(variable_name)
        if layer not in self._by_layer:
            self._by_layer[layer] = ParameterGroup(getattr(layer, "name", variable_name))
        return self._by_layer[layer]
