"""Level 3: collectives over mesh axes, with gradients; their transport; and the plan of a traced step.

Used inside the function that `strategy.run` runs, for example `tfdist.collectives.all_reduce(x, "data")`.
"""

from tfdist.collectives import activations
from tfdist.collectives.agreement import PlanAgreement
from tfdist.collectives.buckets import assign_buckets
from tfdist.collectives.cross_replica import CrossReplica, cross_replica_of
from tfdist.collectives.eager import EagerProgram, Meeting
from tfdist.collectives.host_groups import abort_exchanges, connect_exchanges
from tfdist.collectives.naive import gather_to_master_all_reduce, naive_master_bytes, ring_bytes
from tfdist.collectives.ops import all_gather, all_reduce, all_to_all, broadcast, reduce_scatter
from tfdist.collectives.plan import CollectivePlan, CollectiveRecord
from tfdist.collectives.point_to_point import receive, send
from tfdist.collectives.program import Communicator, RankProgram
from tfdist.collectives.transport import NCCL, RING, Transport, choose_transport
from tfdist.collectives.where import Where, current_program, rank_program, where
from tfdist.collectives.wire import find_kernel_orders

__all__ = [
    "NCCL",
    "RING",
    "CollectivePlan",
    "CollectiveRecord",
    "Communicator",
    "CrossReplica",
    "EagerProgram",
    "Meeting",
    "PlanAgreement",
    "RankProgram",
    "Transport",
    "Where",
    "abort_exchanges",
    "activations",
    "all_gather",
    "all_reduce",
    "all_to_all",
    "assign_buckets",
    "broadcast",
    "choose_transport",
    "connect_exchanges",
    "cross_replica_of",
    "current_program",
    "find_kernel_orders",
    "gather_to_master_all_reduce",
    "naive_master_bytes",
    "rank_program",
    "receive",
    "reduce_scatter",
    "ring_bytes",
    "send",
    "where",
]
