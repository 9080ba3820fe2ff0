"""TensorFlow's registry of kernels, as its placer and its executor read it for an operation on a GPU.

The wheel `tensorflow` for Linux registers its GPU kernels also where there is no GPU. A kernel is one of an operation's type, a
kind of device (DEFAULT: any that has none of its own), and the dtypes that some of its attributes may have; it says which of its
arguments are in the host's memory.
"""

from __future__ import annotations

import functools
from typing import Any

import tensorflow as tf
from tensorflow.core.framework import kernel_def_pb2
from tensorflow.python.framework import kernels, op_def_registry

ON_HOST = (tf.string, tf.resource)  # whatever the kernel: TensorFlow's `DataTypeAlwaysOnHost`
CONDITIONS = ("If", "StatelessIf", "Case", "StatelessCase")
LOOPS = ("While", "StatelessWhile")
CALLS = ("PartitionedCall", "StatefulPartitionedCall", *CONDITIONS, *LOOPS)
ARGUMENTS = ("Placeholder", "PlaceholderWithDefault", "_Arg")


def has_gpu_kernels() -> bool:
    """Whether this TensorFlow was built with them: `tensorflow-cpu` and the wheels of other systems are not."""
    return bool(_registered("MatMul", "GPU"))


def kernel_of(operation: tf.Operation, kind: str = "GPU") -> kernel_def_pb2.KernelDef | None:
    """Returns the kernel that runs `operation` on a device of `kind`, None if there is none."""
    constrained = {c.name for kernel in _registered(operation.type, kind) for c in kernel.constraint}
    return _kernel(operation.type, kind, tuple((name, _types(operation, name)) for name in sorted(constrained)))


def input_is_on_host(operation: tf.Operation, place: int) -> bool:
    """Whether the GPU kernel of `operation` has its input number `place` in the host's memory."""
    dtype = operation.inputs[place].dtype
    if operation.type in CONDITIONS and place == 0:
        return True  # of the `Switch` that it becomes
    if operation.type in (*CALLS, *ARGUMENTS):
        return _is_argument_on_host(dtype)
    return dtype in ON_HOST or _argument_names(operation, "input_arg")[place] in _host_arguments(operation)


def output_is_on_host(tensor: tf.Tensor) -> bool:
    """Whether the GPU kernel that makes `tensor` leaves it in the host's memory."""
    operation = tensor.op
    if operation.type in (*CALLS, *ARGUMENTS):
        return _is_argument_on_host(tensor.dtype)
    names = _argument_names(operation, "output_arg")
    return tensor.dtype in ON_HOST or names[tensor.value_index] in _host_arguments(operation)


def _is_argument_on_host(dtype: tf.DType) -> bool:
    return dtype in (tf.int32, *ON_HOST)  # of functions: TensorFlow's `MTypeFromDType`


@functools.cache
def _registered(op_type: str, kind: str) -> list[kernel_def_pb2.KernelDef]:
    found = [kernel for kernel in kernels.get_registered_kernels_for_op(op_type).kernel if not kernel.label]
    return [kernel for name in (kind, "DEFAULT") for kernel in found if kernel.device_type == name]


@functools.cache
def _kernel(op_type: str, kind: str, given: tuple[tuple[str, frozenset[int]], ...]) -> kernel_def_pb2.KernelDef | None:
    types = dict(given)
    for kernel in _registered(op_type, kind):
        if all(types[one.name] <= set(one.allowed_values.list.type) for one in kernel.constraint):
            return kernel
    return None


def _types(operation: tf.Operation, attribute: str) -> frozenset[int]:
    found = operation.get_attr(attribute)
    return frozenset(dtype.as_datatype_enum for dtype in (found if isinstance(found, list) else [found]))


def _host_arguments(operation: tf.Operation) -> tuple[str, ...]:
    kernel = kernel_of(operation)
    return () if kernel is None else tuple(kernel.host_memory_arg)


def _argument_names(operation: tf.Operation, which: str) -> list[str]:
    """Returns for each input (or output) the name in the operation's definition, in which one may stand for several."""
    names: list[str] = []
    for argument in getattr(op_def_registry.get(operation.type), which):
        names += [argument.name] * _number(operation, argument)
    return names


def _number(operation: tf.Operation, argument: Any) -> int:
    if argument.number_attr:
        return int(operation.get_attr(argument.number_attr))
    return len(operation.get_attr(argument.type_list_attr)) if argument.type_list_attr else 1


def has_kernel(op_type: str, **types: tf.DType) -> bool:
    """Whether a GPU kernel of `op_type`, with its arguments in the GPU's memory, takes `types`, by attribute."""
    given = tuple((name, frozenset([dtype.as_datatype_enum])) for name, dtype in sorted(types.items()))
    kernel = _kernel(op_type, "GPU", given)
    return kernel is not None and not kernel.host_memory_arg
