"""Slots of an optimizer that a rank's function reads and writes itself: their whole values, as on one device.

optimizer.apply(grads, weights)                     the optimizer's own step: the rank's shard, which it updates
keras.ops.norm(optimizer._momentums[0])             gathered: one message for each read
slow.assign(slow + 0.5 * (weight - slow))           gathered, and the rank's shard of the new value stored
total.assign_add(grad)                              the rank's shard of the sum over the ranks
"""

import contextlib
from typing import Any

import tensorflow as tf

from tfdist import errors, temporary
from tfdist.collectives import Part, RankProgram
from tfdist.graphs import tape
from tfdist.placements.eager import EagerFacts
from tfdist.placements.kinds import Replicate
from tfdist.sharding.gradient_stubs import GradientStubs
from tfdist.sharding.shard_messages import gather_over_data
from tfdist.sharding.tape_gradients import TapeGradients


class SlotReads(Part):
    """The slots that one rank reads and writes in one trace, or eager run. A part of its state."""

    def __init__(self, program: RankProgram):
        self._program = program
        self._is_stepping = False

    def stepping(self) -> contextlib.AbstractContextManager[None]:
        """A block in which an optimizer steps: slots read as what the rank stores."""
        return temporary.attributes(self, _is_stepping=True)

    def read(self, variable: Any) -> tf.Tensor | tf.Variable:
        """Returns the value of `variable`, a slot: whole, or in a step of an optimizer what the rank stores of it.

        Raises NotImplementedError in a loop or a nested function, where nothing can be sent.
        """
        component, layout = variable.component(self._program.rank), variable.layout
        if self._is_stepping or not (layout.is_data_sharded or layout.data_owner is not None):
            return component
        if (program := self._program.here()) is None:
            raise errors.not_implemented(
                f"The optimizer's slot {variable.name!r}, of which each device has a part, is read in a loop or a compiled "
                "function of the function given to `strategy.run`.",
                fix="Read it before the loop, or use `zero_stage=0`.",
            )
        with tape.stop_recording(), tf.device(program.device):
            whole = gather_over_data(program, component.read_value(), layout, f"slots/{variable.name}")
        if program.is_eager:
            program.part(EagerFacts).declare(whole, Replicate(), is_of_weights=True)
        else:
            program.part(TapeGradients).note_slot(whole)
        return whole

    def note_written(self, variable: Any) -> None:
        """Notes that the rank's function assigns to `variable`, a parameter or a slot: its shard is cut out of what it gets."""
        if self._is_stepping or self._program.is_eager:
            return
        handle = variable.component(self._program.rank).handle
        program = self._program.innermost()
        while program is not None:
            program.part(GradientStubs).note_gets_sum(handle)
            program = program.outer
