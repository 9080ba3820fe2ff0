"""How the workers of one machine reach each other: as those of other machines, or by what an extension connects."""

from tfdist.collectives.communicator import Communicator
from tfdist.extensible import Place
from tfdist.runtime import Coordination


class AsOtherHosts:
    """Workers of one machine reach each other as those of other machines do: by TensorFlow's ring, over gRPC."""

    def connect(
        self,
        communicator: Communicator,
        store: Coordination,
        timeout_seconds: float,
        *,
        is_wanted: bool = True,
        message_axis: str | None = None,
    ) -> None:
        """Connects the groups of `communicator` that share a machine: sets its `transports`, or its `message_transports`.

        All workers call it at once. If it is not wanted on one, none is connected. `message_axis` is the mesh axis along which
        ranks send each other messages; None if they send none.
        """

    def abort(self, reason: str) -> None:
        """Makes every collective and message of this process that runs so, or will run, fail with `reason`."""


SAME_HOST: Place[AsOtherHosts] = Place(AsOtherHosts())
