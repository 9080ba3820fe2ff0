"""The schedules of the literature, as functions from sizes to a `Schedule`.

For p ranks, v stages on each and m microbatches, at least p, with a backward that takes twice as long as a forward:

    schedule                  idle / busy time    activations held on a rank, in (stage, microbatch)
    ScheduleGPipe             (p-1) / (v m)       v m
    Schedule1F1B              (p-1) / m           p - rank
    ScheduleInterleaved1F1B   (p-1) / (v m)       (v-1) p + 2 (p - 1 - rank) + 1
    ScheduleZeroBubble        (p-1) / (3 m)       p

The grids of the docstrings have 3 stages (interleaved: 4 on 2 ranks) and 4 microbatches.
"""

import itertools
from collections.abc import Callable, Sequence

import numpy as np

from tfdist import errors
from tfdist.extensions.pipeline.schedules.actions import Action, Phase
from tfdist.extensions.pipeline.schedules.schedule import Schedule, aligned_table


def ScheduleGPipe(num_stages: int, num_microbatches: int, stages_per_rank: int = 1) -> Schedule:
    """All forwards, then all backwards: the simplest schedule, and each rank holds the activations of the whole batch.

    With several stages on a rank each stage takes all microbatches before the rank's next stage begins.

        0F0 0F1 0F2 0F3   .   .   .   . 0B0 0B1 0B2 0B3
          . 1F0 1F1 1F2 1F3   .   . 1B0 1B1 1B2 1B3   .
          .   . 2F0 2F1 2F2 2F3 2B0 2B1 2B2 2B3   .   .

    Args:
        num_stages: how many stages the model has.
        num_microbatches: how many microbatches a batch has.
        stages_per_rank: how many stages each rank has; it must divide `num_stages`.

    Raises:
        ValueError: a size is not a positive integer, or does not divide.

    Source: GPipe, Huang et al. 2019; several stages on a rank: breadth-first pipelines, Lamy-Poirier 2023.
    """
    num_ranks = _num_ranks(num_stages, num_microbatches, stages_per_rank)
    orders = _orders(num_stages, num_ranks, [range(num_microbatches)], lambda _: stages_per_rank * num_microbatches)
    return Schedule(aligned_table(orders), "gpipe")


def Schedule1F1B(num_stages: int, num_microbatches: int, stages_per_rank: int = 1) -> Schedule:
    """One forward, one backward: as idle as GPipe, but rank r holds the activations of at most p - r microbatches.

    After a warmup of p - 1 - r forwards every forward is followed by a backward, until only backwards are left (cooldown).

        0F0 0F1 0F2   .   . 0B0 0F3 0B1   . 0B2   . 0B3
          . 1F0 1F1   . 1B0 1F2 1B1 1F3 1B2   . 1B3   .
          .   . 2F0 2B0 2F1 2B1 2F2 2B2 2F3 2B3   .   .

    Args, Raises: as of `ScheduleGPipe`, with a `stages_per_rank` of 1.

    Source: PipeDream-Flush, Narayanan et al. 2021 (Memory-Efficient Pipeline-Parallel DNN Training).
    """
    num_ranks = _num_ranks(num_stages, num_microbatches, stages_per_rank, "Schedule1F1B")
    orders = _orders(num_stages, num_ranks, [range(num_microbatches)], lambda rank: num_ranks - 1 - rank)
    return Schedule(aligned_table(orders), "1f1b")


def ScheduleInterleaved1F1B(num_stages: int, num_microbatches: int, stages_per_rank: int = 2) -> Schedule:
    """1F1B over v stages on each rank: 1/v of its idle time, for v times the messages and a longer warmup.

    The stages go around the ranks v times. Microbatches travel in groups of p: a rank takes a group through its first stage,
    then through its second one, and so on; back in reverse.

        0F0 0F1 2F0 2F1 0F2 2B0 0F3 2B1 2F2 0B0 2F3 0B1   . 2B2   . 2B3 0B2 0B3
          . 1F0 1F1 3F0 3B0 3F1 3B1 1F2 1B0 1F3 1B1 3F2 3B2 3F3 3B3 1B2 1B3   .

    Where p does not divide m the groups are larger than p, of sizes that differ by one at most. Larger groups idle no longer, but
    a rank holds more: (v-1) (g-p) activations for a first group of g microbatches.

    Args, Raises: as of `ScheduleGPipe`, with a `stages_per_rank`, v, of at least 2. Best m is a multiple of p.

    Source: Megatron-LM, Narayanan et al. 2021 (Efficient Large-Scale Language Model Training on GPU Clusters).
    """
    num_ranks = _num_ranks(num_stages, num_microbatches, stages_per_rank)
    if stages_per_rank < 2:
        raise errors.value_error(
            "`stages_per_rank` of `ScheduleInterleaved1F1B` must be at least 2.",
            stages_per_rank=stages_per_rank,
            fix="Cut the model in more stages, or take `Schedule1F1B`.",
        )
    num_groups = max(1, num_microbatches // num_ranks)
    groups = [group.tolist() for group in np.array_split(range(num_microbatches), num_groups)]  # the larger ones first

    def warmup(rank: int) -> int:
        # Until the first backward can arrive: the first group through all of the rank's stages but the last, and for every rank
        # after it two microbatches, one on the way there and one on the way back.
        return (stages_per_rank - 1) * len(groups[0]) + 2 * (num_ranks - 1 - rank)

    return Schedule(aligned_table(_orders(num_stages, num_ranks, groups, warmup)), "interleaved")


def ScheduleZeroBubble(num_stages: int, num_microbatches: int, stages_per_rank: int = 1) -> Schedule:
    """ZB-H1: 1F1B with the backwards split in I and W; a third of its idle time, and the memory of its first rank on each rank.

    The rank before waits for I only, which is done sooner than B. Rank r runs W, the gradients of its weights, r microbatches
    later, and fills the cooldown with the W that remain. So every rank holds up to p microbatches, not p - r.

        0F0 0F1 0F2   .   . 0I0 0W0 0F3 0I1 0W1 0I2 0W2 0I3 0W3
          . 1F0 1F1   . 1I0 1F2 1I1 1W0 1F3 1I2 1W1 1I3 1W2 1W3
          .   . 2F0 2I0 2F1 2I1 2F2 2I2 2W0 2F3 2I3 2W1 2W2 2W3

    With phases of durations F, I and W, of which W is the shortest, a rank idles (p-1) (F + I - W).

    Args, Raises: as of `ScheduleGPipe`, with a `stages_per_rank` of 1.

    Source: ZB-H1 of Zero Bubble Pipeline Parallelism, Qi et al. 2023.
    """
    num_ranks = _num_ranks(num_stages, num_microbatches, stages_per_rank, "ScheduleZeroBubble")
    orders = _orders(num_stages, num_ranks, [range(num_microbatches)], lambda rank: num_ranks - 1 - rank, Phase.BACKWARD_INPUT)
    for rank, order in orders.items():
        weights = iter([Action(rank, Phase.BACKWARD_WEIGHT, microbatch) for microbatch in range(num_microbatches)])
        actions = []
        for action in order:
            actions.append(action)
            if action.phase is Phase.BACKWARD_INPUT and action.microbatch >= rank:
                actions.append(next(weights))
        orders[rank] = [*actions, *weights]
    return Schedule(aligned_table(orders), "zero_bubble")


def _orders(
    num_stages: int,
    num_ranks: int,
    groups: Sequence[Sequence[int]],
    warmup: Callable[[int], int],
    backward: Phase = Phase.BACKWARD,
) -> dict[int, list[Action]]:
    """Returns what each rank does: `warmup(rank)` forwards, then alternately a forward and a backward, then the other backwards.

    Each of the `groups` of microbatches goes through all stages of a rank before the next group does; back in reverse.
    """
    orders = {}
    for rank in range(num_ranks):
        stages = range(rank, num_stages, num_ranks)
        forwards = [Action(stage, Phase.FORWARD, index) for group in groups for stage in stages for index in group]
        backwards = [Action(stage, backward, index) for group in groups for stage in reversed(stages) for index in group]
        in_turn = itertools.chain(*itertools.zip_longest(forwards[warmup(rank) :], backwards))
        orders[rank] = [*forwards[: warmup(rank)], *filter(None, in_turn)]
    return orders


def _num_ranks(num_stages: int, num_microbatches: int, stages_per_rank: int, name_with_one: str = "") -> int:
    """Checks the sizes of a schedule; those of one with a name here are for one stage on a rank."""
    sizes = {"num_stages": num_stages, "num_microbatches": num_microbatches, "stages_per_rank": stages_per_rank}
    for name, value in sizes.items():
        errors.check_integer(name, value, least=1)
    if num_stages % stages_per_rank:
        lower = max(num_stages // stages_per_rank, 1) * stages_per_rank
        raise errors.value_error(
            f"`num_stages` must be a multiple of `stages_per_rank`, but {stages_per_rank} does not divide {num_stages}.",
            num_stages=num_stages,
            stages_per_rank=stages_per_rank,
            fix=f"Numbers that work: {lower}, {lower + stages_per_rank}.",
        )
    if name_with_one and stages_per_rank > 1:
        raise errors.value_error(
            f"`stages_per_rank` of `{name_with_one}` must be 1.",
            stages_per_rank=stages_per_rank,
            fix="`ScheduleInterleaved1F1B` and `ScheduleGPipe` take several.",
        )
    return num_stages // stages_per_rank
