"""Replacing one of Keras's functions or methods by one that may call it, where Keras has no hook.

Every override looks at the strategy first and calls the original, untouched, for all but tfdist's.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

_INSTALLED = "_tfdist_override"


def override(name: str, *owners: Any) -> Callable[[Callable[..., Any]], Callable[..., Any]]:
    """Replaces `name` of each owner by `function(original, ...)`, once; the decorated function itself stays as it is.

    Args:
        name: the method or function.
        owners: the class, or the modules that export the one function under this name.
    """

    def install(function: Callable[..., Any]) -> Callable[..., Any]:
        for owner in owners:
            original = getattr(owner, name)
            if not hasattr(original, _INSTALLED):
                setattr(owner, name, _overriding(original, function))
        return function

    return install


def _overriding(original: Callable[..., Any], function: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(original)
    def overriding(*args: Any, **kwargs: Any) -> Any:
        return function(original, *args, **kwargs)

    setattr(overriding, _INSTALLED, original)
    return overriding
