"""Programs of two processes with two null GPUs each that would hang, and do when what prevents it is taken out.

python -m tests.null_gpu.deadlocks NAME [unguarded]
"""

from __future__ import annotations

import sys
import time
from collections.abc import Callable
from unittest import mock

import tensorflow as tf

import tfdist
from tests.null_gpu.running import report
from tests.ranks import rank_id
from tests.strategy.failure_cases import circle
from tfdist.collectives import PlanAgreement, current_program
from tfdist.strategy import multi_worker_extended


def communicators() -> None:
    """The devices of a process come to the first collectives of their groups one by one, and each process to another one first.

    These groups are the mesh's, which meet when the strategy is made; not here, as others do not. And here the ring, which
    makes no communicator, lets their members know each other before: else they would when the last one comes, and
    communicators would be made in different orders once in many runs only.
    """
    without_nccl = mock.patch.object(multi_worker_extended, "NCCL", None)  # in TensorFlow's servers, which else have no ring
    with without_nccl, mock.patch.object(multi_worker_extended, "find_member_orders", lambda communicator: None):
        strategy = tfdist.MultiWorkerShardedStrategy(tensor_parallel_size=2)

    def meet() -> tf.Tensor:
        program = current_program("`meet`")
        return tf.raw_ops.CollectiveGatherV2(
            input=tf.ones([1]),
            ordering_token=[program.token()],
            group_size=2,
            group_key=program.communicator.group_key(program.group_ranks("data")),
            instance_key=1 << 29,
            communication_hint="ring",
        )

    def wait(x: tf.Tensor) -> tf.Tensor:
        time.sleep(2)
        return x

    def add() -> tf.Tensor:
        x = tf.ones([3])
        if rank_id() in (1, 2):
            x = tf.ensure_shape(tf.py_function(wait, [x], tf.float32), [3])
        return tfdist.collectives.all_reduce(x, "data")

    tf.function(lambda: strategy.run(meet))()
    tf.function(lambda: strategy.run(add))()


PROGRAMS: dict[str, Callable[[], None]] = {"circle": circle, "communicators": communicators}
GUARDS = {
    "circle": mock.patch.object(PlanAgreement, "check", lambda self, plan: None),
    "communicators": mock.patch.object(multi_worker_extended, "make_groups", lambda communicator, plan: None),
}

if __name__ == "__main__":
    name = sys.argv[1]
    if "unguarded" in sys.argv:
        GUARDS[name].start()
    try:
        PROGRAMS[name]()
    except RuntimeError as error:
        report("refused", str(error))
        raise
    report("ended", True)
