"""What `use_logical_gpus` refuses, and how it shares out. The card is pretended; tests/null_gpu has TensorFlow split one."""

import pytest
import tensorflow as tf

import tfdist
from tfdist.mesh import logical_gpus
from tfdist.mesh.logical_gpus import gpu_memory

pytestmark = pytest.mark.timeout(60)

MIB = 1 << 20


@pytest.fixture
def configured(monkeypatch):
    """Pretends two cards, with 8 GiB free, and returns what is configured: the visible cards, and the parts of each."""
    cards = [tf.config.PhysicalDevice(f"/physical_device:GPU:{index}", "GPU") for index in range(2)]
    found = {"visible": cards}
    monkeypatch.setattr(tf.config, "list_physical_devices", lambda kind: cards if kind == "GPU" else [])
    monkeypatch.setattr(tf.config, "set_visible_devices", lambda card, kind: found.update(visible=card))
    monkeypatch.setattr(tf.config, "set_logical_device_configuration", found.__setitem__)
    monkeypatch.setattr(tf.config, "get_logical_device_configuration", found.get)
    monkeypatch.setattr(logical_gpus, "gpu_memory", lambda index: (8192 * MIB, 9000 * MIB))
    return found


def limits(configuration):
    return [part.memory_limit for part in configuration]


@pytest.mark.parametrize(("memory", "expected"), [(None, 7168 // 3), (100 * MIB + 5, 100), (8192 * MIB // 3, 2730)])
def test_parts(configured, memory, expected):
    assert tfdist.use_logical_gpus(3, memory, gpu=1) == ["GPU:0", "GPU:1", "GPU:2"]
    card = tf.config.PhysicalDevice("/physical_device:GPU:1", "GPU")
    assert configured["visible"] == card
    assert limits(configured[card]) == [expected] * 3


def test_no_more_than_1_5_gib_are_left_out(configured, monkeypatch):
    monkeypatch.setattr(logical_gpus, "gpu_memory", lambda index: (80 << 30, 80 << 30))
    tfdist.use_logical_gpus(4)
    assert limits(configured[configured["visible"]]) == [(80 * 1024 - 1536) // 4] * 4


def test_again(configured, monkeypatch):
    """The same call asks for what is there; nothing is free by then."""
    tfdist.use_logical_gpus(2)
    monkeypatch.setattr(logical_gpus, "gpu_memory", lambda index: (0, 9000 * MIB))
    assert tfdist.use_logical_gpus(2) == tfdist.use_logical_gpus(2, 3584 * MIB) == ["GPU:0", "GPU:1"]
    with pytest.raises(ValueError, match="too small"):
        tfdist.use_logical_gpus(3)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"n": 0}, "`n` must be a positive integer. Received: n=0"),
        ({"n": 2.0}, "`n` must be a positive integer"),
        ({"n": 2, "gpu": -1}, "`gpu` must be an integer of at least 0"),
        ({"n": 2, "gpu": 2}, "`gpu` must be the number of a card; there are 2, from 0. Received: gpu=2"),
        ({"n": 2, "memory_per_device": 0}, "`memory_per_device` must be a positive integer. .* number of bytes"),
        ({"n": 2, "memory_per_device": "1GB"}, "`memory_per_device` must be a positive integer"),
        ({"n": 2, "memory_per_device": 1000}, "at least 1 MiB"),
        ({"n": 3, "memory_per_device": 3 << 30}, "3 x 3,221,225,472 are 9,663,676,416 bytes, and 8,589,934,592 are free"),
        (
            {"n": 200},
            "GPU 0 is too small for `n` parts: 8,192 MiB are free, so that each would have 36 MiB, and 64 are the least",
        ),
    ],
)
def test_what_is_refused(configured, arguments, message):
    before = dict(configured)
    with pytest.raises(ValueError, match=message):
        tfdist.use_logical_gpus(**arguments)
    assert not any(configured.get(card) for card in before["visible"])
    assert configured["visible"] == before["visible"]


def test_too_late(configured, monkeypatch):
    def refuse(card, parts):
        raise RuntimeError("Virtual devices cannot be modified after being initialized")

    monkeypatch.setattr(tf.config, "set_logical_device_configuration", refuse)
    with pytest.raises(
        RuntimeError, match="must be called before TensorFlow is initialised.* Received: n=2.* top of the program"
    ):
        tfdist.use_logical_gpus(2)


def test_without_a_gpu(monkeypatch):
    monkeypatch.setattr(tf.config, "list_physical_devices", lambda kind: [])
    with pytest.raises(RuntimeError, match=r"needs a GPU .* there is none. Received: n=2. `tfdist.use_logical_cpus\(n\)`"):
        tfdist.use_logical_gpus(2)


def test_without_a_driver():
    with pytest.raises(RuntimeError, match="The CUDA driver "):
        gpu_memory(99)
