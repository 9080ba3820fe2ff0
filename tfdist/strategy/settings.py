"""How the strategies take their settings: every field of `ShardingConfig` is a keyword argument of a strategy."""

from __future__ import annotations

import dataclasses
import inspect
from typing import Any

from tfdist.sharding import ShardingConfig, with_settings_listed


def takes_settings(strategy: Any) -> Any:
    """Class decorator: shows the settings in the signature of `strategy`, for its `**settings`, and in its docstring.

    The docstring must have a line `...: the settings`.
    """
    init = strategy.__init__
    found = inspect.signature(init)
    own = [parameter for parameter in found.parameters.values() if parameter.kind is not inspect.Parameter.VAR_KEYWORD]
    settings = [
        inspect.Parameter(field.name, inspect.Parameter.KEYWORD_ONLY, default=field.default, annotation=field.type)
        for field in dataclasses.fields(ShardingConfig)
    ]
    init.__signature__ = found.replace(parameters=[*own, *settings])
    return with_settings_listed(strategy)
