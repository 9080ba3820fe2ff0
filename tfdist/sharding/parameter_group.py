"""The unit of gathering: the variables of a Keras layer, or of several small ones."""

from __future__ import annotations

import itertools
import weakref
from typing import Any

from tfdist.sharding import keras_scope


class ParameterGroup:
    """Variables that are gathered in one message, because they are used together: those of a Keras layer, or of small neighbours.

    The group is packed for transport only; each variable is stored, loaded, frozen and updated on its own. A variable that is
    not made by a Keras layer is a group of its own.
    """

    def __init__(self, name: str):
        self.name = name
        self._members: list[weakref.ref[Any]] = []

    def add(self, variable: Any) -> None:
        self._members.append(weakref.ref(variable))

    @property
    def variables(self) -> list[Any]:
        """The members that still exist, in the order in which they were made."""
        return [variable for variable in (member() for member in self._members) if variable is not None]


class ParameterGroups:
    """The parameter groups of one strategy.

    Small layers that were made one after the other share a group, so that a message carries more than a bias: layers are added
    while the group holds at most `group_bytes`. A larger layer has a group of its own.

    Args:
        group_bytes: the size to aim at, in bytes of full (local) parameters; 0: one layer each.
    """

    def __init__(self, group_bytes: int):
        self._group_bytes = group_bytes
        self._by_layer: weakref.WeakKeyDictionary[Any, ParameterGroup] = weakref.WeakKeyDictionary()
        self._layers: list[weakref.ref[Any]] = []  # in the order in which they made their first parameter

    def note_maker(self, layer: Any | None) -> None:
        """Notes that `layer` has made a parameter."""
        if layer is not None and not (self._layers and self._layers[-1]() is layer):
            self._layers.append(weakref.ref(layer))

    def adopt(self, variable: Any, maker: Any | None) -> ParameterGroup:
        """Returns the group of a variable that is read for the first time, and puts in it what is gathered with it.

        These are its layer's other variables, and those of the layers made next, as far as they fit. Its layer is the one being
        called, or `maker`, the one that was being built when the variable was made, whichever owns the variable: a layer may read
        another's weights, and Keras makes the variables of a lazily built model after it has left the layers. A variable that
        neither owns is a group of its own.
        """
        for layer in (keras_scope.current_layer(), maker):
            own = [] if layer is None else keras_scope.own_variables(layer)
            if any(member is variable for member, _, _ in own):
                self._add(layer, self._group_of(layer))  # again: it may have made more since
                return variable.group
        group = ParameterGroup(variable.name.partition("/")[0])
        group.add(variable)
        return group

    def _group_of(self, layer: Any) -> ParameterGroup:
        """Returns the group of `layer`, a new one with the layers made next where it has none."""
        if layer not in self._by_layer:
            group = ParameterGroup(getattr(layer, "name", type(layer).__name__))
            self._add(layer, group)
            filled = _bytes_of(layer)
            for following in self._made_after(layer):
                if self._by_layer.get(following) is group:
                    continue
                filled += _bytes_of(following)
                # A group is gathered once for each dtype in which it is read.
                alike = getattr(following, "compute_dtype", None) == getattr(layer, "compute_dtype", None)
                if filled > self._group_bytes or following in self._by_layer or not alike:
                    break
                self._add(following, group)
        return self._by_layer[layer]

    def _made_after(self, layer: Any) -> list[Any]:
        layers = [known for known in (reference() for reference in self._layers) if known is not None]
        self._layers = [weakref.ref(known) for known in layers]  # those that are gone are forgotten
        return list(itertools.dropwhile(lambda known: known is not layer, layers))[1:]

    def _add(self, layer: Any, group: ParameterGroup) -> None:
        """Puts the parameters of `layer` that have no group yet in `group`."""
        self._by_layer[layer] = group
        for member, keras_variable, is_autocast in keras_scope.own_variables(layer):
            if getattr(member, "is_parameter", False) and member.group is None:
                member.group = group
                member.is_autocast = is_autocast
                member.keras_variable = weakref.ref(keras_variable)
                group.add(member)


def _bytes_of(layer: Any) -> int:
    """Returns the bytes of what `layer` gathers."""
    own = [variable for variable, _, _ in keras_scope.own_variables(layer) if getattr(variable, "is_parameter", False)]
    return sum(variable.layout.local_elements * variable.dtype.size for variable in own)
