"""How far the host runs ahead of a rank's GPU in a pipeline.

A message between two GPUs waits for all that both have queued when it begins: a copy does, and so does one of NCCL's sums
(`tfdist.sharding.host_lead`). A host that runs ahead has queued the next actions by then, which the other rank waits for, too:

    GPU 0          | 0F0 | 0F1 |                        a message is 0F0's result on its way to GPU 1
    its copies                 | message | message
    GPU 1                                | 1F0 ...

So what follows a message's source is queued when the GPU has computed the source, and the message has begun long before:

    GPU 0          | 0F0 | 0F1 | ...
    its copies           | message
    GPU 1                          | 1F0 ...

That is so for the next action; and for the gradients of a stage's weights, which stand behind those of its inputs.

Note: on a chain. Where messages have an order, one begins when that before it is over. What stands behind a message's source
waits for that end, too: the GPU must hear of it first, and so the message begins before. Of an action's source the message is not
emitted yet, and that before it is the last on the chain; behind an action its message may be, or others that come first in the
order of all ranks, and all but the last are over. These edges lead from what is earlier in that order to what is later, and so
close no circle.

The GPU waits for the host once for each action, and twice for a backward.
"""

from collections.abc import Sequence

import tensorflow as tf

from tfdist.collectives import RankProgram, SideChain, point_to_point
from tfdist.sharding import host_lead


class Pace:
    """That of one rank in one trace."""

    def __init__(self, program: RankProgram | None):
        ranks = () if program is None or program.is_eager else program.group_ranks("pipe")
        self._program = program
        self.is_limited = len(ranks) > 1 and program.transport_of(ranks).waits_for_queue
        self._is_chain = self.is_limited and any(
            point_to_point.message_transport(program, other).is_in_order for other in ranks if other != program.rank
        )

    def behind(self, source: Sequence[tf.Operation], *, is_sent: bool) -> Sequence[tf.Operation]:
        """Returns what operations wait for that come behind `source`, whose message `is_sent` already, or will be next."""
        if not (self.is_limited and source):
            return source
        emitted = self._program.attachment(SideChain).emitted() if self._is_chain else []
        before = emitted[:-1] if is_sent else emitted
        return [host_lead.on_device(self._program, [*source, *before[-1:]], "actions")]
