"""What must hold of every step on GPUs, as lists of problems in words: none is what a test expects."""

from __future__ import annotations

import collections
import dataclasses
from collections.abc import Iterable
from typing import Any

from tests.null_gpu.cases import ROWS, WIDTH
from tests.null_gpu.log import Call, Log
from tests.null_gpu.running import Ended

CALL_OF = {
    "all_reduce": "AllReduce",
    "all_gather": "AllGather",
    "reduce_scatter": "ReduceScatter",
    "all_to_all": "AllToAll",
    "broadcast": "AllReduce",
    "send": "AllReduce",
}

_HALF = ("float16", "bfloat16")


def _call_of(record: dict[str, Any], ranks_per_process: int) -> str:
    """Returns by which of NCCL's calls a collective travels: sums of half precision by an all-to-all, where there is one."""
    in_one_process = len({rank // ranks_per_process for rank in record["ranks"]}) == 1
    is_exchange = record["op"] == "reduce_scatter" and record["dtype"] in _HALF and in_one_process
    return "AllToAll" if is_exchange else CALL_OF[record["op"]]


# What a step's graph may have on the host of a GPU.
ON_THE_HOST = {
    **dict.fromkeys(("_Arg", "_DeviceArg", "_Retval", "_DeviceRetval"), "arguments and results of the function"),
    **dict.fromkeys(("_Send", "_Recv", "_HostSend", "_HostRecv"), "edges to other devices"),
    **dict.fromkeys(("NoOp", "Identity", "Const", "VarHandleOp"), "order, constants, handles"),
    **dict.fromkeys(("AssignVariableOp", "AssignAddVariableOp"), "the marks of running programs"),
    **dict.fromkeys(("MutexLock", "ConsumeMutexLock"), "the turn among steps of other threads"),
}


@dataclasses.dataclass(frozen=True)
class Special:
    """What a case does that others do not.

    Attributes:
        DtoH, HtoD: bytes of each copy that a device may make.
        numbers: bytes of copies that it may make at will, at most.
        plans: how often it runs the plan.
        others: bytes of all-reduces that are in no plan of the step.
        may_lack: whether one of two steps may leave out some of the plan.
    """

    reason: str
    DtoH: tuple[int, ...] = ()
    HtoD: tuple[int, ...] = ()
    numbers: int = 0
    plans: int = 1
    others: tuple[int, ...] = ()
    may_lack: bool = False


_BATCH, _LAST = 4 * ROWS * WIDTH, 4 * WIDTH  # bytes of a replica's rows; of the one row of the last batch
SPECIAL = {
    "accumulation": Special("the host branches on whether this step updates", DtoH=(1,), may_lack=True),
    **dict.fromkeys(
        ("loss scale", "tensor 2, loss scale"),
        Special("the host branches on whether all gradients are finite", DtoH=(1,), may_lack=True),
    ),
    "top_k, stage 3": Special("tables of a kernel that joins or cuts 20 tensors: offsets, addresses", HtoD=(4 * 21, 8 * 20)),
    "fit": Special(
        "an epoch: its batches, and numbers of TensorFlow's iterators, of unknown rows and of Keras's logs, which workers sum",
        HtoD=(*[_BATCH] * 4, *[_LAST] * 2),
        numbers=16,
        plans=3,
        others=(4, 8),
    ),
}
_NONE = Special("like all others")


def problems_of(ended: Ended, devices: int) -> list[str]:
    """Returns what is wrong in any case of a run of `program.py` with so many devices per process."""
    found = [f"the log says: {error}" for error in ended.log.errors()]
    found += [f"exit code {code}:\n{text[-3000:]}" for code, text in zip(ended.codes, ended.outputs, strict=True) if code]
    found += [f"nobody has written {name}" for name in sorted({record.name for record in ended.log.of_kind("unknown")})]
    for worker, (results, process) in enumerate(zip(ended.results, ended.processes, strict=True)):
        for name, result in results.items():
            if "error" in result:
                found.append(f"{name}, worker {worker}: {result['error']}")
                continue
            log, special = ended.log.of_process(process), SPECIAL.get(name, _NONE)
            for number in (1, 2):
                step = log.between(f"{name} {number} begins", f"{name} {number} ends")
                where, may_lack = f"{name}, step {number}, worker {worker}", special.may_lack and number == 2
                plan = {rank: special.plans * records for rank, records in result["plan"].items()}
                different = _unlike_plan(step, ended.log, ended.processes, plan, devices, may_lack, special.others)
                found += [f"{where}: {one}" for one in (*different, *_copies(step, special))]
            found += [f"{name}, worker {worker}: {one}" for one in _on_the_host(result["nodes"])]
    return found


def _unlike_plan(
    step: Log,
    whole: Log,
    processes: list[int],
    plan: dict[str, list[dict[str, Any]]],
    devices: int,
    may_lack: bool,
    others: tuple[int, ...],
) -> Iterable[str]:
    """Yields where NCCL's calls of a step are not the plan's: the same collectives of the same ranks, in the same order.

    Within one process they begin in any order: it is the same on all ranks of a communicator, or the null NCCL reports an error,
    and `circle` looks at those of several. With `may_lack` some of the plan's may be missing; all-reduces of `others`, bytes, do
    not count.
    """
    members = {
        name: sorted(processes.index(process) * devices + device for process, device in ranks)
        for name, ranks in whole.members().items()
    }
    for rank, records in plan.items():
        calls = [call for call in step.calls() if call.record.device == int(rank) % devices]
        calls = [call for call in calls if call.op != "AllReduce" or call.bytes not in others]
        expected = [(_call_of(one, devices), one["bytes"], sorted(one["ranks"])) for one in records]
        seen = [(call.op, call.bytes, members[call.communicator]) for call in calls]
        if len(processes) == 1:
            expected, seen = sorted(expected), sorted(seen)
        rest = iter(expected)
        if seen == expected or (may_lack and all(call in rest for call in seen)):
            continue
        place = next((i for i, (a, b) in enumerate(zip(seen, expected, strict=False)) if a != b), min(len(seen), len(expected)))
        yield (
            f"rank {rank} has {len(seen)} calls of NCCL, its plan {len(expected)}; the first that differs is {place}: "
            f"{seen[place : place + 1]}, {expected[place : place + 1]}"
        )


def _copies(step: Log, special: Special) -> Iterable[str]:
    for direction in ("HtoD", "DtoH"):
        sizes = collections.Counter((copy.record.device, copy.bytes) for copy in step.copies(direction))
        for (device, size), number in sizes.items():
            if size > special.numbers and number > getattr(special, direction).count(size):
                yield f"device {device} copies {number} times {size} bytes {direction}"


def _on_the_host(nodes: list[list[str]]) -> Iterable[str]:
    for operation, name, device in nodes:
        if "CPU" in device and operation not in ON_THE_HOST:
            yield f"{operation} {name} runs on the host"


def circle(log: Log) -> list[str]:
    """Returns a circle of NCCL's calls in which each stands before the next on some device; empty: there is none.

    Without one no order in which devices come to their calls can have them wait for each other for ever: of all calls that are
    not over, one stands first on all of its devices.
    """
    by_device: dict[tuple[int, int], list[Call]] = collections.defaultdict(list)
    for call in log.calls():
        by_device[call.record.process, call.record.device].append(call)
    waits_for: dict[tuple[str, int], set[tuple[str, int]]] = collections.defaultdict(set)
    for calls in by_device.values():
        calls.sort(key=lambda call: call.record.queued)
        for before, after in zip(calls, calls[1:], strict=False):
            waits_for[after.communicator, after.number].add((before.communicator, before.number))
    # Takes away what waits for nothing that is left; what stays is a circle, or waits for one.
    left = {node: set(before) for node, before in waits_for.items()}
    followers: dict[tuple[str, int], set[tuple[str, int]]] = collections.defaultdict(set)
    for node, before in left.items():
        for one in before:
            followers[one].add(node)
    free = [node for node in followers if not left.get(node)]
    while free:
        for node in followers.pop(free.pop(), ()):
            left[node] = {one for one in left[node] if one in followers}
            if not left[node]:
                free.append(node)
    return sorted(f"{name} {number}" for (name, number), before in left.items() if before)
