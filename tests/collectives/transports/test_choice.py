"""Which transport is chosen. GPUs are pretended."""

import pytest
from ranks import strategy_on

from tfdist.collectives import NCCL, RING, choose_transport
from tfdist.collectives.transports import choice
from tfdist.mesh import are_cpus

pytestmark = pytest.mark.timeout(120)


def test_cpus_take_the_ring(cpus):
    assert choose_transport(cpus) is RING
    assert strategy_on(2).extended.communicator.transport is RING


@pytest.mark.parametrize(("kind", "implementation"), [("CPU", "AUTO"), ("CPU", "RING"), ("GPU", "AUTO")])
def test_workers_take_the_ring_in_pieces(monkeypatch, kind, implementation):
    """GPUs that are not whole ones take the ring, which knows what is on a GPU; CPUs may find memory that they share."""
    monkeypatch.setattr(choice, "uses_physical_gpus", lambda devices: False)
    devices = [f"/job:worker/replica:0/task:{index}/device:{kind}:0" for index in range(2)]
    assert choose_transport(devices, implementation, is_multi_worker=True) is choice.RING_BETWEEN_WORKERS
    assert are_cpus(devices) == (kind == "CPU")


@pytest.mark.parametrize("physical", [True, False])
def test_nccl_on_physical_gpus_only(monkeypatch, physical):
    asked = []
    monkeypatch.setattr(choice, "uses_physical_gpus", lambda devices: asked.append(devices) or physical)
    assert choose_transport(["GPU:0", "GPU:1"]) is (NCCL if physical else RING)
    assert asked == [["GPU:0", "GPU:1"]]
