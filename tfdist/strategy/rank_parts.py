"""The parts of a rank's state: made here, from top to bottom, each after those that its constructor asks for.

In this order they settle before a collective, and close when the rank's function has returned: what lets rows meet is mended
before gradients are summed, and these before parameters are gathered again and what sharded ones have left is reduced.
"""

from tfdist.collectives import RankProgram
from tfdist.keras_layers.statistics import Statistics
from tfdist.losses.batch_part import RankBatch
from tfdist.losses.undivided_batch import GivenBatch
from tfdist.metrics.arguments import GatheredBatch
from tfdist.metrics.updates import RankMetrics
from tfdist.optimizers.loss_scaling import EarlyScales
from tfdist.placements.eager import EagerFacts
from tfdist.placements.facts import Facts
from tfdist.placements.opening import Opening
from tfdist.placements.plan import RepairPlan
from tfdist.placements.rank_rows import RankRows
from tfdist.placements.redistribute import Redistribution
from tfdist.placements.remaking import Remaking
from tfdist.placements.repair import Repair
from tfdist.placements.totals import Totals
from tfdist.sharding.carried_gradients import CarriedGradients
from tfdist.sharding.gradient_numbers import GradientNumbers
from tfdist.sharding.gradient_stubs import GradientStubs
from tfdist.sharding.gradient_weight import GradientWeight
from tfdist.sharding.known_sums import KnownSums
from tfdist.sharding.recomputation import Recomputation
from tfdist.sharding.slot_reads import SlotReads
from tfdist.sharding.tape_gradients import TapeGradients
from tfdist.sharding.unshard import UnshardSchedule


def make_parts(program: RankProgram, most_gathered_bytes: int) -> None:
    """Makes the parts of the state of one rank's `program`; at most `most_gathered_bytes` of rows are gathered for one tensor."""
    program.make(RankRows, Totals)  # the rank's rows, and numbers of all rows
    if program.is_eager:
        program.make(EagerFacts)
    else:
        program.make(Facts, Redistribution, Remaking, RepairPlan, Opening, Repair)  # what tensors are, and how that is mended
    program.make(Statistics, RankBatch, GivenBatch, GatheredBatch, RankMetrics, EarlyScales)  # layers, losses, metrics
    program.make(GradientWeight, KnownSums, CarriedGradients, GradientNumbers, GradientStubs, TapeGradients)
    program.make(Recomputation, UnshardSchedule, SlotReads)  # parameters, and an optimizer's slots
    if not program.is_eager and program.mesh.size("data") > 1:
        program.part(RepairPlan).most_bytes = most_gathered_bytes
        if not program.mesh.splits_layers:
            program.selected_by = lambda here, x: x if (whole := here.part(Repair).whole(x, "branch")) is None else whole
            program.returned_by = lambda here, x: here.part(Repair).mended(x, "branch")
