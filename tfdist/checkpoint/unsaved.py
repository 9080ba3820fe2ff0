"""State that no backup has, so that a run that goes on begins it anew: a warning, once, with the first such backup."""

from typing import Any

from tfdist import errors
from tfdist.checkpoint.extra_state import optimizers_of
from tfdist.checkpoint.writing_role import tfdist_strategy


def note_optimizers(model: Any) -> None:
    """Notes how far the optimizers of the strategy of `model` are: what moves on from here trains in this `fit`."""
    known = _known_optimizers(model)
    for optimizer in known:
        known[optimizer] = int(optimizer.iterations)


def tell_what_is_not_saved(model: Any) -> None:
    """Warns of what a run does not find again when it goes on from a backup of `model`; once of each."""
    extended = getattr(tfdist_strategy(model), "extended", None)
    if getattr(extended, "draws_unsaved", False):
        extended.draws_unsaved = False
        errors.warn(
            "A step draws from TensorFlow's stateful random operations (`tf.random.normal`, `tf.nn.dropout`, ...), whose state "
            "no backup has: a run that goes on from it draws again what it has drawn before. `keras.random` with a "
            "`keras.random.SeedGenerator` of a layer goes on where it was."
        )
    names = _unsaved_optimizers(model)
    if names:
        errors.warn(
            f"The state of the optimizer {' and '.join(names)} is in no backup, and begins anew in a run that goes on from it: "
            f"it trains {model.name!r}, and is no part of it. Make it an attribute of the model before `fit`: "
            "`model.second_optimizer = optimizer`."
        )


def _unsaved_optimizers(model: Any) -> list[str]:
    """Returns the names of the optimizers that have trained `model` since they were noted, and that it does not have; once."""
    known = _known_optimizers(model)
    parts = {id(optimizer) for optimizer in optimizers_of(model)} if known else set()
    variables = {id(variable) for variable in model.variables}
    found = [
        optimizer
        for optimizer, noted in known.items()
        if id(optimizer) not in parts
        and any(id(variable) in variables for variable in optimizer._trainable_variables)
        and int(optimizer.iterations) > noted
    ]
    for optimizer in found:
        del known[optimizer]
    within = {id(part) for one in found for part in (getattr(one, "inner_optimizer", None), *getattr(one, "optimizers", ()))}
    return [f"{one.name!r} ({type(one).__name__})" for one in found if id(one) not in within]


def _known_optimizers(model: Any) -> Any:
    """Returns those that were built for variables of the strategy of `model`, and their iterations when they were noted."""
    return getattr(getattr(tfdist_strategy(model), "extended", None), "optimizers", {})
