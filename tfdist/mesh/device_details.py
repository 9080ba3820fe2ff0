"""Details of devices: the card, the bytes that its allocator has given out, how it multiplies float32."""

import contextlib
import dataclasses
import os
from collections.abc import Iterator, Sequence

import tensorflow as tf

from tfdist.mesh.devices import short_name


@dataclasses.dataclass(frozen=True)
class DeviceDetails:
    """One logical device of this process."""

    device: str  # its name, such as "GPU:0"
    card: str  # what it is, in the words of its driver; "" where that is not known
    physical_index: int  # which of the physical devices of its type it is, or is a part of
    parts: int  # in how many logical devices that one is split
    compute_capability: tuple[int, int] | None  # of a GPU, such as (9, 0)
    memory_bytes: int | None  # what it may use, if known: the limit of a part of a GPU, the machine's memory of a CPU
    memory_growth: bool  # whether the allocator takes a GPU's memory when it needs it, not all at once


def details_of(devices: Sequence[str]) -> list[DeviceDetails]:
    """Returns what is known of `devices`, logical devices of this process."""
    found, machine_bytes = {}, os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    for kind in ("CPU", "GPU"):
        index = 0
        for physical_index, physical in enumerate(tf.config.list_physical_devices(kind)):
            if physical not in tf.config.get_visible_devices(kind):
                continue
            told = tf.config.experimental.get_device_details(physical)
            parts = tf.config.get_logical_device_configuration(physical) or [None]
            for part in parts:
                limit = getattr(part, "memory_limit", None)
                found[kind, index] = DeviceDetails(
                    device=f"{kind}:{index}",
                    card=told.get("device_name", ""),
                    physical_index=physical_index,
                    parts=len(parts),
                    compute_capability=told.get("compute_capability"),
                    memory_bytes=machine_bytes if kind == "CPU" else limit and limit * 2**20,
                    memory_growth=kind == "GPU" and bool(tf.config.experimental.get_memory_growth(physical)),
                )
                index += 1
    specs = map(tf.DeviceSpec.from_string, devices)
    return [found[spec.device_type, spec.device_index] for spec in specs]


def allocated_bytes(device: str) -> int:
    """Returns what the allocator of a GPU has given out now. Raises ValueError for a CPU, whose allocator does not count."""
    return int(tf.config.experimental.get_memory_info(short_name(device))["current"])


def peak_bytes(device: str) -> int:
    """Returns the most bytes that the allocator of a GPU had given out at once since `reset_peak_bytes`."""
    return int(tf.config.experimental.get_memory_info(short_name(device))["peak"])


def reset_peak_bytes(device: str) -> None:
    """Begins to count the peak of a GPU's allocator anew."""
    tf.config.experimental.reset_memory_stats(short_name(device))


def tensor_float_32_is_on() -> bool:
    """Whether products of float32 may be taken in TensorFloat-32 on GPUs that have it (compute capability 8.0 and above)."""
    return bool(tf.config.experimental.tensor_float_32_execution_enabled())


@contextlib.contextmanager
def tensor_float_32(on: bool) -> Iterator[None]:
    """A block in which products of float32 are, or are not, taken in TensorFloat-32 on GPUs that have it."""
    before = tensor_float_32_is_on()
    tf.config.experimental.enable_tensor_float_32_execution(on)
    try:
        yield
    finally:
        tf.config.experimental.enable_tensor_float_32_execution(before)
