"""One way to train a model on so many devices: the settings that a plan chooses among."""

import dataclasses
import json
from typing import Any

from tfdist import errors
from tfdist.sharding import placements_of

_SIZES = ("data", "tensor", "pipeline", "microbatches", "stages_per_rank")


@dataclasses.dataclass(frozen=True)
class Candidate:
    """The sizes of the mesh and the settings of a strategy, of a pipeline and of recomputation.

    Attributes:
        zero_stage: 0, 1, 2 or 3.
        data: how many replicas the batch is divided over.
        tensor: how many ranks share each sharded layer, as `tfdist.suggest_plan` says.
        pipeline: how many ranks share the layers.
        schedule: that of the pipeline, such as "1f1b"; None without one.
        microbatches: how many a replica's batch is split in; 1 without a pipeline.
        recompute: whether the model's blocks, or with a pipeline its stages, are computed again in backward.
        sharding_group_size: how many neighbouring replicas share one copy of the state; None: all of them.
        gradient_compression: how gradients travel, such as "int8"; None: exactly.
        parameter_compression: how parameters travel, such as "int8": gathered at stage 3, updated at stages 1 and 2, where
            each rank keeps exact shards besides; None: exactly.
        stages_per_rank: how many stages each rank of a pipeline has: several with the schedule "interleaved", else 1.

    Raises:
        ValueError: a size is not a positive integer; there is no such stage; a schedule or microbatches without a pipeline, or a
            pipeline without a schedule; several stages a rank with another schedule than "interleaved".
    """

    zero_stage: int = 2
    data: int = 1
    tensor: int = 1
    pipeline: int = 1
    schedule: str | None = None
    microbatches: int = 1
    recompute: bool = False
    sharding_group_size: int | None = None
    gradient_compression: str | None = None
    parameter_compression: str | None = None
    stages_per_rank: int = 1

    def __post_init__(self) -> None:
        placements_of(self.zero_stage)
        for name in _SIZES:
            errors.check_integer(name, getattr(self, name), 1)
        if (self.schedule is None) != (self.pipeline == 1):
            raise errors.value_error(
                "`schedule` must be given if there is a pipeline, and only then.",
                schedule=self.schedule,
                pipeline=self.pipeline,
            )
        if self.microbatches > 1 and self.pipeline == 1:
            raise errors.value_error(
                "`microbatches` are those of a pipeline.",
                microbatches=self.microbatches,
                pipeline=self.pipeline,
                fix="Leave them 1.",
            )
        if (self.schedule == "interleaved") != (self.stages_per_rank > 1):
            raise errors.value_error(
                '`stages_per_rank` must be at least 2 with the schedule "interleaved", and 1 with every other.',
                schedule=self.schedule,
                stages_per_rank=self.stages_per_rank,
            )
        group = self.sharding_group_size
        if group is not None and (group < 1 or self.data % group):
            raise errors.value_error("`sharding_group_size` must divide the replicas.", sharding_group_size=group, data=self.data)

    @property
    def devices(self) -> int:
        """How many devices it takes."""
        return self.data * self.tensor * self.pipeline

    @property
    def stages(self) -> int:
        """In how many stages the model is cut."""
        return self.pipeline * self.stages_per_rank

    @property
    def shards(self) -> int:
        """In how many shards what a ZeRO stage shards is cut."""
        return self.sharding_group_size or self.data

    def settings(self) -> dict[str, Any]:
        """Returns the settings of the strategy, by their names in `tfdist.ShardingConfig`, without those that it leaves open."""
        settings = {
            "zero_stage": self.zero_stage,
            "tensor_parallel_size": self.tensor if self.tensor > 1 else None,
            "pipeline_parallel_size": self.pipeline if self.pipeline > 1 else None,
            "sharding_group_size": self.sharding_group_size,
            "gradient_compression": self.gradient_compression,
            "parameter_compression": self.parameter_compression,
        }
        return {name: value for name, value in settings.items() if value is not None}

    def name(self) -> str:
        """Returns it in words, such as "zero 3, tensor 8, recompute"."""
        stages = f" of {self.stages} stages" if self.stages_per_rank > 1 else ""
        words = {
            f"zero {self.zero_stage}": True,
            f"groups of {self.sharding_group_size}": self.sharding_group_size not in (None, self.data),
            f"tensor {self.tensor}": self.tensor > 1,
            f"pipeline {self.pipeline} {self.schedule} x {self.microbatches}{stages}": self.pipeline > 1,
            "recompute": self.recompute,
            f"{self.gradient_compression} gradients": self.gradient_compression,
            f"{self.parameter_compression} parameters": self.parameter_compression,
        }
        return ", ".join(text for text, is_so in words.items() if is_so)

    def python(self, *, hosts: int = 1, blocks: str = "block") -> str:
        """Returns the lines of Python that train the model of `build` so.

        Args:
            hosts: on how many machines the devices are; more than one take a process each.
            blocks: the regular expression of the layers to recompute.
        """
        given = ", ".join(f"{name}={json.dumps(value)}" for name, value in self.settings().items())
        lines = [
            f"strategy = tfdist.{'ShardedStrategy' if hosts == 1 else 'MultiWorkerShardedStrategy'}({given})",
            "with strategy.scope():",
            f"    model = {'build()' if self.tensor > 1 or self.pipeline == 1 else self._pipelined('build()')}",
        ]
        if self.tensor > 1:
            lines.append(f"    tfdist.parallelize(model, tfdist.suggest_plan(model, {self.tensor}))")
        if self.tensor > 1 and self.pipeline > 1:
            lines.append(f"    model = {self._pipelined('model')}")
        if self.recompute and self.pipeline == 1:
            lines.append(f"    tfdist.recompute(model, {json.dumps(blocks)})")
        return "\n".join(lines)

    def _pipelined(self, model: str) -> str:
        settings = f"num_microbatches={self.microbatches}, schedule={json.dumps(self.schedule)}"
        settings += f", stages_per_rank={self.stages_per_rank}" if self.stages_per_rank > 1 else ""
        return f"tfdist.PipelineModel({model}, {settings}{', recompute=True' if self.recompute else ''})"
