"""In which order a rank's operations are queued on its device, and its collectives sent: `NoOrder` does nothing about it."""

import contextlib
from collections.abc import Sequence

import tensorflow as tf

from tfdist.collectives.emission import Emission
from tfdist.extensible import Place


class NoOrder:
    """Operations are queued in the order in which they were made, and collectives sent in that in which they are emitted.

    That is all there is to it where a collective waits for its input alone, as on CPUs. Where it waits for all that its device
    has queued, results are the same, and less is hidden.

    Attributes:
        borders: the operations after which nothing is queued before a collective is over.
        has_written: whether the step has written parameters.
    """

    sends_activations_first = False  # whether operations are queued in another order than that in which they were made
    is_limited = False  # whether collectives of the data axis wait, when they begin, for all that is queued
    is_on_chain = False  # and, besides, for the one before

    def __init__(self, program: Emission):
        self._program = program
        self.borders: list[tf.Operation] = []
        self.has_written = False

    # Collectives

    def may_be_overtaken(self) -> contextlib.AbstractContextManager[None]:
        """A block whose collectives, of activations, others that are emitted later may be sent before."""
        return contextlib.nullcontext()

    def ahead(self, gate: Sequence[tf.Operation], following: Sequence[tf.Operation]) -> contextlib.AbstractContextManager[None]:
        """A block whose collectives gather parameters in forward, when `gate` is over, for what comes before `following`."""
        return contextlib.nullcontext()

    def among_activations(self) -> contextlib.AbstractContextManager[None]:
        """A block whose collectives may be sent before some of activations that were emitted earlier."""
        return contextlib.nullcontext()

    def note_record(self, lane: int) -> None:
        """Notes that a collective has been put in the plan, which travels on this lane of the rank's tokens."""

    def join(self) -> None:
        """Puts the collectives of the rank, whose function has returned, in one order."""

    def emitted(self) -> list[tf.Operation]:
        """Returns all collectives that the rank has emitted so far on its chain, in order."""
        return []

    # The queue

    def operations(self, gradients: Sequence[tf.Tensor]) -> list[tf.Operation]:
        """Returns all operations of the graph in the order in which they are queued; what only `gradients` need may wait."""
        return self._program.graph.get_operations()

    def after_activations(self, readers: Sequence[tf.Operation], following: Sequence[tf.Operation]) -> list[tf.Operation]:
        """Returns what a gather waits for, besides `readers` of earlier parameters, to begin after activations."""
        return []

    def last_on_chain(self, before: Sequence[tf.Operation]) -> list[tf.Operation]:
        """Returns the last collective that was emitted on the chain before all of these operations, if there is a chain."""
        return []

    def queue_after(self, first: Sequence[tf.Operation], second: Sequence[tf.Operation]) -> None:
        """Has those of `second` that were made after all of `first` queued when the device has done these."""

    def queue_units_in_order(self, units: Sequence[tuple[Sequence[tf.Operation], Sequence[tf.Operation]]]) -> None:
        """Has what reads a unit's parameters queued when their gather is over, and the device is done with the unit before."""

    def gather_units_in_order(self, units: Sequence[Sequence[tf.Operation]]) -> None:
        """Has the gathers of a unit begin after those of the unit before, where all would begin at once."""

    def limit_lead(
        self, messages: Sequence[Sequence[tf.Tensor]], operations: Sequence[tf.Operation], collectives_each: int = 1
    ) -> None:
        """Holds the backward pass of gradients that leave in `messages`, in this order, until the device has come near.

        Args:
            operations: those of the graph, in the order in which they are queued.
            collectives_each: how many collectives are to pass during the products of a message.
        """

    def run_when_done(self, held: Sequence[tf.Operation], operations: Sequence[tf.Operation], kind: str) -> None:
        """Has `held` queued when the device has done `operations`, which come before them."""

    def on_device(self, operations: Sequence[tf.Operation], kind: str) -> tf.Operation:
        """Returns an operation that runs when the device has done `operations`; here when they have been queued."""
        with self._program.outermost(), tf.control_dependencies(None), tf.control_dependencies(operations):
            return tf.no_op()


ORDER: Place[type[NoOrder]] = Place(NoOrder)
