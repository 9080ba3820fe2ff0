"""Warnings, once, of numbers that a rank cannot compute of its part of a batch, and that could not be mended."""

import contextlib
import threading
import types
import weakref
from collections.abc import Callable
from typing import Any

import tensorflow as tf

from tfdist import errors, temporary
from tfdist.collectives import RankProgram, rank_program
from tfdist.graphs import tape
from tfdist.graphs.walks import line_of_user
from tfdist.placements.eager import EagerFacts
from tfdist.placements.facts import Facts, keeps_rows
from tfdist.placements.graph_facts import named
from tfdist.placements.kinds import Partial, Placement, Replicate, Shard, Unknown, Why
from tfdist.placements.rank_rows import RankRows
from tfdist.placements.repair import Repair

# What has been told, by whose it is (a model, a function, a strategy, the program of a rank): of a function, in which lines.
_told: weakref.WeakKeyDictionary[Any, set[str]] = weakref.WeakKeyDictionary()
_local = threading.local()

_OWN = "Each device computes it of its own rows, and what it is of all rows cannot be told."
_REDUCE = (
    "Reduce or gather over the devices what is to be of all rows, before it: `tfdist.collectives.all_reduce(x, "
    '"data")`, `tfdist.collectives.all_gather(x, uneven=True)`. Of a loss: `tfdist.losses.OverGlobalBatch(loss)`, called with '
    "what it is computed of."
)
_TOLD = {
    Why.OWN_ROWS: (
        "Which of both it is cannot be told of a number of Python; it counts as the device's rows.",
        "Divide by `tf.shape(x)[0]`, cast, by no `x.shape[0]`; a constant is told from it as a factor, `total * (1 / 4)`. "
        + _REDUCE,
    ),
    Why.MEET: (
        "Each device has a part of the rows, and lets them meet its own alone, where on one device all meet.",
        "If they are few, let them be gathered: make the strategy with a larger `gather_rows_bytes`, and sizes of "
        "`tf.shape(x)[0]` in the place of `x.shape[0]`. Else " + _REDUCE[0].lower() + _REDUCE[1:],
    ),
}


def known(
    program: RankProgram, tensor: tf.Tensor, label: str, owner: Any, name: str, *, not_told: Why | None = None
) -> Placement:
    """Returns the placement of `tensor`, mended where that can be, and warns, once for `owner`, if it is not known.

    Args:
        label: what asks, for the plan.
        owner: whose `tensor` is, a model or a function.
        name: what `tensor` is called in the warning.
        not_told: a reason for not being known that is none to warn of.
    """
    here = program.here()
    rows, unknown = program.part(RankRows), None
    is_here = tf.is_symbolic_tensor(tensor) is not program.is_eager
    if here is None or not is_here or rows.are_everywhere or program.mesh.size("data") == 1 or tape.in_vectorized_map():
        return Replicate()
    if program.is_eager:
        placement, unknown = here.part(EagerFacts).of(tensor), here.part(EagerFacts).unknown(tensor)
    else:
        here = here.that_made(tensor) or here  # of what a branch has captured, where it was made
        for part in here.parts:
            part.before_known(tensor)
        if rows.are_of_slices:
            return here.part(Facts).of(tensor)
        with here.outermost():
            placement = here.part(Repair).known(tensor, label)
        taken = here.part(Facts).taken_for_rows
        unknown = Unknown(Why.OWN_ROWS, named(taken[0])) if taken else None
        taken.clear()
    unknown = placement if isinstance(placement, Unknown) else unknown
    # Where ranks have different layers, the first may compute no loss.
    is_other = program.local_index and not program.mesh.splits_layers
    if unknown is not None and not is_other and unknown.why is not not_told:
        where = "" if program.is_eager else line_of_user(here.graph, unknown.what)
        if _is_new(owner, where if isinstance(owner, types.FunctionType) else ""):
            why, fix = _TOLD.get(unknown.why, (_OWN, _REDUCE))
            errors.warn(f"{name} contains {unknown.why.value}: {unknown.what}{where}. {why}", fix=fix)
    return placement


def _is_new(owner: Any, place: str = "") -> bool:
    """Whether nothing has been told of `owner` there; it has from now on."""
    told = _told.setdefault(owner, set())
    is_new = place not in told
    told.add(place)
    return is_new


def as_whole(program: RankProgram, tensor: tf.Tensor, label: str) -> tf.Tensor:
    """Returns `tensor`, or what it is on one device where it is a number that each rank has of its own rows."""
    found = _who_mends(program, tensor)
    return tensor if found is None else found.as_whole(tensor, label)


def as_mean(program: RankProgram, tensor: tf.Tensor, label: str, owner: Any, name: str) -> tf.Tensor:
    """Returns `tensor`, a number, such that the ranks' own, by their weights, make up that of one device, if it is `known`."""
    known(program, tensor, label, owner, name)
    found = _who_mends(program, tensor)
    return tensor if found is None else found.as_mean(tensor, label)


def without_extremes(program: RankProgram, tensor: tf.Tensor) -> tf.Tensor:
    """Returns `tensor`, a loss, or what ranks have agreed on where it is a maximum or a minimum of each one's rows."""
    found = _who_mends(program, tensor)
    return tensor if found is None else found.without_extremes(tensor, "loss")


def _who_mends(program: RankProgram, tensor: tf.Tensor) -> EagerFacts | Repair | None:
    """Returns what can make of `tensor` that of all rows; None: nothing, or there are no other ranks' rows."""
    rows, here = program.part(RankRows), program.here()
    is_alone = program.mesh.size("data") == 1 or rows.are_of_slices or rows.are_everywhere
    is_here = here is not None and tf.is_symbolic_tensor(tensor) is not program.is_eager and here.exists_here(tensor)
    if here is None or not is_here or is_alone:
        return None
    return here.part(EagerFacts) if here.is_eager else here.part(Repair)


def of_layer(layer: Any, call: Callable[..., Any], args: Any, kwargs: Any) -> Any:
    """Returns `call(*args, **kwargs)`, a layer's outputs: of a rank's own rows also where rows of the batch meet in it, or have
    met in what it is given, as many as the batch has."""
    program = rank_program(peers_on="data")
    may_send = program is not None and not program.is_eager and not tape.in_vectorized_map() and not program.is_recorded_here()
    here = program.here() if may_send else None
    if here is None:
        return call(*args, **kwargs)
    facts = here.part(Facts)
    before = tape.operations_so_far()

    def placement_of(x: Any) -> Placement | None:
        return facts.of(x) if tf.is_symbolic_tensor(x) and here.exists_here(x) else None

    def own(x: Any) -> Any:
        if not isinstance(placement_of(x), Unknown):
            return x
        made = {op.name for op in tape.operations_since(before)}
        if is_of_parts or not all(op.name in made or keeps_rows(op) for op in facts.reasons_of(x)):
            return x  # of a part of the batch, say, of which what is computed has as many rows
        name = f"The layer {layer.name!r}"  # which returns rows, whatever it makes of a sparse tensor's indices
        placement = known(program, x, f"layer/{layer.name}", layer, name, not_told=Why.GIVEN)
        found = here.part(Repair).own_rows(x, f"layer/{layer.name}")
        if isinstance(placement, Unknown) and facts.own_rows_first(x):
            facts.declare(x, Shard())  # what was told of once
        if found is not x and hasattr(x, "_keras_mask"):
            found._keras_mask = x._keras_mask
        return found

    given = tf.nest.flatten((args, kwargs))
    placements = [placement_of(x) for x in given]
    # Such as values of ragged tensors, of which each row of the batch has its own number: so may what the layer returns.
    is_of_parts = {one.is_even for one in placements if isinstance(one, Shard)} == {False}
    is_of_parts = is_of_parts and not any(isinstance(x, tf.RaggedTensor | tf.SparseTensor) for x in given)
    if any(isinstance(one, Unknown) for one in placements):
        args, kwargs = tf.nest.map_structure(own, (args, kwargs))
    return tf.nest.map_structure(own, call(*args, **kwargs))


def warn_of_number_read(tensor: tf.Tensor) -> None:
    """Warns, once for a strategy, where the user's code lets Python read an eager `tensor` of a rank's own rows."""
    program, owner = rank_program(peers_on="data"), tf.distribute.get_strategy()
    if program is None or not program.is_eager or program.local_index or owner in _told:
        return
    line = program.part(EagerFacts).line_that_reads(tensor)
    if line is not None and not program.part(RankRows).are_everywhere and _is_new(owner):
        errors.warn(
            f"Python reads a number of an eager step{line}: that of the device's own rows, where one device has that of all, "
            "and nobody can see what becomes of it.",
            fix="Compute with tensors (`mean > 0.5`, `tf.where`), of which tfdist knows what they are of; reduce it over the "
            'devices first, `tfdist.collectives.all_reduce(x, "data")`; or compile without `run_eagerly`.',
            stacklevel=4,
        )


def warn_of_custom_gradient(program: RankProgram, unknown: Unknown | None) -> None:
    """Warns, once for a trace, where a gradient function of the user's looks at the rows of a rank together."""
    if unknown is None or program.local_index or not _is_new(program.root):
        return
    where = line_of_user(program.graph, unknown.what)
    errors.warn(
        "In the gradient function of a `tf.custom_gradient` rows of the batch meet: it looks at what comes back to all "
        f"together (a norm, a mean): {unknown.what}{where}. Each device has a part of the rows, and gives it that alone.",
        fix="Look at each row by itself (`axis=-1`), or reduce over the devices what is of all rows: "
        '`tfdist.collectives.all_reduce(x, "data")`.',
    )


def warn_of_layer_in_pipeline(model: Any, placement: Placement, loss: tf.Tensor) -> None:
    """Warns, once for a model, where what a layer of a pipeline adds to the loss is neither a mean nor a sum over rows."""
    if not _is_new(model):
        return
    what = placement.what if isinstance(placement, Unknown) else f"{loss.op.type} {loss.op.name!r}"
    why = placement.why.value if isinstance(placement, Unknown) else Why.FUNCTION.value
    errors.warn(
        f"A loss that a layer of the pipeline {model.name!r} adds contains {why}: {what}{line_of_user(loss.graph, what)}. "
        "The layer sees a microbatch, and what is added counts as a mean over its rows.",
        fix="Add means or sums over rows in layers. Return what another loss is made of as an output of the model, and "
        "compute it in the model's loss, which is that of the whole batch.",
    )


def calling(loss: Any) -> contextlib.AbstractContextManager[None]:
    """A block in which `loss`, a Keras loss, is called."""
    return temporary.attributes(_local, loss=loss)


def known_of_loss(program: RankProgram, value: tf.Tensor) -> Placement:
    """Returns the placement of `value`, what the Keras loss which is called makes of a batch."""
    loss = getattr(_local, "loss", None)
    function = getattr(loss, "fn", None) or loss or known_of_loss
    name = getattr(function, "__name__", None) or type(function).__name__
    return known(program, value, f"loss/{name}", function, f"The loss `{name}`")


def is_sum(placement: Placement | None) -> bool:
    """Whether what a rank has adds up over the ranks."""
    return isinstance(placement, Partial) and placement.is_sum
