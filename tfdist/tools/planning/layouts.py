"""How a model is sharded over tensor ranks, and split in the stages of a pipeline, as tfdist would do it."""

import functools

import keras

from tfdist import errors
from tfdist.extensions.pipeline.schedules.dataflow import held_activations
from tfdist.extensions.pipeline.schedules.make_schedule import make_schedule
from tfdist.extensions.pipeline.stages.split_points import balanced_split_points, node_weights, resolve_split_points
from tfdist.extensions.pipeline.stages.staged_model import StagedModel
from tfdist.extensions.tensor.plans import ModelGraph, sharded_weights, trace_model
from tfdist.extensions.tensor.plans.layer_kinds import dtype_bytes
from tfdist.extensions.tensor.plans.layer_shardings import LayerSharding
from tfdist.extensions.tensor.plans.suggest import suggested_shardings
from tfdist.extensions.tensor.plans.traffic import moved_units
from tfdist.extensions.tensor.sharded_weights import ShardedWeights


class ModelLayouts:
    """The layouts of one model, by sizes of the mesh; what is traced for them is traced once.

    Args:
        model: the model.
    """

    def __init__(self, model: keras.Model):
        self._model = model

    @functools.cached_property
    def graph(self) -> ModelGraph:
        """The layers of the model that can be sharded, and their calls."""
        return trace_model(self._model)

    @functools.cache  # noqa: B019  as long as the model
    def shardings(self, tensor: int) -> tuple[LayerSharding, ...]:
        """Returns how layers are sharded over so many ranks, those that are worth it.

        Raises:
            ValueError: the model is sharded already, or none of its layers can be, over any number of ranks.
        """
        if tensor == 1:
            return ()
        if any(isinstance(layer, ShardedWeights) for layer in self._model._flatten_layers()):
            raise errors.value_error(
                "The model is of layers that are sharded already: what they keep is not planned.",
                model=self._model.name,
                fix="Plan the same model of Keras layers.",
            )
        if not self.graph.layers:
            raise errors.value_error("`model` must hold a layer that can be sharded, such as a Dense.", model=self._model.name)
        return tuple(suggested_shardings(self.graph, tensor))

    @functools.cache  # noqa: B019  as long as the model
    def axes(self, tensor: int) -> dict[str, int]:
        """Returns the axis of each weight, by path, that is sharded over so many ranks. Raises ValueError when there is none."""
        if not self.shardings(tensor):
            expected = "No layer of the model can be sharded over so many tensor ranks."
            raise errors.value_error(expected, model=self._model.name, tensor=tensor)
        pairs = [pair for one in self.shardings(tensor) for pair in sharded_weights(one.layer, one.role, tensor)]
        return {variable.path: axis for variable, axis in pairs if axis is not None}

    @functools.cache  # noqa: B019  as long as the model
    def moved_bytes(self, tensor: int, pipeline: int, stages_per_rank: int, pipe: int) -> list[float]:
        """Returns the bytes that each sharded layer of rank `pipe` of a pipeline sends over so many tensor ranks in a step, of an
        example of a replica."""
        moved = []
        owners = self.owners(pipeline, stages_per_rank) if pipeline > 1 else {}
        for one in self.shardings(tensor):
            ranks = owners.get(one.layer.variables[0].path, (pipe,))
            mine = [place for place, rank in enumerate(ranks) if rank == pipe]
            own = next(list(known.uses) for known in self.graph.layers if known.layer is one.layer)
            if len(ranks) == len(own):  # a layer that several stages call, such as a tied table
                own = [own[place] for place in mine]
            units = sum(moved_units(one, use) for use in own) if mine else 0.0
            moved.append(units * dtype_bytes(one.layer.compute_dtype) * (tensor - 1) / tensor)
        return moved

    @functools.cache  # noqa: B019  as long as the model
    def staged(self, stages: int) -> StagedModel:
        """Returns the model split in so many stages, where `PipelineModel` would split it.

        Raises:
            ValueError: the model is not functional, or has fewer layers than there are stages.
        """
        module = getattr(self._model, "_functional", None) or self._model
        if not hasattr(module, "_nodes_by_depth"):
            raise errors.value_error(
                "A model is planned in a pipeline if it is functional or Sequential.",
                model=self._model.name,
                fix="Plan it without a pipeline; `tfdist.PipelineModel(model, blocks=...)` trains it in one.",
            )
        weights = self._node_weights(module)
        if stages > len(weights):
            resolve_split_points(module, None, stages)  # which raises
        return StagedModel(module, balanced_split_points(weights, stages), make_schedule("gpipe", stages, 1))

    @functools.cache  # noqa: B019  as long as the model
    def owners(self, pipeline: int, stages_per_rank: int = 1) -> dict[str, tuple[int, ...]]:
        """Returns the ranks of the pipeline that keep each weight, by its path."""
        found: dict[str, set[int]] = {}
        for stage in self.staged(pipeline * stages_per_rank).stages:
            for variable in stage.variables:
                found.setdefault(variable.path, set()).add(stage.index % pipeline)
        return {path: tuple(sorted(ranks)) for path, ranks in found.items()}

    @functools.cache  # noqa: B019  as long as the model
    def _node_weights(self, module: keras.Model) -> list[int]:
        return node_weights(module)


schedule_of = functools.lru_cache(maxsize=256)(make_schedule)


@functools.lru_cache(maxsize=256)
def held_at_most(schedule: str, pipeline: int, microbatches: int, stages_per_rank: int) -> tuple[int, ...]:
    """Returns of how many (stage, microbatch) each rank of a pipeline holds activations at most."""
    made = schedule_of(schedule, pipeline * stages_per_rank, microbatches, stages_per_rank)
    return tuple(max(held_activations(made.actions(rank)), default=1) for rank in range(pipeline))
