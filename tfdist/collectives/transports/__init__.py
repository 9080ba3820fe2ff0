"""How bytes travel between ranks: TensorFlow's kernels, or, between CPU workers of one machine, memory that they share."""

from tfdist.collectives.transports.choice import choose_transport
from tfdist.collectives.transports.chunked import Chunked
from tfdist.collectives.transports.kernels import NCCL, RING
from tfdist.collectives.transports.member_order import find_member_orders, make_groups
from tfdist.collectives.transports.transport import MessageTransport, Transport

__all__ = [
    "NCCL",
    "RING",
    "Chunked",
    "MessageTransport",
    "Transport",
    "choose_transport",
    "find_member_orders",
    "make_groups",
]
