"""What has to happen in this process before tfdist is used, and not when it is imported.

A package above says what (`before_first_use`), and what may be used first, without a strategy, says when (`begin_use`): a
tensor-parallel layer in a plain Keras model, or a pipeline in one place.
"""

from collections.abc import Callable

_actions: list[Callable[[], None]] = []


def before_first_use(action: Callable[[], None]) -> None:
    """Has `action`, which does nothing when called again, called by every `begin_use`."""
    _actions.append(action)


def begin_use() -> None:
    """Calls what `before_first_use` was given: tfdist is used from now on."""
    for action in _actions:
        action()
