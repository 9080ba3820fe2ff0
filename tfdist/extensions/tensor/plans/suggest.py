"""Which way to shard: the plan that saves most for what it moves.

Note: what sharding a layer is worth. It saves state on every rank: the parameter, and, if it is trained, its gradient and Adam's
two moments, 4 times the parameter's bytes. It moves bytes in every step, in proportion to the vectors (examples, or positions of
sequences) that go through the layer. It is worth it where it saves more state than `BREAK_EVEN_VECTORS` vectors move. For a
matrix of float32 this is also 6 / 16 * 256 = 96 floating-point operations saved for each byte moved, about what an accelerator
computes in the time in which its link moves a byte. The number of ranks and the size of the batch play no part:

    column  in * out / (2 in + out) > 64        a square Dense of 192 and more is sharded alone, a head of 10 classes never
    pair    the hidden width > 128              in -> hidden -> in: sharded by column, then by row
"""

import dataclasses
import math
import re
from collections.abc import Mapping, Sequence

import keras

from tfdist import errors
from tfdist.extensions.tensor.plans.layer_kinds import (
    COLUMN,
    REPLICATE,
    ROW,
    VOCAB,
    dtype_bytes,
    path_of,
    roles_of,
    saved_bytes,
    sharded_sizes,
)
from tfdist.extensions.tensor.plans.layer_shardings import LayerSharding, layer_shardings
from tfdist.extensions.tensor.plans.model_graph import ModelGraph, ShardableLayer, trace_model
from tfdist.extensions.tensor.plans.pairing import Flow
from tfdist.extensions.tensor.plans.suggested_plan import SuggestedPlan, SuggestedSharding
from tfdist.extensions.tensor.plans.traffic import moved_units
from tfdist.sharding import layers_within
from tfdist.tables import size_text

BREAK_EVEN_VECTORS = 256
# A trained parameter has a gradient and two moments beside it.
STATE_PER_TRAINED_BYTE = 4

_Layers = frozenset[keras.Layer]
_Group = dict[keras.Layer, str]  # the roles of layers sharded by column, and of those by row that their outputs go to


def suggest_plan(model: keras.Model, tensor_parallel_size: int, *, rows: int | None = None) -> SuggestedPlan:
    """Suggests which layers to shard over the tensor ranks, and which way; prints as a table.

    A Dense sharded by column whose output meets only elementwise steps on its way to layers sharded by row is paired with them:
    nothing is moved between. Where a layer could be in several pairs, those are made that gain most together. A layer alone is
    sharded the way that moves less: by column where its output is larger than its input, by row where it is smaller. It stays
    whole if none of its sizes is divisible by the number of ranks, or if it is not worth sharding: if 256 vectors (examples, or
    positions of sequences) move more bytes in a step than the sharding saves of parameter, gradient and Adam's moments.

    The plan does not depend on `rows`; the table's traffic does.

    Args:
        model: a built functional, Sequential or subclassed model.
        tensor_parallel_size: the ranks of the tensor axis.
        rows: the examples that a replica gets in one step, for the bytes in the table. 1 if not given.

    Returns:
        A `SuggestedPlan`: pass it to `tfdist.parallelize` as it is, or edit `plan.as_dict()`.

    Raises:
        ValueError: the model is not built, or holds no layer that can be sharded; `tensor_parallel_size` or `rows` is not a
            positive integer.
    """
    errors.check_integer("tensor_parallel_size", tensor_parallel_size, 1)
    rows = 1 if rows is None else rows
    errors.check_integer("rows", rows, 1, fix="It is how many examples a replica gets in one step.")
    graph = trace_model(model)
    if not graph.layers:
        raise errors.value_error("`model` must hold a layer that can be sharded, such as a Dense.", model=model.name)
    ranks = _Ranks(tensor_parallel_size)
    shardings = {sharding.layer: sharding for sharding in suggested_shardings(graph, tensor_parallel_size)}
    table = [ranks.describe(known, shardings.get(known.layer), rows) for known in graph.layers]
    return SuggestedPlan(
        _patterns(model, {row.path: row.role for row in table}),
        shardings=table,
        tensor_parallel_size=tensor_parallel_size,
        examples=rows,
        parameter_bytes=sum(math.prod(weight.shape) * dtype_bytes(weight.dtype) for weight in model.weights),
        notes=graph.notes,
    )


def suggested_shardings(graph: ModelGraph, tensor_parallel_size: int) -> list[LayerSharding]:
    """Returns how the plan that `suggest_plan` suggests shards the layers of a traced model."""
    return layer_shardings(graph, _one_role_per_path(graph, _Ranks(tensor_parallel_size).choose(graph)))


@dataclasses.dataclass(frozen=True)
class _Ranks:
    """Weighs shards over so many ranks."""

    tensor_parallel_size: int

    def choose(self, graph: ModelGraph) -> dict[keras.Layer, str]:
        """Returns the role of each layer that is worth sharding, so that the whole plan is worth most."""
        layers = {known.layer: known for known in graph.layers}
        alone = {known.layer: self.best_alone(known) for known in graph.layers}
        gains = []
        for group in self.groups(graph):
            worths = (self.worth(layers[x], LayerSharding(x, "", role, False, role == ROW)) for x, role in group.items())
            gains.append((sum(worths) - sum(alone[x][1] for x in group), group))
        roles = {layer: role for layer, (role, _) in alone.items() if role != REPLICATE}
        for group in _best_choice(gains):
            roles |= group
        return roles

    def best_alone(self, known: ShardableLayer) -> tuple[str, float]:
        """Returns the best role of a layer that is not paired, and what it is worth."""
        if not known.uses or known.kind.is_normalization:
            return REPLICATE, 0.0
        worths = [(role, self.worth(known, _alone(known, role))) for role in self.possible(known)]
        return max([*worths, (REPLICATE, 0.0)], key=lambda pair: (pair[1], pair[0] == REPLICATE))

    def possible(self, known: ShardableLayer) -> list[str]:
        """Returns the roles in which the layer can be sharded over so many ranks."""
        ranks, roles = self.tensor_parallel_size, roles_of(known.layer) if known.obstacle is None else ()
        return [role for role in roles if not any(size % ranks for size in sharded_sizes(known.layer, role, ranks).values())]

    def groups(self, graph: ModelGraph) -> list[_Group]:
        """Returns the roles of every set of layers that can be paired; a layer may be in several of them."""
        layers = {known.layer: known for known in graph.layers}
        columns = [x for x, known in layers.items() if known.keeps_local_output and COLUMN in self.possible(known)]
        rows = [x for x, known in layers.items() if known.is_traced and ROW in self.possible(known)]
        flow = Flow(graph.traces, columns, rows)
        norms = {x for x in columns if layers[x].kind.is_normalization}
        return [
            dict.fromkeys(feeding, COLUMN) | dict.fromkeys(taking, ROW)
            for feeding, taking in dict.fromkeys(_connected(column, flow.fed) for column in columns)
            if taking and not feeding & (flow.gathered | taking) and not (taking | (feeding & norms)) & flow.whole_inputs
        ]

    def worth(self, known: ShardableLayer, sharding: LayerSharding) -> float:
        """Bytes of state that `sharding` saves, less the bytes of `balance` that it moves."""
        saved, moved = self.balance(known, sharding)
        return saved - moved

    def balance(self, known: ShardableLayer, sharding: LayerSharding) -> tuple[float, float]:
        """Returns the state bytes that a sharding saves, and those that it moves in a step of `BREAK_EVEN_VECTORS` vectors."""
        factor = STATE_PER_TRAINED_BYTE if known.layer.trainable else 1
        units = sum(moved_units(sharding, use) / use.vectors for use in known.uses)
        saved = factor * saved_bytes(known.layer, sharding.role, self.tensor_parallel_size)
        return saved, BREAK_EVEN_VECTORS * self.moved_bytes(known, units)

    def moved_bytes(self, known: ShardableLayer, units: float) -> float:
        """Bytes moved for `units` of (t - 1)/t elements of the layer's compute dtype."""
        size = self.tensor_parallel_size
        return units * dtype_bytes(known.layer.compute_dtype) * (size - 1) / size

    def describe(self, known: ShardableLayer, sharding: LayerSharding | None, examples: int) -> SuggestedSharding:
        """Returns the suggestion for one layer, with its reason."""
        role = REPLICATE if sharding is None else sharding.role
        units = 0 if sharding is None else sum(moved_units(sharding, use) for use in known.uses)
        return SuggestedSharding(
            path=known.path,
            kind=known.kind.name,
            role=role,
            is_paired=sharding is not None and sharding.is_paired,
            saved_bytes=saved_bytes(known.layer, role, self.tensor_parallel_size),
            moved_bytes=round(examples * self.moved_bytes(known, units)),
            reason=self.why_whole(known) if sharding is None else _what_moves(known, sharding),
        )

    def why_whole(self, known: ShardableLayer) -> str:
        """Returns the reason why the layer stays whole, in bytes saved and moved."""
        if self.tensor_parallel_size == 1:
            return "there is one rank"
        if known.obstacle is not None:
            return known.obstacle
        if not known.uses:
            return "no call of it was seen"
        if not roles_of(known.layer):
            return "its equation has no axis to shard"
        if known.kind.is_normalization:
            return "its input is whole, or its output has to be"
        if not (possible := self.possible(known)):
            ranks = self.tensor_parallel_size
            sizes = [size for role in roles_of(known.layer) for size in sharded_sizes(known.layer, role, ranks).items()]
            return f"{', '.join(f'{name} {size}' for name, size in sizes)}: not divisible by {ranks}"
        saved, moved = max((self.balance(known, _alone(known, role)) for role in possible), key=lambda pair: pair[0] - pair[1])
        if saved > moved:
            return "it has the path of another layer that is sharded in another way"
        return f"saves {size_text(saved)} of state, {BREAK_EVEN_VECTORS} vectors move {size_text(moved)}"


def _connected(column: keras.Layer, fed: Sequence[tuple[keras.Layer, _Layers]]) -> tuple[_Layers, _Layers]:
    """Returns `column` and all that feed the layers that it feeds, and so on; and the layers sharded by row that these feed."""
    columns, rows = {column}, set[keras.Layer]()
    while more := {row for row, sources in fed if not columns.isdisjoint(sources)} - rows:
        rows |= more
        columns.update(*(sources for row, sources in fed if row in more))
    return frozenset(columns), frozenset(rows)


def _best_choice(gains: Sequence[tuple[float, _Group]]) -> tuple[_Group, ...]:
    """Returns the groups without a common layer that gain most together; of equals, those that come first.

    One group after the other is taken or left. What was taken matters only as far as later groups hold a layer of it: in a
    chain of layers one at most, so there are few cases at a time.
    """
    best: dict[_Layers, tuple[float, tuple[_Group, ...]]] = {frozenset(): (0.0, ())}
    for index, (gain, group) in enumerate(gains):
        later = frozenset().union(*(other for _, other in gains[index + 1 :]))
        choices = []
        for taken, (total, chosen) in best.items():
            if gain > 0 and taken.isdisjoint(group):
                choices.append((taken.union(group) & later, total + gain, (*chosen, group)))
            choices.append((taken & later, total, chosen))
        best = {}
        for taken, total, chosen in choices:
            if taken not in best or total > best[taken][0]:
                best[taken] = total, chosen
    return max(best.values(), key=lambda case: case[0])[1]


def _alone(known: ShardableLayer, role: str) -> LayerSharding:
    return LayerSharding(known.layer, known.path, role, gather_output=role == COLUMN, input_is_parallel=False)


def _what_moves(known: ShardableLayer, sharding: LayerSharding) -> str:
    if known.kind.is_attention:
        return "heads"
    if sharding.role == VOCAB:
        return "rows of the table"
    if sharding.role == COLUMN:
        return "gathers its output" if sharding.gather_output else "its output stays local"
    return "its input is local" if sharding.input_is_parallel else "shards a whole input"


def _one_role_per_path(graph: ModelGraph, roles: Mapping[keras.Layer, str]) -> dict[keras.Layer, str]:
    """Drops the roles of layers that a pattern cannot tell from others with another role."""
    by_path: dict[str, set[str]] = {}
    for known in graph.layers:
        by_path.setdefault(known.path, set()).add(roles.get(known.layer, REPLICATE))
    return {layer: role for layer, role in roles.items() if len(by_path[path_of(layer)]) == 1}


def _patterns(model: keras.Model, roles: Mapping[str, str]) -> dict[str, str]:
    r"""Returns patterns that give each path its role: "^block_\d+_mlp$" for all that differ in numbers only, if they agree."""
    paths = {path_of(layer) for layer in layers_within(model)[1:] if layer.weights}
    patterns: dict[str, str] = {}
    for path, role in roles.items():
        general = "^" + re.sub(r"\d+", r"\\d+", re.escape(path)) + "$"
        alike = [other for other in paths if re.search(general, other)]
        agree = len(alike) > 1 and all(roles.get(other) == role for other in alike)
        patterns[general if agree else f"^{re.escape(path)}$"] = role
    return patterns
