"""What the strategies share: their settings, each a keyword argument of a strategy, and what a user can ask them."""

from __future__ import annotations

import dataclasses
import inspect
from typing import Any

import tensorflow as tf

from tfdist.collectives import CollectivePlan
from tfdist.mesh import DeviceMesh
from tfdist.sharding import MeshConfig, ShardingConfig, with_settings_listed


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


class ShardedStrategyMixin:
    """The part of a tfdist strategy that does not depend on where its devices are."""

    _sharding_config: MeshConfig
    extended: tf.distribute.StrategyExtended

    @property
    def sharding_config(self) -> MeshConfig:
        """The settings, a `tfdist.ShardingConfig`, with the mesh of the devices."""
        return self._sharding_config

    @property
    def mesh(self) -> DeviceMesh:
        """The devices as a mesh (data, pipe, tensor)."""
        return self._sharding_config.mesh

    @property
    def zero_stage(self) -> int:
        return self._sharding_config.zero_stage

    @property
    def last_plan(self) -> CollectivePlan | None:
        """The collectives of the step that was traced last, per rank; None before the first."""
        return self.extended.last_plan
