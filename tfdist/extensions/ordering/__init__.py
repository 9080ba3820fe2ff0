"""In which order a step is queued on GPUs, whose collectives wait for all that is queued when they begin.

host_run_ahead    how far the host runs ahead of a GPU
queue_order       gradients of weights after activations: in which order operations are queued
side_chain        collectives that are emitted before those that are to come before them
"""

from tfdist.collectives.step_order import ORDER
from tfdist.extensions.ordering.queue_order import QueueOrder

ORDER.now = QueueOrder
