"""The tensors that filled a device's memory when a step failed, and settings that take less: notes of TensorFlow's error.

State is what the model holds (`memory_report`). The allocator knows how much was in use at most: what is left of that are
activations and buffers. What a setting would save is the difference of two plans, for as many examples as make the plan's
activations those that were there; of models that cannot be traced from their configuration, and of tensor ranks and pipelines,
the difference of the state alone.
"""

import contextlib
import dataclasses
import functools
import gc
import math
import re
import threading
import types
from collections.abc import Callable, Iterator
from typing import Any, TypeVar

import keras
import tensorflow as tf

from tfdist.keras_layers.recomputed import is_recomputed
from tfdist.mesh import short_name
from tfdist.mesh.device_details import peak_bytes
from tfdist.profiling import MemoryReport, memory_report
from tfdist.sharding import MeshConfig, config_of, layers_within, placements_of
from tfdist.tables import size_text, table_lines
from tfdist.tools.planning.candidate import Candidate
from tfdist.tools.planning.device_memory import DeviceMemory
from tfdist.tools.planning.memory import memory_of
from tfdist.tools.planning.traced_model import TracedModel, trace

_SECONDS = 60.0  # so long a model may be traced, while its job waits
_SEARCHED = 2000  # so many things a function may reach are looked at
_EXAMPLES = 32  # of a replica, where nothing says how many there were
_MOST_EXAMPLES = 2**24
_LEAST = 0.01  # what saves less of a device's memory than this is not told
_LIBRARIES = ("tensorflow", "keras", "tfdist", "numpy")
_DEVICE = re.compile(r"device:([A-Z]+:\d+)")
# That there was no memory for, where the message says it.
_TENSOR = re.compile(r"tensor with shape\[([\d,]*)\] and type (\w+)")

T = TypeVar("T")


@dataclasses.dataclass(frozen=True)
class Saving:
    """A setting that would take less.

    Attributes:
        setting: as it is written in a program, or in words.
        bytes: how much less, on the fullest device.
        remark: what else is to be known of it.
    """

    setting: str
    bytes: float
    remark: str = ""


def explanation(function: Any, error: BaseException) -> str | None:
    """Returns what a step's error does not say; None where it trains no model of a tfdist strategy."""
    model = trained_by(function)
    return None if model is None else explained(model, str(error))


def explained(model: keras.Model, message: str) -> str:
    """Returns what filled a device's memory, and what would take less.

    Args:
        model: that of the step, under a tfdist strategy.
        message: TensorFlow's.
    """
    config = config_of(model.distribute_strategy)
    assert config is not None
    report = memory_report(model)
    local = model.distribute_strategy.extended.communicator.local_ranks
    failed = _DEVICE.search(message)
    names = [short_name(config.mesh.devices[rank]) for rank in local]
    fullest = max(local, key=lambda rank: report.devices[rank].total_bytes)
    rank = local[names.index(failed[1])] if failed and failed[1] in names else fullest
    device, state = short_name(config.mesh.devices[rank]), report.devices[rank]
    used, wanted = _most_in_use(device), _TENSOR.search(message)
    asked = math.prod(int(size) for size in re.findall(r"\d+", wanted[1])) * tf.as_dtype(wanted[2]).size if wanted else 0
    held = DeviceMemory(state.parameter_bytes + state.exact_bytes, state.gradient_bytes, state.optimizer_bytes)
    rest = None if used is None else max(used + asked - held.together, 0)
    if rest is not None:
        held = dataclasses.replace(held, activations=rest)
    savings = _within(_SECONDS, lambda: _planned_savings(model, config, rest)) or _savings_of_state(config, report, rank, rest)
    told = [one for one in savings if one.bytes > _LEAST * max(held.together, 1)]
    return "\n".join(_lines(model.name, device, used, asked, held, sorted(told, key=lambda one: -one.bytes)))


def _lines(name: str, device: str, used: int | None, asked: int, held: DeviceMemory, savings: list[Saving]) -> Iterator[str]:
    most = "" if used is None else f" It held {size_text(used)} at most"
    most += f"{' and was' if most else ' It was'} asked for {size_text(asked)} more" if asked else ""
    yield f"tfdist: {device} ran out of memory in a step of {name!r}.{most}{'.' if most else ''}"
    words = {"activations": "activations and buffers"}
    parts = {words.get(part, part): size for part, size in held.parts().items() if size and part != "buffers"}
    order = sorted(parts, key=lambda part: -parts[part])
    rows = [[f"  {part}", size_text(parts[part]), "the most" if part == order[0] else ""] for part in order]
    if used is None:
        rows.append(["  activations and buffers", "not known", ""])
    yield from table_lines(rows, "<><")
    if savings:
        yield "What would take less on each device:"
        rows = [[f"  {one.setting}", f"about {size_text(one.bytes)} less", one.remark] for one in savings]
        yield from table_lines(rows, "<><")
    yield "`tfdist.plan(build, ...)` says of every way to spread the model, before it runs, whether it fits."


def _planned_savings(model: keras.Model, config: MeshConfig, rest: int | None) -> list[Saving]:
    """Returns what settings save by the plans of a copy of the model, made of its configuration."""
    mesh = config.mesh
    if mesh.tensor_parallel_size > 1 or mesh.pipeline_parallel_size > 1:
        return []
    classes = {keras.saving.get_registered_name(type(layer)): type(layer) for layer in layers_within(model)}
    settings = model.get_config()
    traced = trace(lambda: type(model).from_config(settings, custom_objects=classes), model.optimizer)
    now = Candidate(
        zero_stage=config.zero_stage,
        data=mesh.data_parallel_size,
        recompute=is_recomputed(model),
        sharding_group_size=mesh.num_shards if mesh.is_hybrid else None,
        gradient_compression=_name(config.gradient_compression),
        parameter_compression=_name(config.parameter_compression),
    )
    rows = _EXAMPLES if rest is None else _examples(traced, now, rest)
    batch = rows * now.data
    taken = memory_of(traced, now, batch).together

    def saved(candidate: Candidate, size: int = batch) -> float:
        return taken - memory_of(traced, candidate, size).together

    sums = sum(weight.bytes for weight in traced.trained) / (now.shards if now.zero_stage else 1)
    found = [_half_of_batch(saved(now, batch // 2), sums)] if rows > 1 else []
    if traced.block_pattern and not now.recompute:
        recomputed = f'tfdist.recompute(model, "{traced.block_pattern}")'
        found.append(Saving(recomputed, saved(dataclasses.replace(now, recompute=True)), "its blocks' forward runs twice"))
    for stage in range(config.zero_stage + 1, 4) if now.data > 1 else ():
        found.append(_higher_stage(stage, config.zero_stage, saved(dataclasses.replace(now, zero_stage=stage))))
    if now.data % 2 == 0 and now.sharding_group_size is None:
        with contextlib.suppress(ValueError):  # no layer of it can be sharded
            spread = saved(dataclasses.replace(now, tensor=2, data=now.data // 2))
            found.append(Saving("tensor_parallel_size=2", spread, "and `tfdist.parallelize`; half as many replicas"))
    return found


def _name(compression: Any) -> str | None:
    """Returns how a candidate calls a compression; None for one that has no name."""
    return compression if isinstance(compression, str) else None


def _examples(traced: TracedModel, now: Candidate, rest: int) -> int:
    """Returns of about how many examples a replica's activations and buffers are those that were there."""

    def planned(size: int) -> int:
        memory = memory_of(traced, now, size * now.data)
        return memory.activations + memory.buffers

    low, high = 1, 4
    least, most = planned(low), planned(high)
    while most < rest and high < _MOST_EXAMPLES:
        low, least, high = high, most, 4 * high
        most = planned(high)
    return round(low + (high - low) * min(max((rest - least) / max(most - least, 1), 0), 1))


def _savings_of_state(config: MeshConfig, report: MemoryReport, rank: int, rest: int | None) -> list[Saving]:
    """Returns what settings save of the state that a device holds, and of the activations that it held."""
    shards, state, now = config.mesh.num_shards, report.devices[rank], config.placements
    kinds = {
        "parameter": state.parameter_bytes,
        "gradient": state.gradient_bytes,
        "optimizer_state": state.optimizer_bytes,
    }
    found = [_half_of_batch(rest / 2, state.gradient_bytes)] if rest else []
    for stage in range(config.zero_stage + 1, 4) if shards > 1 else ():
        then = placements_of(stage)
        saved = sum(size * (1 - then.fraction(kind, shards) / now.fraction(kind, shards)) for kind, size in kinds.items())
        found.append(_higher_stage(stage, config.zero_stage, saved))
    return found


def _half_of_batch(saved: float, sums: float) -> Saving:
    remark = f"`gradient_accumulation_steps=2` makes up for it, for {size_text(sums)} of sums"
    return Saving("half the batch", saved, remark)


def _higher_stage(stage: int, now: int, saved: float) -> Saving:
    return Saving(f"zero_stage={stage}", saved, f"instead of {now}" + ("; more is sent" if stage == 3 else ""))


def _most_in_use(device: str) -> int | None:
    """Returns the most bytes that TensorFlow has had in use on a device; None where it does not count."""
    try:
        return peak_bytes(device)
    except (ValueError, tf.errors.OpError):
        return None


def _within(seconds: float, work: Callable[[], T]) -> T | None:
    """Returns what `work` returns, in a thread, where no scope of a strategy is; None if it fails or takes longer."""
    found: list[T] = []

    def run() -> None:
        with contextlib.suppress(Exception):  # then less is told
            found.append(work())

    thread = threading.Thread(target=run, name="tfdist explains", daemon=True)
    thread.start()
    thread.join(seconds)
    return found[0] if found else None


def trained_by(function: Any) -> keras.Model | None:
    """Returns the largest model of a tfdist strategy that a function reaches: by what it is bound to, encloses or names."""
    pending, seen = [function], set[int]()
    found: list[keras.Model] = []
    while pending and len(seen) < _SEARCHED:
        value = pending.pop()
        if id(value) in seen:
            continue
        seen.add(id(value))
        if not isinstance(value, keras.Model):
            pending.extend(_reached(value))
        elif value.built and config_of(value.distribute_strategy) is not None:
            found.append(value)
    return max(found, key=lambda model: len(model.variables), default=None)


def _reached(value: Any) -> Iterator[Any]:
    if isinstance(value, functools.partial | types.MethodType | types.CellType | list | tuple | dict):
        yield from gc.get_referents(value)
    elif isinstance(value, types.FunctionType):
        yield from (getattr(value, "__wrapped__", None), value.__closure__)
        if value.__module__ and value.__module__.partition(".")[0] not in _LIBRARIES:
            yield from (value.__globals__[name] for name in _names(value.__code__) if name in value.__globals__)
    else:
        yield getattr(value, "python_function", None)


def _names(code: types.CodeType) -> Iterator[str]:
    """Yields the names that a function looks up, and those within it."""
    yield from code.co_names
    for constant in code.co_consts:
        if isinstance(constant, types.CodeType):
            yield from _names(constant)
