"""How much memory a GPU has, asked of the CUDA driver before TensorFlow starts, which takes nearly all of it."""

import ctypes


def gpu_memory(index: int) -> tuple[int, int]:
    """Returns the free and the total bytes of the GPU that CUDA, and so TensorFlow, numbers `index`, as they are now.

    The question needs a context on the GPU, some hundred MB, which is given back before the answer is returned.

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
