"""Level 3: collectives over mesh axes, with gradients; their transport; and the plan of a traced step.

Used inside the function that `strategy.run` runs, for example `tfdist.collectives.all_reduce(x, "data")`.
"""

from tfdist.collectives import activations, exclusion, finished_graphs, nested_functions, stalls
from tfdist.collectives.agreement import PlanAgreement
from tfdist.collectives.automatic_order import exempt_from_automatic_order
from tfdist.collectives.branches import trace_branches
from tfdist.collectives.buckets import assign_buckets
from tfdist.collectives.communicator import Communicator
from tfdist.collectives.cross_replica import CrossReplica, cross_replica_of
from tfdist.collectives.eager import EagerProgram
from tfdist.collectives.naive import gather_to_master_all_reduce, naive_master_bytes, ring_bytes
from tfdist.collectives.ops import all_gather, all_reduce, all_to_all, broadcast, reduce_scatter
from tfdist.collectives.parts import OF_EXTENSIONS, OfBranch, Part
from tfdist.collectives.plan import CollectivePlan, CollectiveRecord
from tfdist.collectives.point_to_point import receive, send
from tfdist.collectives.program import RankProgram
from tfdist.collectives.rows import can_be_gathered, gather_rows
from tfdist.collectives.transports.choice import choose_transport
from tfdist.collectives.transports.kernels import NCCL, RING
from tfdist.collectives.transports.member_order import find_member_orders, make_groups
from tfdist.collectives.transports.same_host import SAME_HOST
from tfdist.collectives.where import Where, current_program, in_loop, rank_program, where

# What programs call; the other names are for tfdist's own rooms.
__all__ = [
    "NCCL",
    "RING",
    "CollectivePlan",
    "CollectiveRecord",
    "RankProgram",
    "all_gather",
    "all_reduce",
    "all_to_all",
    "broadcast",
    "choose_transport",
    "current_program",
    "gather_to_master_all_reduce",
    "naive_master_bytes",
    "receive",
    "reduce_scatter",
    "ring_bytes",
    "send",
]
