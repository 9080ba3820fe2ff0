"""Which devices there are. GPUs are pretended."""

import pytest
import tensorflow as tf

import tfdist
from tfdist.mesh import default_devices, resolve_devices, use_logical_cpus, uses_physical_gpus

CPU = "/job:localhost/replica:0/task:0/device:CPU:{}".format
GPU = "/job:localhost/replica:0/task:0/device:GPU:{}".format


@pytest.fixture
def gpus(monkeypatch):
    """Pretends 4 CPUs and as many logical and physical GPUs as it is called with."""

    def pretend(logical, physical):
        devices = {
            "CPU": [tf.config.LogicalDevice(f"/device:CPU:{index}", "CPU") for index in range(4)],
            "GPU": [tf.config.LogicalDevice(f"/device:GPU:{index}", "GPU") for index in range(logical)],
        }
        cards = [tf.config.PhysicalDevice(f"/physical_device:GPU:{index}", "GPU") for index in range(physical)]
        monkeypatch.setattr(
            tf.config,
            "list_logical_devices",
            lambda kind=None: devices[kind] if kind else devices["CPU"] + devices["GPU"],
        )
        monkeypatch.setattr(tf.config, "list_physical_devices", lambda kind=None: cards if kind == "GPU" else [])

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
    gpus(logical=3, physical=3)
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
    gpus(logical=2, physical=2)
    with pytest.raises(ValueError, match=r"must all be of one type, not a mix of \['CPU', 'GPU'\]") as error:
        resolve_devices(["GPU:0", "CPU:0"])
    assert "Received: devices=['GPU:0', 'CPU:0']" in str(error.value)


@pytest.mark.parametrize("devices", [[], ["CPU:0", "CPU:0"], ["CPU:9"], "CPU:0"])
def test_the_strategy_refuses_them_too(devices):
    with pytest.raises(ValueError, match="`devices`"):
        tfdist.ShardedStrategy(devices)


@pytest.mark.parametrize(
    ("devices", "logical", "physical", "expected"),
    [
        ([CPU(0), CPU(1)], 0, 0, False),
        ([GPU(0), GPU(1)], 2, 2, True),
        ([GPU(1)], 4, 4, True),
        ([GPU(0), GPU(1)], 2, 1, False),
        ([GPU(0), GPU(1)], 4, 3, False),
        ([GPU(0), CPU(1)], 2, 2, False),
    ],
)
def test_uses_physical_gpus(gpus, devices, logical, physical, expected):
    gpus(logical=logical, physical=physical)
    assert uses_physical_gpus(devices) is expected
