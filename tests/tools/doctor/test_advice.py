"""What the doctor advises: each piece where its sign was seen, and nothing where all is well."""

import dataclasses

import pytest

from tfdist.tools.doctor.advice import advice
from tfdist.tools.doctor.check import Outcome, Result, Status
from tfdist.tools.doctor.report import Report
from tfdist.tools.doctor.topology import Card, Topology

CARD = Card(0, "GPU-0", "H100", 80 * 2**30, 4 * 2**20, "550", 63.0)
NVLINKS = Topology(
    (CARD, dataclasses.replace(CARD, index=1, uuid="GPU-1")), {(0, 1): "NV18"}, {0: 25.0, 1: 25.0}, {"mlx5_0": 50.0}
)


def gpu(index, **changed):
    details = {"rank": index, "device": f"GPU:{index}", "card": "H100", "uuid": f"GPU-{index}", "compute_capability": "9.0"}
    return {**details, "parts": 1, "memory_bytes": None, "memory_growth": False, **changed}


def outcome(name, data=None, *, status=Status.HOLDS, summary="", log=()):
    return Outcome((Result(name, status, summary, 1.0, data or {}, log),))


def machine(*more, environment=None, topology=NVLINKS, hosts=("one",), speed=300.0, size=64 * 2**20, devices=None, **changed):
    """Returns the outcomes of a healthy machine with two GPUs, but for what is changed."""
    devices = devices or [gpu(0), gpu(1)]
    data = {"world_size": 2, "transport": "NCCL", "reason": "whole GPUs", "tensor_float_32": True, "has_driver": True, **changed}
    share = len(devices) // len(hosts)
    split = [{**data, "host": host, "devices": devices[i * share : (i + 1) * share]} for i, host in enumerate(hosts)]
    rows = [{"bytes": size, "seconds": 1e-3, "algorithm_gb_per_second": speed, "bus_gb_per_second": speed}]
    return [
        outcome("versions", {"versions": {"TensorFlow": "2.21.0"}, "environment": environment or {}}),
        outcome("topology", topology.to_json()),
        Outcome(tuple(Result("devices", Status.HOLDS, "", 1.0, one) for one in split)),
        outcome("bandwidth/all_reduce", {"sizes": rows}),
        *more,
    ]


def error(name, summary, *log):
    return outcome(name, status=Status.ERROR, summary=summary, log=log)


CPUS = {"devices": [gpu(i, device=f"CPU:{i}", card="", uuid="", compute_capability=None) for i in range(2)]}
USED = Topology((dataclasses.replace(CARD, used_bytes=3 * 2**30), NVLINKS.cards[1]), NVLINKS.links, {0: 25.0})

CASES = {
    "no GPU is seen": (machine(transport="ring", **CPUS), "TensorFlow sees no GPU", "tensorflow[and-cuda]"),
    "hidden": (
        machine(environment={"CUDA_VISIBLE_DEVICES": "-1"}, transport="ring", **CPUS),
        "CUDA_VISIBLE_DEVICES=-1 hides the GPUs",
    ),
    "out of memory": (
        machine(error("memory/zero_stage_0", "ResourceExhaustedError: OOM when allocating tensor")),
        "memory/zero_stage_0 ran out of memory",
        "TF_GPU_ALLOCATOR=cuda_malloc_async",
        "TF_FORCE_GPU_ALLOW_GROWTH=true",
    ),
    "in use": (machine(topology=USED), "GPU 0 (H100): 3.0 GiB were in use", "TF_FORCE_GPU_ALLOW_GROWTH=true"),
    "NCCL": (
        machine(error("bandwidth/send", "InternalError: x", "NCCL: unhandled system error")),
        "NCCL failed in bandwidth/send",
        "NCCL_DEBUG=INFO",
    ),
    "hang": (
        machine(error("bandwidth/send", "still running after 120 s (--timeout), and was ended")),
        "bandwidth/send did not end",
        "NCCL_P2P_DISABLE=1",
    ),
    "no P2P": (machine(environment={"NCCL_P2P_DISABLE": "1"}), "NCCL_P2P_DISABLE is set"),
    "no InfiniBand": (machine(environment={"NCCL_IB_DISABLE": "1"}, hosts=("a", "b")), "NCCL_IB_DISABLE is set"),
    "slow": (machine(speed=20.0), "all_reduce moves 20 GB/s over NV18 (NVLink), of which 450 GB/s is said", "NCCL_P2P_LEVEL"),
    "slow network": (machine(speed=2.0, hosts=("a", "b")), "all_reduce moves 2 GB/s", "NCCL_SOCKET_IFNAME", "NCCL_IB_HCA"),
    "no shared memory": (
        machine(reason="the workers could not share memory (they see no /dev/shm in common)", transport="ring"),
        "--ipc",
    ),
    "unlike": (machine(devices=[gpu(0), gpu(1, card="A100", compute_capability="8.0")]), "The cards differ (A100, H100)"),
    "old": (machine(devices=[gpu(i, compute_capability="7.5") for i in range(2)]), "7.5 has no bfloat16: use mixed_float16"),
}


@pytest.mark.parametrize("outcomes", [machine(), machine(speed=1.0, size=2**20), machine(environment={"NCCL_P2P_DISABLE": "0"})])
def test_nothing_is_said_where_nothing_was_seen(outcomes):
    assert advice(outcomes) == []
    assert "What to change" not in str(Report(tuple(outcomes), "now", 1.0))


@pytest.mark.parametrize("case", CASES)
def test_what_was_seen_is_said(case):
    outcomes, *words = CASES[case]
    (text,) = advice(outcomes)
    assert all(word in text for word in words), text
    assert f"  * {text}" in str(Report(tuple(outcomes), "now", 1.0)).splitlines()


def test_older_still():
    (no_cores, no_bfloat16) = advice(machine(devices=[gpu(i, compute_capability="6.1") for i in range(2)]))
    assert "no tensor cores" in no_cores and "no bfloat16" in no_bfloat16


def test_memory_that_another_doctor_may_have_taken_is_no_sign():
    outcomes = machine(topology=USED)
    outcomes[1] = Outcome(outcomes[1].results * 2)
    assert advice(outcomes) == []


def test_nothing_is_said_of_what_did_not_run():
    assert advice([]) == []
    assert advice([error("devices", "ValueError: no"), error("topology", "OSError: no")]) == []


def test_report():
    went_wrong = error("parity/pipeline_2", "still running after 120 s (--timeout), and was ended", "File a", "File b")
    report = Report(tuple(machine(went_wrong)), "2026-01-01T00:00:00+00:00", 61.0, ("--quick",))
    text = str(report)
    assert text.startswith("tfdist doctor --quick (2026-01-01T00:00:00+00:00, 61 s)\n")
    assert "  link: NV18 (NVLink), said to move 450 GB/s in a direction" in text
    assert "  transport: NCCL, because whole GPUs" in text
    assert "67,108,864 1,000 300 300 67%" in " ".join(text.split())
    assert "  parity/pipeline_2 error: still running after 120 s (--timeout), and was ended\n    | File a\n    | File b" in text
    assert text.endswith("Not all holds; of 5 checks: 4 hold, 1 with an error.")
    assert not report.holds and report.to_json()["link"]["gb_per_second"] == 450.0
