"""Common to the strategies: settings, each a keyword argument of a strategy, and the questions that a user can ask them."""

import contextlib
import dataclasses
import inspect
from typing import Any

import tensorflow as tf

from tfdist.collectives import CollectivePlan
from tfdist.mesh import DeviceMesh
from tfdist.sharding import MeshConfig, ShardingConfig, sharded_parameters, with_settings_listed


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

    def barrier(self, name: str) -> None:
        """Waits until every worker has called it with `name`; returns at once in a job of one worker.

        Raises:
            RuntimeError: a worker has failed, or has not come within the step timeout or an hour, whichever is longer.
        """
        self.share(name, "")

    def share(self, name: str, value: str) -> str:
        """Returns the chief's `value` on every worker; all workers call it with the same `name`.

        Raises:
            RuntimeError: as `barrier`.
        """
        return value

    def from_chief(self, value: Any) -> Any:
        """Returns the chief's `value` on every worker; all workers call it at the same place, the others with any value.

            weights = strategy.from_chief(drawn_weights())   # without a seed each worker would draw its own
            model.set_weights(weights)

        Args:
            value: what can be pickled: an array, a list of them, a vocabulary, a number.

        Raises:
            RuntimeError: as `barrier`.

        Source: Horovod's `broadcast_object`, `torch.distributed.broadcast_object_list`.
        """
        return value

    @property
    def last_plan(self) -> CollectivePlan | None:
        """The collectives of the step that was traced last, per rank; None before the first."""
        return self.extended.last_plan

    def gathered(self, *what: Any) -> contextlib.AbstractContextManager[None]:
        """Keeps weights whole on the first device of each worker while a block runs, for many eager calls in a row.

            with strategy.gathered(model):
                for _ in range(100):
                    tokens = next_tokens(model(tokens))  # weights are put together once, not at every call

        Outside replicas a model at stage 3 (or one that is sharded over the tensor axis) puts each weight together when it is
        read. In one process up to `kept_bytes` of them stay, without this block; over several workers, where to put a weight
        together is a message of all of them, none do. In the block all of `what` do. It costs the memory of these weights on
        each worker's first device, and gives it back at the end. A weight that changes in the block is put together again when
        it is read next.

        The mistake to avoid: entering it on one worker. All workers enter it, and call the model, as they do without it.

        Args:
            what: models, layers or variables.

        Source: FSDP's `summon_full_params`, without writing back: weights are assigned as always.
        """
        return self.extended.weight_cache.gathered(sharded_parameters(what))
