"""The memory that a model really takes on each device."""

import dataclasses
import math
from collections.abc import Iterable

import keras
import tensorflow as tf

from tfdist import errors
from tfdist.mesh import short_name
from tfdist.sharding import config_of
from tfdist.tables import size_text, table_lines


@dataclasses.dataclass(frozen=True)
class DeviceMemory:
    """Bytes of model state on one device.

    Attributes:
        device: the device's name, such as "CPU:0".
        parameter_bytes: the model's weights, trainable and not, as stored.
        gradient_bytes: the gradients of the trainable weights, by where the ZeRO stage keeps them between backward and step.
        optimizer_bytes: the optimizer's variables, as stored; 0 before the optimizer is built.
        exact_bytes: exact shards of weights whose copies are rounded (`parameter_compression` at stages 1 and 2); they are made
            when an optimizer is built.
        residual_bytes: what compressed gradients have lost (`error_feedback`); made when an optimizer is built.
    """

    device: str
    parameter_bytes: int
    gradient_bytes: int
    optimizer_bytes: int
    exact_bytes: int = 0
    residual_bytes: int = 0

    @property
    def total_bytes(self) -> int:
        return sum(dataclasses.astuple(self)[1:])


@dataclasses.dataclass(frozen=True)
class MemoryReport:
    """The model state per device, beside what `tf.distribute.MirroredStrategy` would hold on each. Prints as a table.

    Attributes:
        devices: one `DeviceMemory` per device, in rank order.
        mirrored: what one device would hold if everything were mirrored.
        strategy: how the model is distributed, in words.
        optimizer_is_built: False when the optimizer has made no state yet.
    """

    devices: tuple[DeviceMemory, ...]
    mirrored: DeviceMemory
    strategy: str
    optimizer_is_built: bool

    def __str__(self) -> str:
        columns = {"parameter_bytes": "parameters", "gradient_bytes": "gradients", "optimizer_bytes": "optimizer"}
        for name, header in (("exact_bytes", "exact shards"), ("residual_bytes", "residuals")):
            if any(getattr(memory, name) for memory in self.devices):
                columns[name] = header
        columns["total_bytes"] = "together"
        rows = [["device", *columns.values(), "of mirrored"]]
        for memory in (*self.devices, self.mirrored):
            share = memory.total_bytes / self.mirrored.total_bytes if self.mirrored.total_bytes else 1.0
            rows.append([memory.device, *(size_text(getattr(memory, name)) for name in columns), f"{share:.1%}"])
        header, *lines, mirrored = table_lines(rows, "<" + ">" * (len(columns) + 1))
        rule = "-" * len(header)
        note = [] if self.optimizer_is_built else ["The optimizer has no state yet: it is made before the first step."]
        return "\n".join([f"Model state: {self.strategy}", header, rule, *lines, rule, mirrored, *note])


def memory_report(model: keras.Model) -> MemoryReport:
    """Reports the bytes of parameters, gradients and optimizer state that each device holds.

    Parameters and optimizer state are summed over the variables that really exist on each device. Gradients exist during a step
    only; they are counted by their placement: full size with `zero_stage` 0 and 1, this rank's shards with 2 and 3. Gathered
    layers (stage 3) and activations are not model state and not counted.

    Args:
        model: a built Keras model, under a tfdist strategy, another one, or none.

    Returns:
        A `MemoryReport`: `print` it, or read `report.devices[i].parameter_bytes` and so on.

    Raises:
        ValueError: `model` is not a Keras model, or not built.
    """
    if not isinstance(model, keras.Model):
        raise errors.value_error("`model` must be a `keras.Model`.", model=model)
    if not model.built or not model.variables:
        raise errors.value_error(
            "`model` has no variables yet.",
            model=model.name,
            fix="Build it first: `model.build(input_shape)`, or a first `fit`.",
        )
    optimizer = getattr(model, "optimizer", None)
    slots = [] if optimizer is None else optimizer.variables
    of_strategy = [v.value for v in model.trainable_variables if config_of(getattr(v.value, "distribute_strategy", None))]
    exact_shards = [value.exact for value in of_strategy if value.exact is not None]
    residuals = [(value.residual, value.layout.mesh) for value in of_strategy if value.residual is not None]
    memories = tuple(
        DeviceMemory(
            device=_short_name(device),
            parameter_bytes=sum(_bytes(variable.value, index) for variable in model.variables),
            gradient_bytes=sum(_bytes(variable.value, index, is_gradient=True) for variable in model.trainable_variables),
            optimizer_bytes=sum(_bytes(variable.value, index) for variable in slots),
            exact_bytes=sum(_bytes(exact, index) for exact in exact_shards),
            residual_bytes=sum(residual.bytes_at(mesh.coordinate(index)) for residual, mesh in residuals),
        )
        for index, device in enumerate(_devices(model))
    )
    mirrored = DeviceMemory("mirrored", *map(_full_bytes, (model.variables, model.trainable_variables, slots)))
    return MemoryReport(memories, mirrored, _describe(model), optimizer is not None and bool(optimizer.built))


def _devices(model: keras.Model) -> list[str]:
    strategy = model.distribute_strategy
    mesh = getattr(strategy, "mesh", None)
    if mesh is not None:
        return list(mesh.devices)
    value = model.variables[0].value
    if isinstance(value, tf.distribute.DistributedValues):
        return [component.device for component in value.values]
    return [value.device]


def _short_name(device: str) -> str:
    """Returns "CPU:0", or "worker 1 CPU:0" where there are several workers."""
    spec, name = tf.DeviceSpec.from_string(device), short_name(device)
    return name if spec.job in (None, "localhost") else f"{spec.job} {spec.task} {name}"


def _bytes(value: tf.Variable, index: int, is_gradient: bool = False) -> int:
    """Returns the bytes of a variable, or of its gradient, on the device of a rank."""
    config = config_of(getattr(value, "distribute_strategy", None))
    if config is None:
        return math.prod(value.shape) * value.dtype.size
    # By the layout, since parts of other workers are not here: shards are padded to one size.
    layout = value.layout
    if not layout.stores(config.mesh.coordinate(index)):
        return 0
    if not is_gradient:
        elements = math.prod(layout.component_shape)
    elif config.placements.fraction("gradient", config.mesh.num_shards) < 1:
        elements = layout.shard_elements
    else:
        elements = layout.local_elements
    return elements * value.dtype.size


def _full_bytes(variables: Iterable[keras.Variable]) -> int:
    return sum(math.prod(variable.shape) * variable.value.dtype.size for variable in variables)


def _describe(model: keras.Model) -> str:
    strategy = model.distribute_strategy
    config = config_of(strategy)
    if config is not None:
        sizes = {name: getattr(config, name) for name in ("tensor_parallel_size", "pipeline_parallel_size")}
        above_one = [f"{name}={size}" for name, size in sizes.items() if size > 1]
        groups = [f"sharding_group_size={config.mesh.num_shards}"] if config.mesh.is_hybrid else []
        settings = ", ".join([f"zero_stage={config.zero_stage}", *groups, *above_one])
        return f"{type(strategy).__name__}, {settings}, {config.mesh.world_size} devices"
    if len(_devices(model)) > 1:
        return f"{type(strategy).__name__}, {strategy.num_replicas_in_sync} devices"
    return "one device"
