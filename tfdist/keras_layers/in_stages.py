"""Models whose layers are on several ranks of the axis "pipe", each with some: what the core must know of them."""

import keras

from tfdist import errors
from tfdist.sharding import config_of


class InStages:
    """A `keras.Model` that trains its layers in stages.

    Its steps compute a rank's shares of the loss themselves. It is built on symbols before its first step: nothing builds it
    later.
    """


def check_is_in_stages(model: keras.Model) -> None:
    """Raises ValueError if `model` is to train under a strategy with a pipeline, and is not in stages."""
    strategy = model._distribute_strategy
    if config_of(strategy) is not None and strategy.mesh.pipeline_parallel_size > 1 and not isinstance(model, InStages):
        raise errors.value_error(
            "Under a strategy with a pipeline the model to train must be a `PipelineModel`.",
            model=type(model).__name__,
            pipeline_parallel_size=strategy.mesh.pipeline_parallel_size,
            fix="Wrap it: `tfdist.PipelineModel(model, num_microbatches=...)`.",
        )
