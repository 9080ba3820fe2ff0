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

    def enter(self, variable: Any) -> ParameterGroup | None:
        """Puts a new variable in the group of the layer that is being built and returns it.

        None when no layer is: Keras makes the variables of a lazily built model after it has left the layers, and then the
        group is found at the first read, by `adopt`.
        """
        layer = keras_scope.current_layer()
        return None if layer is None else self._add(layer, variable)

    def adopt(self, variable: Any) -> ParameterGroup:
        """Returns a group for a variable that has none: with the other variables of the layer being called, or its own."""
        layer = keras_scope.current_layer()
        own = [] if layer is None else keras_scope.own_variables(layer)
        if not any(member is variable for member in own):
            group = ParameterGroup(variable.name.partition("/")[0])
            group.add(variable)
            return group
        for member in own:
            if getattr(member, "is_parameter", False) and member.group is None:
                member.group = self._add(layer, member)
        return variable.group

    def _add(self, layer: Any, variable: Any) -> ParameterGroup:
        if layer not in self._by_layer:
            self._by_layer[layer] = ParameterGroup(getattr(layer, "name", type(layer).__name__))
        self._by_layer[layer].add(variable)
        return self._by_layer[layer]
