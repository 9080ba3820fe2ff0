"""Builds the null GPU's libraries: NVIDIA's names, own code (`native/`), and TensorFlow's headers and lists of functions.

TensorFlow's wheel opens NVIDIA's libraries by name when it is imported, and looks up each function that it calls. It brings the
list of all that it may call (`include/xla/tsl/cuda/*.inc`) and the headers. What `native/` does not define is a stub, which
writes its name to the log when it is called and returns 0.
"""

from __future__ import annotations

import fcntl
import hashlib
import importlib.util
import os
import pathlib
import re
import shutil
import subprocess

NATIVE = pathlib.Path(__file__).parent / "native"
CACHE = pathlib.Path(os.environ.get("XDG_CACHE_HOME") or pathlib.Path.home() / ".cache") / "tfdist-null-gpu"

# By TensorFlow's name of the list: what TensorFlow opens, and the sources. The first is the one that all others link.
LIBRARIES = {
    "cuda": ("libcuda.so.1", ["log.c", "memory.c", "streams.c", "graphs.c", "driver.c"]),
    "cudart": ("libcudart.so.12", ["runtime.c"]),
    "cublas": ("libcublas.so.12", ["blas.c"]),
    "cublasLt": ("libcublasLt.so.12", ["blas_lt.c"]),
    "cudnn": ("libcudnn.so.9", ["dnn.c"]),
    "nccl": ("libnccl.so.2", ["nccl.c", "meeting.c"]),
    "nvml": ("libnvidia-ml.so.1", ["nvml.c"]),
    "cufft": ("libcufft.so.11", []),
    "cusolver": ("libcusolver.so.11", []),
    "cusparse": ("libcusparse.so.12", []),
    "cupti": ("libcupti.so.12", []),
}
# What stubs return where 0, success, would have TensorFlow go on: CUPTI, that there is no profiler.
_STUBS_RETURN = {"cupti": 1}
_HEADERS = ("third_party/gpus/cuda/include", "third_party/gpus/cuda/libcudacxx/include", "external/cuda_nccl/include")


def missing() -> str | None:
    """Returns why the libraries cannot be built here; None: they can."""
    if compiler() is None:
        return "the null GPU needs a C compiler: neither $CC nor gcc nor cc is there"
    lacking = [name for name in (*_HEADERS, "xla/tsl/cuda/cuda.inc") if not (_include() / name).exists()]
    return f"the null GPU needs what TensorFlow's wheel brings: {lacking} are not there" if lacking else None


def compiler() -> str | None:
    names = [os.environ["CC"]] if os.environ.get("CC") else ["gcc", "cc"]
    return next((found for name in names if (found := shutil.which(name))), None)


def build() -> pathlib.Path:
    """Returns the folder with the libraries; builds them where it is not there, once for all versions of their sources."""
    digest = hashlib.sha256()
    for path in [*sorted(NATIVE.iterdir()), pathlib.Path(__file__), *(_functions(name) for name in LIBRARIES)]:
        digest.update(path.read_bytes())
    digest.update(str(_include()).encode())
    folder = CACHE / digest.hexdigest()[:16]
    CACHE.mkdir(parents=True, exist_ok=True)
    with open(CACHE / "lock", "w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)  # tests run in several processes
        if not folder.exists():
            made = CACHE / f"making.{os.getpid()}"
            made.mkdir()
            try:
                for name in LIBRARIES:
                    _build_one(name, made)
                made.rename(folder)
            finally:
                shutil.rmtree(made, ignore_errors=True)
    return folder


def _build_one(name: str, folder: pathlib.Path) -> None:
    library, sources = LIBRARIES[name]
    stubs = folder / f"{name}_stubs.c"
    stubs.write_text(_stubs(name), encoding="utf-8")
    links = [] if name == "cuda" else [str(folder / LIBRARIES["cuda"][0]), "-Wl,-rpath,$ORIGIN"]
    includes = [f"-I{_include() / one}" for one in _HEADERS] + [f"-I{NATIVE}"]
    subprocess.run(
        [compiler(), "-shared", "-fPIC", "-O1", *includes, "-o", folder / library]
        + [stubs, *(NATIVE / source for source in sources), *links, f"-Wl,-soname,{library}", "-lpthread"],
        check=True,
        capture_output=True,
        text=True,
    )


def _stubs(name: str) -> str:
    """Returns C: a weak definition of every function of a library, which yields to one in `native/`."""
    value = _STUBS_RETURN.get(name, 0)
    functions = re.findall(r'"(\w+)"', _functions(name).read_text(encoding="utf-8"))
    lines = [f'__attribute__((weak)) long {one}(void) {{ return null_gpu_unknown("{one}", {value}); }}' for one in functions]
    return "\n".join(["long null_gpu_unknown(const char *, long);", *lines, ""])


def _functions(name: str) -> pathlib.Path:
    return _include() / "xla/tsl/cuda" / f"{name}.inc"


def _include() -> pathlib.Path:
    return pathlib.Path(importlib.util.find_spec("tensorflow").origin).parent / "include"
