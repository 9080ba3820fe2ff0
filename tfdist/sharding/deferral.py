"""Weights that are not made where their layer is built: by an extension that knows later on which ranks they are wanted."""

from collections.abc import Callable
from typing import Any

import keras

from tfdist.extensible import Place
from tfdist.sharding.separate_thread import made_by


class NoDeferral:
    """Every weight is made where its layer is built."""

    def defer(self, variable: keras.Variable, initializer: Callable[..., Any]) -> bool:
        """Defers a variable that is being made, if it is to be made later; returns whether it did."""
        return False

    def stays_deferred(self, variable: keras.Variable) -> bool:
        """Whether a variable that Keras wants to make now is or gets deferred."""
        return False

    def make_to_assign(self, variable: keras.Variable) -> None:
        """Makes a deferred variable on every rank, since what is about to be assigned to it must be kept."""

    def is_deferred(self, variable: keras.Variable) -> bool:
        """Whether `variable` has no value yet because it was deferred."""
        return False

    def strategy_of(self, variable: keras.Variable) -> Any:
        """Returns the strategy under which a variable was made, or will be; None: under none that it tells."""
        return made_by(variable)


DEFERRAL: Place[NoDeferral] = Place(NoDeferral())
