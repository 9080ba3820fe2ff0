"""The order in which TensorFlow's kernels number the members of a group.

They number them in an order of their own: devices by name, tasks as strings (10 before 2), GPUs by their links. A group of the
mesh may be in another order. So each group finds the kernels' order once, by gathering its members' places, and rows are permuted
locally where it differs. Workers do that when the strategy is made (`find_member_orders`): while tracing, one of them may get
there when the others do not.
"""

import tensorflow as tf

from tfdist.collectives.communicator import Communicator
from tfdist.collectives.emission import Emission
from tfdist.collectives.plan import CollectivePlan, Ranks
from tfdist.collectives.transports.kernel_settings import TIMEOUT_SECONDS
from tfdist.mesh import DATA_AXES, MESH_AXES


def find_member_orders(communicator: Communicator) -> None:
    """Finds the order of every group of the mesh that has a local rank. All workers call it at once."""
    for mesh_axis in (*MESH_AXES, *DATA_AXES):
        for ranks in communicator.mesh.groups(mesh_axis):
            if len(ranks) > 1 and set(ranks) & set(communicator.local_ranks):
                _order(communicator, ranks)


def make_groups(communicator: Communicator, plan: CollectivePlan) -> None:
    """Has the groups of `plan` that span workers meet for the first time, those that have not. All workers call it at once.

    A group's first collective with NCCL waits for all members, and meanwhile its process makes no other group. So two workers
    that come to two groups in different orders, each by a device of its own, would wait for each other: here the order is one.
    """
    for ranks in sorted(plan.sequences()):
        if set(ranks) - set(communicator.local_ranks):
            _order(communicator, ranks)


def in_kernel_order(program: Emission, x: tf.Tensor, ranks: Ranks) -> tf.Tensor:
    """Returns the rows of `x`, one per member in group order, in the kernels' order."""
    order = _order(program.communicator, ranks)
    return x if order == sorted(order) else tf.gather(x, order)


def in_group_order(program: Emission, x: tf.Tensor, ranks: Ranks) -> tf.Tensor:
    """Returns `x`, equally many rows of each member in the kernels' order, in group order."""
    order = _order(program.communicator, ranks)
    if order == sorted(order):
        return x
    inverse = [order.index(place) for place in range(len(order))]
    return tf.reshape(tf.gather(tf.reshape(x, [len(ranks), -1]), inverse), tf.shape(x))


def _order(communicator: Communicator, ranks: Ranks) -> list[int]:
    """Returns the places in `ranks` of the members, in the order in which the kernels number them."""
    orders = communicator.member_orders
    if ranks not in orders:
        with tf.init_scope():
            orders[ranks] = [int(place) for place in _gather_places(communicator, ranks)]
    return orders[ranks]


def _gather_places(communicator: Communicator, ranks: Ranks) -> tf.Tensor:
    @tf.function(autograph=False)
    def gather() -> tf.Tensor:
        gathered = []
        for place, rank in enumerate(ranks):
            if rank not in communicator.local_ranks:
                continue
            with tf.device(communicator.mesh.devices[rank]):
                gathered.append(
                    tf.raw_ops.CollectiveGatherV2(
                        input=tf.constant([place], tf.float32),
                        ordering_token=[communicator.token(rank)],
                        group_size=len(ranks),
                        group_key=communicator.group_key(ranks),
                        instance_key=0,  # `InstanceKeys` starts higher
                        communication_hint=communicator.transport.hint,
                        timeout_seconds=TIMEOUT_SECONDS,
                    )
                )
        return gathered[0]

    # A concrete function is never run eagerly, whatever `tf.config.run_functions_eagerly` says.
    return gather.get_concrete_function()()
