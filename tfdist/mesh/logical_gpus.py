"""One GPU as several logical ones, so that what needs many GPUs can be tried on one."""

import ctypes

import tensorflow as tf

from tfdist import errors
from tfdist.runtime.tf_config import number_setting

_MIB = 1 << 20  # TensorFlow's unit of a memory limit
_LEAST_PART = 64 * _MIB
# What stays outside of TensorFlow's allocators: the CUDA context and what cuBLAS, cuDNN and their kernels take, up to about 1 GB.
_RESERVED_PART, _MOST_RESERVED = 1 / 8, 1536 * _MIB


def use_logical_gpus(n: int, memory_per_device: int | None = None, gpu: int = 0) -> list[str]:
    """Splits one GPU of this machine in `n` logical GPUs, so that everything can be tried on one card.

    Each has an allocator and a memory limit of its own, and computes on the card's kernels: numbers, memory and the order of
    operations are those of `n` cards. They share the card's processors: they show nothing of the speed of `n` cards. NCCL
    refuses two ranks on one card, so that TensorFlow's ring carries their messages. Call it first, before any TensorFlow
    operation. Other GPUs of the machine are hidden from TensorFlow.

    Args:
        n: number of logical GPUs, at least 1.
        memory_per_device: bytes of each, rounded down to MiB. None: equal parts of what is free, less an eighth of it (1.5 GiB
            at most) for what CUDA's libraries take themselves.
        gpu: which card, numbered as TensorFlow and CUDA_VISIBLE_DEVICES do.

    Returns:
        The device names `["GPU:0", ..., f"GPU:{n - 1}"]`, ready for `ShardedStrategy(devices)`; they are all that there are.

    Raises:
        ValueError: an argument is no such number, the card is too small for `n` parts, or `memory_per_device` asks for more than
            is free; the error has both figures.
        RuntimeError: there is no GPU, the CUDA driver does not answer, or TensorFlow is already initialised otherwise.

    Source: `tf.config.set_logical_device_configuration`.
    """
    errors.check_integer("n", n, 1)
    errors.check_integer("gpu", gpu, 0)
    if memory_per_device is not None:
        errors.check_integer("memory_per_device", memory_per_device, 1, fix="It is a number of bytes.")
    cards = tf.config.list_physical_devices("GPU")
    if not cards:
        raise errors.runtime_error(
            "`use_logical_gpus` needs a GPU that TensorFlow can use; there is none.",
            n=n,
            fix="`tfdist.use_logical_cpus(n)` splits the CPU instead.",
        )
    if gpu >= len(cards):
        raise errors.value_error(f"`gpu` must be the number of a card; there are {len(cards)}, from 0.", gpu=gpu)
    names = [f"GPU:{index}" for index in range(n)]
    if _is_split(cards[gpu], n, memory_per_device):
        return names
    try:
        tf.config.set_logical_device_configuration(cards[gpu], [])  # says the same as nothing, where it is not too late
    except RuntimeError as error:
        raise errors.runtime_error(
            "`use_logical_gpus` must be called before TensorFlow is initialised; it already runs with "
            f"{len(tf.config.list_logical_devices('GPU'))} GPU device(s), which cannot change any more.",
            n=n,
            fix="Call it at the top of the program, before the first tensor, variable or `list_logical_devices`.",
        ) from error
    limit = _limit(n, memory_per_device, gpu)
    tf.config.set_visible_devices(cards[gpu], "GPU")
    tf.config.set_logical_device_configuration(cards[gpu], [tf.config.LogicalDeviceConfiguration(limit)] * n)
    return names


def split_gpu_as_asked() -> None:
    """Splits this worker's GPU where the launcher asks for it (`--logical-gpus`).

    Workers that share a card have equal parts of it, whichever starts first.
    """
    number = number_setting("TFDIST_LOGICAL_GPUS")
    if number is None:
        return
    workers, memory = number_setting("TFDIST_WORKERS_PER_GPU") or 1, None
    if workers > 1 and tf.config.list_physical_devices("GPU"):
        _, total = gpu_memory(0)
        memory = _usable(total, workers) // (number * workers)
    use_logical_gpus(number, memory)


def _is_split(card: tf.config.PhysicalDevice, n: int, memory_per_device: int | None) -> bool:
    parts = tf.config.get_logical_device_configuration(card) or []
    limits = {part.memory_limit for part in parts}
    return len(parts) == n and None not in limits and (memory_per_device is None or limits == {memory_per_device // _MIB})


def _usable(memory: int, processes: int = 1) -> int:
    """Returns what `processes` that share `memory` bytes can leave to TensorFlow's allocators."""
    return int(memory - min(memory * _RESERVED_PART, _MOST_RESERVED * processes))


def _limit(n: int, memory_per_device: int | None, gpu: int) -> int:
    """Returns the memory limit of each part, in MiB."""
    free, _ = gpu_memory(gpu)
    part = memory_per_device
    if part is None:
        part = _usable(free) // n
        if part < _LEAST_PART:
            raise errors.value_error(
                f"GPU {gpu} is too small for `n` parts: {free / _MIB:,.0f} MiB are free, so that each would have "
                f"{part / _MIB:,.0f} MiB, and {_LEAST_PART // _MIB} are the least.",
                n=n,
                fix="Ask for fewer, or end the processes that use the card.",
            )
    elif part < _MIB or part * n > free:
        raise errors.value_error(
            f"`memory_per_device` must be at least 1 MiB, and `n` of it what GPU {gpu} has free: {n} x {part:,} are {n * part:,} "
            f"bytes, and {free:,} are free.",
            n=n,
            memory_per_device=memory_per_device,
            fix="Pass None for equal parts of what is free.",
        )
    return part // _MIB


def gpu_memory(index: int) -> tuple[int, int]:
    """Returns the free and the total bytes of the GPU that CUDA, and so TensorFlow, numbers `index`, as they are now.

    It asks the CUDA driver, before TensorFlow starts and takes nearly all. That needs a context on the GPU, some hundred MB,
    which is given back before the answer is returned.

    Raises:
        RuntimeError: there is no driver, or it fails; the text has the driver's function and CUDA's number of the error.
    """
    try:
        driver = ctypes.CDLL("libcuda.so.1")
    except OSError as error:
        raise RuntimeError(f"The CUDA driver cannot be loaded: {error}.") from error

    def call(name: str, *arguments: object) -> None:
        code = getattr(driver, name)(*arguments)
        if code:
            raise RuntimeError(f"The CUDA driver fails: {name} for GPU {index} returned error {code}.")

    device, context = ctypes.c_int(), ctypes.c_void_p()
    free, total = ctypes.c_size_t(), ctypes.c_size_t()
    call("cuInit", 0)
    call("cuDeviceGet", ctypes.byref(device), index)
    call("cuDevicePrimaryCtxRetain", ctypes.byref(context), device)
    try:
        call("cuCtxPushCurrent_v2", context)
        call("cuMemGetInfo_v2", ctypes.byref(free), ctypes.byref(total))
        call("cuCtxPopCurrent_v2", ctypes.byref(context))
    finally:
        call("cuDevicePrimaryCtxRelease_v2", device)
    return free.value, total.value
