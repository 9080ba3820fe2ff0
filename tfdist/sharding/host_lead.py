"""How far the host runs ahead of a GPU in the backward pass.

When TensorFlow begins a collective, NCCL's stream waits for all that the computation's stream has queued until then, not for the
collective's input alone. A host queues the products of a whole backward pass before the GPU has computed the first, and so every
reduction would wait for all of them. It must begin while nothing is queued behind its gradients:

    GPU            | products 0         | products 1         | products 2         | ...
    reductions                          | reduction 0        | reduction 1        | ...
    host queues    products 1, begins 0   products 2, begins 1

So the products of message m + 1 are queued when the GPU has computed those of message m - 1. That is a control edge by way of the
host: TensorFlow lets an operation on the host wait for what the GPU has queued before it.

The edges lead from what was made before to what was made after, and so close no cycle; what waits is never a collective.
"""

from __future__ import annotations

from collections.abc import Sequence

import tensorflow as tf

from tfdist.collectives import RankProgram
from tfdist.sharding import tape


def limit_lead(messages: Sequence[Sequence[tf.Tensor]], program: RankProgram) -> None:
    """Holds the backward pass of gradients that leave in `messages`, in this order, back behind the GPU, as above.

    Where the transport begins collectives as said, and the gradients were made in the graph of the rank; else nothing is done.
    """
    if not program.transport_of(program.group_ranks("data")).waits_for_queue or program.is_eager:
        return
    gradients = [gradient for message in messages for gradient in message]
    if not all(tf.is_symbolic_tensor(gradient) and gradient.graph is program.graph for gradient in gradients):
        return
    operations = program.graph.get_operations()
    numbers = {operation.name: number for number, operation in enumerate(operations)}
    ends: list[int] = []  # per message, the number of the operation that makes the last gradient of it or of those before
    for message in messages:
        ends.append(max([*ends[-1:], *(numbers[gradient.op.name] for gradient in message)]))
    for end, following in zip(ends, ends[1:], strict=False):
        run_when_done(_computing(operations[end + 1 : following + 1], gradients[0].device), operations[end], program)


def run_when_done(held: Sequence[tf.Operation], operation: tf.Operation, program: RankProgram) -> None:
    """Has `held` queued when the GPU has done `operation`, which was made before them, and all that it had queued till then."""
    if held:
        with program.outermost(), tf.control_dependencies(None):
            tape.run_all_after(held, [program.communicator.mark_on_host(program.rank, operation)])


def queue_apart(first: Sequence[tf.Operation], second: Sequence[tf.Operation], program: RankProgram) -> None:
    """Has those of `second` that were made after all of `first` queued when the GPU has done these.

    Parameters that are gathered ahead: what waits for the end of `first` and of `second` would else begin after both.
    """
    if first and second and program.transport_of(program.group_ranks("data")).waits_for_queue:
        numbers = {operation.name: number for number, operation in enumerate(program.graph.get_operations())}
        last = max(first, key=lambda operation: numbers[operation.name])
        later = [operation for operation in second if numbers[operation.name] > numbers[last.name]]
        run_when_done(list(dict.fromkeys(later)), last, program)


def _computing(operations: Sequence[tf.Operation], device: str) -> list[tf.Operation]:
    """Returns those of `operations` by which `device` computes with floats, not with shapes, in the backward pass."""
    return [
        operation
        for operation in operations
        if tape.is_backward(operation)
        and operation.device == device
        and any(tensor.dtype.is_floating for tensor in operation.inputs)
        and any(tensor.dtype.is_floating for tensor in operation.outputs)
    ]
