"""The devices of this machine: which to use, and how to split the CPU for trying things without GPUs."""

from collections.abc import Sequence

import tensorflow as tf

from tfdist import errors
from tfdist.mesh.device_mesh import canonical
from tfdist.mesh.logical_gpus import split_gpu_as_asked
from tfdist.runtime.tf_config import number_setting
from tfdist.runtime.threads import share_cores


def use_logical_cpus(n: int) -> list[str]:
    """Splits this machine's CPU in `n` logical devices, so that everything can be tried without a GPU.

    The logical devices share the cores and the memory of the machine: they show that a program is right and what each rank
    stores; they do not make it faster. Call it first, before any TensorFlow operation.

    An operation of one device then uses its part of the cores only, unless the number of threads has been chosen with
    `tf.config.threading.set_intra_op_parallelism_threads` or the environment variable TF_NUM_INTRAOP_THREADS.

    Args:
        n: number of logical CPU devices, at least 1.

    Returns:
        The device names `["CPU:0", ..., f"CPU:{n - 1}"]`, ready for `ShardedStrategy(devices)`.

    Raises:
        ValueError: `n` is not a positive integer.
        RuntimeError: TensorFlow is already initialised with another number of CPU devices.
    """
    errors.check_integer("n", n, 1)
    cpu = tf.config.list_physical_devices("CPU")[0]
    try:
        tf.config.set_logical_device_configuration(cpu, [tf.config.LogicalDeviceConfiguration()] * n)
    except RuntimeError as error:
        present = len(tf.config.list_logical_devices("CPU"))
        if present != n:
            raise errors.runtime_error(
                f"`use_logical_cpus` must be called before TensorFlow is initialised; it already runs with {present} "
                "CPU device(s), which cannot change any more.",
                n=n,
                fix="Call it at the top of the program, before the first tensor, variable or `list_logical_devices`.",
            ) from error
    share_cores(n)
    return [f"CPU:{index}" for index in range(n)]


def default_devices() -> list[str]:
    """Returns all logical GPUs, or all logical CPUs where there is no GPU."""
    split_gpu_as_asked()
    devices = tf.config.list_logical_devices("GPU") or tf.config.list_logical_devices("CPU")
    return [device.name for device in devices]


def worker_devices() -> tuple[str, int]:
    """Returns the type ("GPU" or "CPU") and number of the logical devices that this worker will have.

    It does not initialise TensorFlow, which would be too early: a worker's server must start first. Without GPUs the CPU is one
    device, or as many as `use_logical_cpus` or the launcher's `--devices-per-worker` have asked for.
    """
    split_gpu_as_asked()
    gpus = tf.config.get_visible_devices("GPU")
    if gpus:
        return "GPU", sum(_parts_of(gpu) for gpu in gpus)
    cpu = tf.config.list_physical_devices("CPU")[0]
    asked = number_setting("TFDIST_DEVICES_PER_WORKER")
    if asked is not None and not tf.config.get_logical_device_configuration(cpu):
        use_logical_cpus(asked)
    return "CPU", _parts_of(cpu)


def resolve_devices(devices: Sequence[str] | None) -> tuple[str, ...]:
    """Returns canonical names for `devices`, one per rank.

    Args:
        devices: names such as `["GPU:0", "GPU:1"]`, or None for all GPUs, else all logical CPUs.

    Raises:
        ValueError: no devices, a name twice, a name this machine lacks, or CPUs and GPUs mixed.
    """
    if devices is None:
        devices = default_devices()
    if isinstance(devices, str) or not isinstance(devices, Sequence):
        raise errors.value_error("`devices` must be a list of device names, such as ['CPU:0', 'CPU:1'].", devices=devices)
    if not devices:
        raise errors.value_error(
            "`devices` must name at least one device.",
            devices=devices,
            fix="Pass None to use every GPU, or every logical CPU where there is none.",
        )
    try:
        names = canonical(devices)
    except (ValueError, AttributeError, TypeError) as error:
        raise errors.value_error("`devices` must be device names such as 'GPU:0'.", devices=list(devices)) from error
    if len(set(names)) != len(names):
        twice = sorted({name for name in names if names.count(name) > 1})
        raise errors.value_error(
            f"`devices` must be distinct: a device is one rank. These stand more than once: {twice}.",
            devices=list(devices),
        )
    known = canonical([device.name for device in tf.config.list_logical_devices()])
    unknown = [device for device, name in zip(devices, names, strict=True) if name not in known]
    if unknown:
        raise errors.value_error(
            f"`devices` names devices that this machine does not have: {unknown}. It has {[short_name(name) for name in known]}.",
            devices=list(devices),
            fix="Without GPUs, `tfdist.use_logical_cpus(n)` at the top of the program makes n CPU devices.",
        )
    types = {tf.DeviceSpec.from_string(name).device_type for name in names}
    if len(types) > 1:
        raise errors.value_error(
            f"`devices` must all be of one type, not a mix of {sorted(types)}: every rank does the same work.",
            devices=list(devices),
            fix="Pass only GPUs, or only CPUs.",
        )
    return names


def uses_physical_gpus(devices: Sequence[str]) -> bool:
    """Whether every one of `devices` is a whole physical GPU (NCCL refuses two logical GPUs on one card).

    It does not initialise TensorFlow: a worker's server must start first. Where the launcher splits the cards
    (`--logical-gpus`), workers may share one, so that none counts as whole.
    """
    are_gpus = all(tf.DeviceSpec.from_string(device).device_type == "GPU" for device in devices)
    if number_setting("TFDIST_LOGICAL_GPUS") or not are_gpus:
        return False
    return all(_parts_of(card) == 1 for card in tf.config.get_visible_devices("GPU"))


def _parts_of(device: tf.config.PhysicalDevice) -> int:
    return len(tf.config.get_logical_device_configuration(device) or [None])


def are_cpus(devices: Sequence[str]) -> bool:
    """Whether all `devices` are CPUs: processes on one machine can share what is on them, and kernels differ from a GPU's."""
    return all(tf.DeviceSpec.from_string(device).device_type == "CPU" for device in devices)


def short_name(name: str) -> str:
    """Returns a device's name within its process, such as "GPU:0"."""
    spec = tf.DeviceSpec.from_string(name)
    return f"{spec.device_type}:{spec.device_index}"
