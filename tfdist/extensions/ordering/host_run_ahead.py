"""How far the host runs ahead of a GPU.

When TensorFlow begins a collective, NCCL's stream waits for all that the computation's stream has queued until then, not for the
collective's input alone. A host queues the products of a whole backward pass before the GPU has computed the first, and so every
reduction would wait for all of them. It must begin while nothing is queued after its gradients:

    GPU            | products 0         | products 1         | products 2         | ...
    reductions                          | reduction 0        | reduction 1        | ...
    host queues      products 1, begins 0   products 2, begins 1

So the products of message m + 1 are queued when the GPU has computed those of message m. That is a control edge by way of the
host: TensorFlow lets an operation on the host wait for what the GPU has queued before it.

Note: on a chain. Between processes a collective begins when the one before it is over, in the middle of some product, and then
waits for what is queued at that moment. So with every end of products at most one begins, and there the products are queued in
parts, one for each collective that is to run beside them: each when the GPU has done the part before. What reads a gather is
queued when that is over and the GPU has heard of it, which gives the gather's successor on the chain the time to begin before:

    GPU            | products of unit 0 | products of unit 1 | ...
    gathers    0   | 1                  | 2                  | ...
    host queues      0, begins 1          1, begins 2

So it is with activations of tensor-parallel layers (`queue_order`): at the end of their collective both its
successor, a reduction, and the products that read them are free, and the first must begin before the others are queued.

The GPU waits for the host at the end of each part, so the parts should be few. Who begins first is a race, and one that is lost
costs the time of a message: order and numbers do not depend on it.

Note: sums of calls. Where a batch is computed in parts, by calls of functions, a gradient is the sum of what they return and is
complete with the last of them. A call is held back after that which completes the message before, but where that needs it: calls
need not run in the order in which they were made. What a rank does stands in one order, and so no other rank is between the two.

Note: the last message. An update stands on the stream of the products, after all that is queued when its gradients have been
reduced; then its parameters are gathered. After the last message's products, queued at once, no gather could pass that is not
ready before they begin. So they are queued in parts within a process, too.

The edges lead from what is earlier in the order in which operations are queued (`queue_order`) to what is later,
or beside an edge from a gather to what reads it, and so close no cycle; what waits is never a collective.
"""

import itertools
from collections.abc import Mapping, Sequence

import tensorflow as tf

from tfdist.collectives import RankProgram
from tfdist.collectives.buckets import in_parts
from tfdist.extensions.ordering.side_chain import side_of
from tfdist.graphs import tape
from tfdist.graphs.walks import reached
from tfdist.placements.kernels import adds_up


def is_limited(program: RankProgram) -> bool:
    """Whether collectives of the data axis wait, when they begin, for all that is queued: of a traced step, on GPUs."""
    return program.transport_of(program.group_ranks("data")).waits_for_queue and not program.is_eager


def is_on_chain(program: RankProgram) -> bool:
    """Whether they begin so, and as said in the note on chains."""
    return is_limited(program) and not begins_by_itself(program)


def begins_by_itself(program: RankProgram) -> bool:
    """Whether they begin so, and each when its input is there."""
    return is_limited(program) and program.has_own_turns(program.group_ranks("data"))


def limit_lead(
    messages: Sequence[Sequence[tf.Tensor]],
    program: RankProgram,
    operations: Sequence[tf.Operation],
    borders: Sequence[tf.Operation] = (),
    collectives_each: int = 1,
) -> None:
    """Holds the backward pass of gradients that leave in `messages`, in this order, back behind the GPU, as above.

    Where the transport begins collectives as said, and the gradients were made in the graph of the rank; else nothing is done.

    Args:
        operations: those of the graph, in the order in which they are queued.
        borders: those of `operations` after which nothing is queued before a collective of activations is over: there the
            host waits already. On a chain those collectives themselves.
        collectives_each: how many collectives are to run beside the products of a message, where they are on a chain; else
            after those of the last one.
    """
    if not is_limited(program):
        return
    gradients = [gradient for message in messages for gradient in message]
    if not all(tf.is_symbolic_tensor(gradient) and gradient.graph is program.graph for gradient in gradients):
        return
    numbers = {operation.name: number for number, operation in enumerate(operations)}
    ended = sorted(numbers[border.name] for border in borders)
    ends: list[int] = []  # per message, the number of the operation that makes the last gradient of it or of those before
    for message in messages:
        makers = [_made_by(gradient.op, numbers) for gradient in message]
        ends.append(max([*ends[-1:], *(numbers[maker.name] for maker in makers)]))
    needed = tape.ancestors(gradients, operations, by_control=False)  # not what stands for a sum, and is there after a reduction
    before: set[tf.Operation] = set()
    for end, following in itertools.pairwise(ends):
        last = operations[end]
        if last.type in tape.CALLS:  # see the note on sums
            before |= tape.ancestors([last], [operation for operation in operations if operation not in before])
        until = min([following, *(border for border in ended if border >= end)])
        held = [operation for operation in operations[end + 1 : until + 1] if operation in needed and operation not in before]
        is_apart = is_on_chain(program) or following == ends[-1]  # see the note on the last message
        held, after = computing(held, gradients[0].device), [last]
        passed = [border for border in ended if border < end][-1:] if is_on_chain(program) else []
        if passed and (needing := _needing(operations[passed[0]], operations[passed[0] + 1 : until + 1]).intersection(held)):
            # At its end its successor on the chain is free, too, and would wait for these.
            run_when_done([operation for operation in held if operation not in needing], after, program, "lead")
            held, after = [operation for operation in held if operation in needing], [last, operations[passed[0]]]
        for part in in_parts(held, collectives_each if is_apart else 1):
            run_when_done(part, after, program, "lead")
            after = [part[-1]]


def gather_units_in_order(units: Sequence[Sequence[tf.Operation]], program: RankProgram) -> None:
    """Has the gathers of a unit begin after those of the unit before, where all would begin at once, in any order.

    What a unit sends is queued when the GPU has what that before sends, and the host has heard of it: that one has begun by then.
    And all have begun before the first is over and what reads it is queued.

    Args:
        units: of each the operations that yield what was gathered, in the order in which they are read.
    """
    if not begins_by_itself(program):
        return
    done: set[tf.Operation] = set()
    before: list[tf.Operation] = []  # the operation that says so
    for gathered in units:
        gathers = sorted(_collectives_of(gathered) - done, key=lambda operation: operation.name)
        if gathers:
            sent = [gather.inputs[0].op for gather in gathers]
            tape.run_all_after(sent, before)
            before = [on_device(program, [*sent, *before], "gathers of forward")]
            done.update(gathers)


def _collectives_of(operations: Sequence[tf.Operation]) -> set[tf.Operation]:
    found = reached(operations, lambda op: () if op.type.startswith("Collective") else [x.op for x in op.inputs])
    return {operation for operation in found if operation.type.startswith("Collective")}


def queue_units_in_order(units: Sequence[tuple[Sequence[tf.Operation], Sequence[tf.Operation]]], program: RankProgram) -> None:
    """Has what reads a unit's parameters queued when their gather is over and the GPU has done what reads the unit before.

    And when the last activations of the side chain that were emitted before are there: at their end a gather is free to begin.

    Args:
        units: of each the operations that yield what was gathered, and those that read it, in the order of the gathers.
    """
    numbers = {operation.name: number for number, operation in enumerate(program.graph.get_operations())}
    side = side_of(program).collectives()
    last: list[tf.Operation] = []
    for gathered, readers in units:
        latest = max(numbers[operation.name] for operation in [*gathered, *last])
        later = [operation for operation in dict.fromkeys(readers) if numbers[operation.name] > latest]
        first = min((numbers[operation.name] for operation in later), default=0)
        activations = [operation for operation in side if numbers[operation.name] < first][-1:]
        run_when_done(later, [*gathered, *last, *activations], program, "forward")
        if later:
            last = [max(later, key=lambda operation: numbers[operation.name])]


def last_on_chain(before: Sequence[tf.Operation], program: RankProgram) -> list[tf.Operation]:
    """Returns the last collective that was emitted on the chain before all of these operations; none where there is no chain."""
    if not is_on_chain(program):
        return []
    numbers = {operation.name: number for number, operation in enumerate(program.graph.get_operations())}
    first = min(numbers[operation.name] for operation in before)
    emitted = side_of(program).emitted()
    return [operation for operation in emitted if numbers[operation.name] < first][-1:]


def after_activations(
    readers: Sequence[tf.Operation], following: Sequence[tf.Operation], program: RankProgram
) -> list[tf.Operation]:
    """Returns what a gather waits for, so that it begins after the collective of activations that `readers` end in.

    What comes next waits for that collective, and not for the gather, which then runs beside it.

    Args:
        following: operations that read the parameters gathered next; that collective stands before them.
    """
    if not following or not begins_by_itself(program) or tape.in_vectorized_map():
        return []
    sent = [tensor.op for one in activations_of(readers, following) for tensor in one.inputs if tensor.dtype != tf.resource]
    return [program.communicator.mark_on_host(program.rank, sent, "behind activations")] if sent else []


def activations_of(readers: Sequence[tf.Operation], following: Sequence[tf.Operation]) -> list[tf.Operation]:
    """Returns the collective that `readers` end in before there is one of `following`; none where there is no such."""
    seen, waiting = set(following), list(readers)
    while waiting:
        operation = waiting.pop()
        if operation.type.startswith("Collective"):
            return [operation]
        if operation not in seen:
            seen.add(operation)
            waiting += [consumer for tensor in operation.outputs for consumer in tensor.consumers()]
    return []


def run_when_done(held: Sequence[tf.Operation], operations: Sequence[tf.Operation], program: RankProgram, kind: str) -> None:
    """Has `held` queued when the GPU has done `operations`, which come before them, and all that it had queued till then.

    What is held by one `kind` of edges is queued in the order of the calls. In a `tf.vectorized_map`, which has no way to do for
    all rows what is done on the host, nothing is held.
    """
    if held and not tape.in_vectorized_map():
        tape.run_all_after(held, [on_device(program, operations, kind)])


def on_device(program: RankProgram, operations: Sequence[tf.Operation], kind: str) -> tf.Operation:
    """Returns an operation that runs when the GPU has done `operations`, and all that it had queued till then.

    Those of one `kind` run in the order of the calls.
    """
    with program.outermost(), tf.control_dependencies(None):
        return program.communicator.mark_on_host(program.rank, operations, kind)


def queue_after(first: Sequence[tf.Operation], second: Sequence[tf.Operation], program: RankProgram) -> None:
    """Has those of `second` that were made after all of `first` queued when the GPU has done these.

    Parameters that are gathered ahead: what waits for the end of `first` and of `second` would else begin after both.
    """
    if first and second and is_limited(program):
        numbers = {operation.name: number for number, operation in enumerate(program.graph.get_operations())}
        last = max(first, key=lambda operation: numbers[operation.name])
        later = [operation for operation in second if numbers[operation.name] > numbers[last.name]]
        run_when_done(list(dict.fromkeys(later)), [last], program, "first gathers")


def _needing(operation: tf.Operation, later: Sequence[tf.Operation]) -> set[tf.Operation]:
    """Returns those of `later`, operations in an order that edges follow, that need `operation`."""
    found = {operation}
    for one in later:
        if not found.isdisjoint(tape.inputs_of(one)):
            found.add(one)
    return found


def _made_by(operation: tf.Operation, numbers: Mapping[str, int]) -> tf.Operation:
    """Returns the call whose result `operation` adds to those of earlier ones; else `operation`."""
    maker = operation
    while adds_up(maker.type):  # what is added last is no sum itself
        maker = max((tensor.op for tensor in maker.inputs), key=lambda one: (not adds_up(one.type), numbers[one.name]))
    return maker if maker.type in tape.CALLS else operation


def computing(operations: Sequence[tf.Operation], device: str) -> list[tf.Operation]:
    """Returns those of `operations` by which `device` computes with floats, not with shapes, in the backward pass, and calls.

    What waits is never a collective.
    """
    return [
        operation
        for operation in operations
        if (tape.is_backward(operation) or operation.type in tape.CALLS)
        and not operation.type.startswith("Collective")
        and operation.device == device
        and any(tensor.dtype.is_floating for tensor in operation.inputs)
        and any(tensor.dtype.is_floating for tensor in operation.outputs)
    ]
