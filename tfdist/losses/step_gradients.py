"""Gradients of a rank's own means, in a step of Keras's trainer (see `trainer_step`), and of its shares, in a loop."""

import contextlib
from collections.abc import Callable, Iterator
from typing import Any

import tensorflow as tf

from tfdist import temporary
from tfdist.collectives import RankProgram, rank_program
from tfdist.custom_gradients import with_adjoint
from tfdist.graphs import records, tape
from tfdist.losses.trainer_step import trainer_step
from tfdist.losses.undivided_batch import is_given_everywhere
from tfdist.placements.eager import EagerFacts, facts_of
from tfdist.placements.facts import Facts
from tfdist.placements.kinds import How, Partial, Placement, Replicate, Shard
from tfdist.placements.rank_rows import RankRows
from tfdist.placements.redistribute import Redistribution
from tfdist.placements.repair import Repair
from tfdist.placements.surroundings import reads_variables
from tfdist.placements.telling import as_whole, is_sum, known, warn_of_custom_gradient, without_extremes
from tfdist.sharding.gradient_numbers import GradientNumbers
from tfdist.sharding.gradient_weight import GradientWeight


def weighted_in_gradient(loss: Any) -> Any:
    """Returns `loss`, a rank's own mean, with a gradient that counts the rank's weight. A loss of every row is no mean."""
    step = trainer_step()
    if step is None or loss is None:
        return loss
    rank_program().part(GradientWeight).note_entered()
    loss = without_extremes(rank_program(), tf.convert_to_tensor(loss))
    placement = _placement(step, rank_program(), loss)
    if isinstance(placement, Shard):
        return loss
    weight = step.weight()  # not within the gradient function, where ranks would send it at another time
    if is_sum(placement):
        loss = tf.math.divide_no_nan(loss, tf.cast(weight, loss.dtype))
    return with_adjoint(tf.identity, lambda upstream: upstream * tf.cast(weight, upstream.dtype), loss)


def gradient_of_targets(
    gradient_tape: tf.GradientTape, gradient: Callable[[Any, Any], Any], target: Any, sources: Any, output_gradients: Any
) -> Any:
    """Returns the gradient of `target` by `sources`, as `tf.GradientTape.gradient` does.

    `gradient` calls it, with the target and `output_gradients` that it is given. In a step of Keras's trainer the gradients of
    variables of the strategy, and of tensors that are computed of weights alone, are such that reductions, which multiply whole
    ones by the rank's weight, make of them the gradient that one device has. Those of inputs, and of what is computed of rows,
    are one device's as they are: they count the weight already. In a custom training loop all are a rank's summands.
    """
    step, program = trainer_step(), rank_program()
    targets = tf.nest.flatten(target)
    if program is None or program.here() is None or not all(map(tf.is_tensor, targets)):
        return gradient(target, output_gradients)
    with records.recording(gradient_tape) if program.is_eager else contextlib.nullcontext():
        targets = [without_extremes(program, x) for x in targets]
    weights = program.part(GradientWeight)
    if _are_of_all_rows(program, targets, sources):
        return gradient(target, output_gradients)

    if output_gradients is not None:
        output_gradients = tf.nest.map_structure(lambda x: _seed_of_all_rows(program, x), output_gradients)

    def taken(seeds: Any, began_with: tf.Tensor | None = None, factor: tf.Tensor | None = None) -> Any:
        with temporary.attributes(weights, began_with=began_with), _going_back(program, gradient_tape, factor):
            return gradient(targets, seeds)

    variables = [_strategys_variable(source) for source in tf.nest.flatten(sources)]
    of_rows = [v is None and not is_of_weights(x, program) for v, x in zip(variables, tf.nest.flatten(sources), strict=True)]
    if step is None:
        seeds = _seeds_of_shares(program, targets, output_gradients)
        found = taken(seeds)
        if seeds is not output_gradients or not _are_same_on_all(program, targets):
            facts, mean = facts_of(program), Partial(How.MEAN)
            are_means = seeds is output_gradients and all(program.exists_here(x) and facts.of(x) == mean for x in targets)
            _declare(program, found, sources, lambda place: How.MEAN if are_means and of_rows[place] else How.SUM)
        return found
    placements = [_placement(step, program, x) for x in targets]
    is_of_examples = tape.in_vectorized_map()  # whose gradients are a rank's own, and of which a mean may be taken after it
    is_sharded = [v is not None and v.layout.is_data_sharded and not is_of_examples for v in variables]
    if weights.is_in_loss:
        found = taken(output_gradients, began_with=step.weight())
        _declare(program, found, sources, lambda _: How.SUM)
        return found
    sends = program.group_ranks("data") in program.watched_groups
    begins_with_weight = all(of_rows) or any(is_sharded) or sends or _is_not_linear(program)
    weight = step.weight()
    seeds = tf.nest.flatten(output_gradients) if output_gradients is not None else [None] * len(targets)
    if not (all(of_rows) and output_gradients is not None):
        seeds = [_seed(*given, weight, begins_with_weight) for given in zip(targets, placements, seeds, strict=True)]
    has_some = any(x is not None for x in seeds)
    seeds = [tf.ones_like(x) if seed is None else seed for x, seed in zip(targets, seeds, strict=True)] if has_some else None
    began_with = weight if begins_with_weight and not all(of_rows) else None
    found = taken(seeds, began_with, None if begins_with_weight else weight)
    flat = []
    for grad, is_of_rows, is_reduced in zip(tf.nest.flatten(found), of_rows, is_sharded, strict=True):
        if is_of_rows and not begins_with_weight:
            grad = _changed(grad, lambda x: x * tf.cast(weight, x.dtype))
        elif begins_with_weight and not is_of_rows and not is_reduced:
            grad = _changed(grad, lambda x: tf.math.divide_no_nan(x, tf.cast(weight, x.dtype)))
        flat.append(grad)
        weights.has_of_rows |= is_of_rows and grad is not None
    found = tf.nest.pack_sequence_as(found, flat)
    are_sums = [a or b and begins_with_weight for a, b in zip(of_rows, is_sharded, strict=True)]  # which count the weight
    _declare(program, found, sources, lambda place: How.SUM if are_sums[place] else How.MEAN)
    return found


def _are_of_all_rows(program: RankProgram, targets: list[tf.Tensor], sources: Any) -> bool:
    """Whether `targets` and `sources`, no weights, are the same on all ranks, as where rows were gathered: a gradient is, too."""
    tensors = [x for x in tf.nest.flatten(sources) if tf.is_symbolic_tensor(x) and program.exists_here(x)]
    is_known = len(tensors) == len(tf.nest.flatten(sources)) and _are_same_on_all(program, [*targets, *tensors])
    return is_known and not any(is_of_weights(x, program) for x in tensors)


def _declare(program: RankProgram, found: Any, sources: Any, how: Callable[[int], How]) -> None:
    """Notes what the gradients `found`, which a tape has returned for `sources`, are: of rows, one device's; else a rank's part,
    which makes up the whole as `how` says of its place. An eager rank has the whole of what is sharded over the data axis."""
    here = program.here()
    if here is None:
        return
    facts: Any = facts_of(here)
    for place, (grad, source) in enumerate(zip(tf.nest.flatten(found), tf.nest.flatten(sources), strict=True)):
        variable = _strategys_variable(source)
        is_tensor = variable is None and (tf.is_symbolic_tensor(source) or program.is_eager and tf.is_tensor(source))
        made_by = None if not is_tensor else program if program.is_eager else program.that_made(source)
        placement = Replicate() if made_by is None else facts_of(made_by).of(source)
        if not isinstance(placement, Replicate | Shard):
            continue
        part = Partial(how(place)) if isinstance(placement, Replicate) else placement
        is_sharded = variable is not None and variable.layout.is_data_sharded
        if program.is_eager:
            for x in filter(tf.is_tensor, tf.nest.flatten(grad, expand_composites=True)):
                if isinstance(placement, Shard):
                    facts.declare(x, placement)
                elif x.dtype.is_floating:
                    facts.declare(x, Replicate() if is_sharded else part, is_gradient=True)
        elif tf.is_symbolic_tensor(grad) and program.exists_here(grad):  # what a tape adds up may become sums, each by itself
            for x in grad.op.inputs if is_sharded and grad.op.type == "AddN" else [grad]:
                facts.declare(x, part)


def _are_same_on_all(program: RankProgram, targets: list[tf.Tensor]) -> bool:
    """Whether `targets` do not depend on rows: so do not their gradients."""
    here = None if program.is_eager else program.here()
    return here is not None and all(
        tf.is_symbolic_tensor(x) and here.exists_here(x) and here.part(Facts).of(x) == Replicate() for x in targets
    )


def _seed_of_all_rows(program: RankProgram, given: Any) -> Any:
    """Returns what a tape is to begin with, as the user has `given` it, where that is computed of numbers of all rows."""
    is_of_gradients = not program.is_eager and program.here().part(GradientNumbers).is_of_gradients
    if not tf.is_tensor(given) or not program.exists_here(given) or is_of_gradients and is_of_gradients(given):
        return given
    known(program, given, "loss", tf.distribute.get_strategy(), "What `output_gradients` gives to a tape")
    return as_whole(program, given, "loss")


def _seeds_of_shares(program: RankProgram, targets: list[tf.Tensor], given: Any) -> Any:
    """Returns what a tape in a custom training loop is to begin with: at what ranks have agreed on, or at a mean for which
    they have, with the rank's weight."""
    is_alone = program.mesh.size("data") == 1 or program.mesh.splits_layers
    if is_alone or not all(map(program.exists_here, targets)):
        return given
    owner = tf.distribute.get_strategy()
    for target in targets:
        known(program, target, "loss", owner, "A loss in the function given to `strategy.run`")
    if program.is_eager:
        count_once = [program.part(EagerFacts).counts_once(x) for x in targets]
    else:
        repair = program.part(Repair)
        shares = [repair.as_share(x, "loss") for x in targets]
        count_once = [
            x in (Replicate(), Partial(How.MEAN)) and repair.counts_once(y) for x, y in zip(shares, targets, strict=True)
        ]
    if not any(count_once):
        return given
    weight = program.part(RankRows).weight()
    seeds = [None] * len(targets) if given is None else tf.nest.flatten(given)
    ones = [tf.ones_like(x) if seed is None else seed for x, seed in zip(targets, seeds, strict=True)]
    return [one * tf.cast(weight, one.dtype) if is_one else one for one, is_one in zip(ones, count_once, strict=True)]


@contextlib.contextmanager
def _going_back(program: RankProgram, gradient_tape: tf.GradientTape, factor: tf.Tensor | None) -> Iterator[None]:
    """A block in which a tape is asked for gradients that will be multiplied by `factor` where they are reduced."""
    if program.is_eager:
        with program.part(EagerFacts).not_seen(), temporary.attributes(program, is_going_back=True):
            yield
        return
    here = program.here()
    repair, numbers = here.part(Repair), here.part(GradientNumbers)
    for one in here.and_around():  # what a branch has captured has been mended where it was made
        one.part(Redistribution).tell(gradient_tape)
    start = len(here.graph.get_operations())
    with (
        temporary.attributes(program.part(RankRows), factor=factor),
        temporary.attributes(program, is_going_back=True),
        repair.working(),
        numbers.going_back(),
    ):
        yield
    if program.mesh.size("data") > 1 and not is_given_everywhere() and _has_custom_gradients(program):
        warn_of_custom_gradient(here, repair.unknown_since(start))


def _placement(step: RankRows, program: RankProgram, target: tf.Tensor) -> Placement:
    """Returns the placement of what is differentiated; of one example's that of a mean."""
    if tape.in_vectorized_map():
        return Partial(How.MEAN)
    return known(program, target, "loss", step.model, f"The loss of {type(step.model).__name__}")


def _seed(target: tf.Tensor, placement: Placement, given: Any, weight: tf.Tensor, begins_with_weight: bool) -> Any:
    """Returns what the tape is to begin with at `target`, where the user has `given` something, or None for 1."""
    weight = tf.cast(weight, target.dtype)
    # TensorFlow differentiates the sum of the elements of a tensor of rows, which no rank's weight makes smaller.
    adds_up = isinstance(placement, Shard) or is_sum(placement)
    if not adds_up and not begins_with_weight:
        return given
    given = tf.ones_like(target) if given is None else tf.cast(given, target.dtype)
    if adds_up:
        return given if begins_with_weight else given * tf.math.divide_no_nan(tf.ones_like(weight), weight)
    return given * weight


def _is_not_linear(program: RankProgram) -> bool:
    """Whether the way back may not be linear in what it begins with, which must then be that of one device.

    It may not be through a `tf.custom_gradient`, nor in float16, whose numbers overflow. In an eager run nobody knows.
    """
    if program.is_eager:
        return True
    operations = program.graph.get_operations()
    return _has_custom_gradients(program) or any(output.dtype == tf.float16 for op in operations for output in op.outputs)


def _has_custom_gradients(program: RankProgram) -> bool:
    """Whether gradients may go back through a `tf.custom_gradient` of the user's, as far as the graph has come."""
    found = (op for op in program.graph.get_operations() if op.type == "IdentityN")
    return any(op.node_def.attr["_gradient_op_type"].s.startswith(b"CustomGradient-") for op in found)


def _strategys_variable(source: Any) -> Any:
    """Returns the variable of a tfdist strategy that `source`, of Keras or TensorFlow, is; None for anything else."""
    value = source if isinstance(source, tf.Variable) else getattr(source, "value", None)
    return value if hasattr(value, "layout") else None


def _changed(grad: Any, change: Callable[[tf.Tensor], tf.Tensor]) -> Any:
    if grad is None:
        return None
    if isinstance(grad, tf.IndexedSlices):
        return tf.IndexedSlices(change(grad.values), grad.indices, grad.dense_shape)
    return change(grad)


def is_of_weights(source: Any, program: RankProgram) -> bool:
    """Whether `source`, a tensor, is the same on all ranks of `program`, as weights and what is computed of them are.

    What a tape returns for such tensors are summands of the ranks, as gradients of variables are; what it returns for rows, or
    for what is looked up by rows, is that of one device.
    """
    if not isinstance(source, tf.Tensor) or not source.dtype.is_floating:
        return False
    if not tf.is_symbolic_tensor(source):
        return program.is_eager and program.part(EagerFacts).is_of_weights(source)
    is_whole = program.exists_here(source) and program.part(Facts).of(source) == Replicate()
    return is_whole and reads_variables(source)
