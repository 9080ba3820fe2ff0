"""Which devices there are. GPUs are pretended."""

import pytest
import tensorflow as tf

import tfdist
from tfdist.mesh import default_devices, logical_gpus, resolve_devices, use_logical_cpus, uses_physical_gpus, worker_devices

CPU = "/job:localhost/replica:0/task:0/device:CPU:{}".format
GPU = "/job:localhost/replica:0/task:0/device:GPU:{}".format


@pytest.fixture
def gpus(monkeypatch):
    """Pretends 4 CPUs and visible GPUs in as many parts as it is called with."""

    def pretend(*parts):
        devices = {
            "CPU": [tf.config.LogicalDevice(f"/device:CPU:{index}", "CPU") for index in range(4)],
            "GPU": [tf.config.LogicalDevice(f"/device:GPU:{index}", "GPU") for index in range(sum(parts))],
        }
        cards = [tf.config.PhysicalDevice(f"/physical_device:GPU:{index}", "GPU") for index in range(len(parts))]
        limits = {
            card: [tf.config.LogicalDeviceConfiguration(100)] * number if number > 1 else None
            for card, number in zip(cards, parts, strict=True)
        }
        monkeypatch.setattr(
            tf.config,
            "list_logical_devices",
            lambda kind=None: devices[kind] if kind else devices["CPU"] + devices["GPU"],
        )
        monkeypatch.setattr(tf.config, "get_visible_devices", lambda kind=None: cards if kind == "GPU" else [])
        monkeypatch.setattr(tf.config, "get_logical_device_configuration", limits.get)

    return pretend


def test_use_logical_cpus_again(cpus):
    tf.constant(0)
    assert use_logical_cpus(4) == cpus == ["CPU:0", "CPU:1", "CPU:2", "CPU:3"]


@pytest.mark.parametrize("n", [1, 3, 5])
def test_use_logical_cpus_too_late(n):
    tf.constant(0)
    with pytest.raises(RuntimeError, match=r"before TensorFlow is initialised.* 4 CPU device\(s\)") as error:
        use_logical_cpus(n)
    assert f"Received: n={n}." in str(error.value)
    assert len(tf.config.list_logical_devices("CPU")) == 4


@pytest.mark.parametrize("n", [0, -2, 2.0, True, "2", None])
def test_use_logical_cpus_needs_a_positive_integer(n):
    with pytest.raises(ValueError, match="`n` must be a positive integer") as error:
        use_logical_cpus(n)
    assert f"Received: n={n!r}." in str(error.value)


def test_default_devices_are_all_cpus_without_gpus():
    assert resolve_devices(None) == resolve_devices(default_devices()) == tuple(CPU(index) for index in range(4))


def test_default_devices_are_all_gpus(gpus):
    gpus(1, 1, 1)
    assert resolve_devices(None) == resolve_devices(default_devices()) == tuple(GPU(index) for index in range(3))


def test_resolve_keeps_the_order():
    assert resolve_devices(["CPU:2", "/cpu:0", CPU(1)]) == (CPU(2), CPU(0), CPU(1))
    assert resolve_devices(("CPU:3",)) == (CPU(3),)


@pytest.mark.parametrize("devices", ["CPU:0", {"CPU:0"}, 2, tf.constant(["CPU:0"])])
def test_resolve_needs_a_list(devices):
    with pytest.raises(ValueError, match="`devices` must be a list of device names") as error:
        resolve_devices(devices)
    assert f"Received: devices={devices!r}" in str(error.value)


def test_resolve_none_at_all():
    with pytest.raises(ValueError, match="`devices` must name at least one device") as error:
        resolve_devices([])
    assert "Received: devices=[]" in str(error.value)


@pytest.mark.parametrize("devices", [["nonsense"], ["CPU:0", "GPU"], ["CPU:0", None], [0, 1], ["CPU"], ["/job:worker"]])
def test_resolve_malformed(devices):
    with pytest.raises(ValueError, match="`devices` ") as error:
        resolve_devices(devices)
    assert f"devices={devices!r}" in str(error.value)


def test_resolve_duplicates_in_other_words():
    with pytest.raises(ValueError, match="`devices` must be distinct") as error:
        resolve_devices(["CPU:0", "CPU:1", "/device:CPU:0"])
    assert f"more than once: {[CPU(0)]!r}" in str(error.value)
    assert "devices=['CPU:0', 'CPU:1', '/device:CPU:0']" in str(error.value)


def test_resolve_unknown():
    with pytest.raises(ValueError, match="`devices` names devices that this machine does not have") as error:
        resolve_devices(["CPU:0", "CPU:4", "GPU:0"])
    assert "not have: ['CPU:4', 'GPU:0']. It has ['CPU:0', 'CPU:1', 'CPU:2', 'CPU:3']" in str(error.value)
    assert "Received: devices=['CPU:0', 'CPU:4', 'GPU:0']" in str(error.value)
    assert "use_logical_cpus" in str(error.value)


def test_resolve_mixed(gpus):
    gpus(1, 1)
    with pytest.raises(ValueError, match=r"must all be of one type, not a mix of \['CPU', 'GPU'\]") as error:
        resolve_devices(["GPU:0", "CPU:0"])
    assert "Received: devices=['GPU:0', 'CPU:0']" in str(error.value)


@pytest.mark.parametrize("devices", [[], ["CPU:0", "CPU:0"], ["CPU:9"], "CPU:0"])
def test_the_strategy_refuses_them_too(devices):
    with pytest.raises(ValueError, match="`devices`"):
        tfdist.ShardedStrategy(devices)


@pytest.mark.parametrize(
    ("devices", "parts", "expected"),
    [
        ([CPU(0), CPU(1)], (), False),
        ([GPU(0), GPU(1)], (1, 1), True),
        ([GPU(1)], (1, 1, 1, 1), True),
        ([GPU(0), GPU(1)], (2,), False),
        ([GPU(0), GPU(1)], (2, 1, 1), False),
        ([GPU(0), CPU(1)], (1, 1), False),
    ],
)
def test_uses_physical_gpus(gpus, devices, parts, expected):
    gpus(*parts)
    assert uses_physical_gpus(devices) is expected


def test_gpus_that_the_launcher_splits_are_not_whole(gpus, monkeypatch):
    """Two workers may share one, each with one part of it."""
    gpus(1)
    assert uses_physical_gpus([GPU(0)])
    monkeypatch.setenv("TFDIST_LOGICAL_GPUS", "1")
    assert not uses_physical_gpus([GPU(0)])


def test_the_launcher_asks_for_parts(gpus, monkeypatch):
    gpus(1, 1)
    assert worker_devices() == ("GPU", 2)
    gpus(3)
    assert worker_devices() == ("GPU", 3)
    asked = []
    monkeypatch.setattr(logical_gpus, "use_logical_gpus", lambda n, memory: asked.append((n, memory)))
    monkeypatch.setattr(logical_gpus, "gpu_memory", lambda index: (1 << 30, 80 << 30))
    monkeypatch.setattr(tf.config, "list_physical_devices", lambda kind: [f"{kind}:0"])
    monkeypatch.setenv("TFDIST_LOGICAL_GPUS", "3")
    assert worker_devices() == ("GPU", 3)
    monkeypatch.setenv("TFDIST_WORKERS_PER_GPU", "2")
    default_devices()
    assert asked == [(3, None), (3, (77 << 30) // 6)]
    monkeypatch.setenv("TFDIST_LOGICAL_GPUS", "no")
    with pytest.raises(ValueError, match="TFDIST_LOGICAL_GPUS must be a positive integer"):
        worker_devices()
