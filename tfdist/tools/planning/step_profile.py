"""The memory in the course of one step of a model, by the layers that made it."""

import dataclasses
import functools
from collections.abc import Sequence

import numpy as np

from tfdist.placements.graph_facts import LEAVES
from tfdist.tools.planning.lifetimes import Buffers, Sweep
from tfdist.tools.planning.step_trace import StepTrace


@dataclasses.dataclass(frozen=True, eq=False)
class StepProfile:
    """The memory in the course of one step of a replica, without weights.

    Attributes:
        batch_size: the examples that a replica computes with.
        activations: bytes during each operation, without the gradients of weights.
        gradients: for each trainable weight, by its place, the operation that makes its whole gradient; -1: it has none.
        forward: the operation with which forward ends.
        of_calls: the part of each call of a layer in `activations`, (calls, operations).
        windows: for each call, the first and last operation of its forward, and of its backward.
        kept: bytes that each call keeps for backward.
        kept_for_later: those among them that only backward of later calls reads: another stage's, if the call is the last of one.
    """

    batch_size: int
    activations: np.ndarray
    gradients: np.ndarray
    forward: int
    of_calls: np.ndarray
    windows: np.ndarray
    kept: np.ndarray
    kept_for_later: np.ndarray


def profile_of(trace: StepTrace, sweep: Sweep, buffers: Buffers, paths: Sequence[str], batch_size: int) -> StepProfile:
    """Returns the profile of a step.

    Calls that were passed over hold what the equal call before them holds that was traced, from their place in forward to their
    place in backward, and make its gradients there. `paths` are those of the trainable weights.
    """
    calls, steps = trace.calls, len(buffers.steps)
    step_of = {place: step for step, place in enumerate(buffers.steps)}
    owners = owners_of(trace)
    is_backward = _is_backward(trace, sweep, owners)
    backward = min((step_of[place] for place in np.flatnonzero(is_backward).tolist() if place in step_of), default=steps)
    of_gradient = {buffers.holding[name]: place for name, place in trace.gradients.items()}
    is_gradient = np.zeros(len(buffers.sizes), bool)
    is_gradient[[buffer for buffer in of_gradient if buffer >= 0]] = True
    owner = owners[buffers.makers]
    # What gradients need of forward's tensors alone is computed in forward, too.
    is_kept = ~is_backward[buffers.makers] & ~is_gradient & (buffers.deaths >= backward)
    is_kept &= _is_of_forward(trace, sweep)[buffers.makers]
    is_for_later = is_kept & ~_is_read_by_own(buffers, owners, is_backward)
    kept, for_later = (
        np.bincount(owner[chosen], buffers.sizes[chosen], len(calls)).astype(np.int64) for chosen in (is_kept, is_for_later)
    )
    of_calls = np.stack([buffers.live((owner == place) & ~is_gradient) for place in range(len(calls))])
    windows = _windows(trace, buffers, owners, is_backward)
    born = np.full(len(paths), -1, np.int64)
    for buffer, place in of_gradient.items():
        born[place] = min(buffers.births[buffer], steps - 1) if buffer >= 0 else steps - 1
    number_of = {one.name: number for number, one in enumerate(sweep.ops)}
    place_of = {path: place for place, path in enumerate(paths)}
    for place, call in enumerate(calls):
        if call.stands_for is None or call.layer is None:
            continue
        source = calls.index(call.stands_for)
        kept[place], for_later[place] = kept[source], for_later[source]
        first = step_of.get(number_of[call.passed], 0)
        last = step_of.get(number_of[call.backward], steps - 1) if call.backward else first
        windows[place] = (first, first, last, last)
        of_calls[place, first : last + 1] += of_calls[source, first : last + 1]
        for variable in call.layer.trainable_variables:
            born[place_of[variable.path]] = last
    return StepProfile(batch_size, of_calls.sum(axis=0), born, backward, of_calls, windows, kept, for_later)


def owners_of(trace: StepTrace) -> np.ndarray:
    """Returns for each operation of the graph the place of the call that it belongs to: one without a source, that before it."""
    sources = sources_of(trace)
    owners = np.zeros(len(sources), np.int64)
    for place, call in enumerate(trace.calls):
        owners[call.start :] = place
    for number in range(trace.forward, len(sources)):
        owners[number] = owners[sources[number] if sources[number] >= 0 else number - 1]
    return owners


@functools.lru_cache(maxsize=16)
def sources_of(trace: StepTrace) -> np.ndarray:
    """Returns for each operation of the graph the number of that of forward which it is, or is the gradient of; -1: of none.

    The tape names the operations of a gradient after the operation of forward that it is of, or puts them in its scope: then it
    is that of the first there. A model's own scope says nothing.
    """
    names = [one.name for one in trace.graph.get_operations()]
    known: dict[str, int] = {}
    for number, name in enumerate(names[: trace.forward]):
        while (name := name.rpartition("/")[0]).count("/"):
            known.setdefault(name, number)
    known |= {name: number for number, name in enumerate(names[: trace.forward])}
    found = np.arange(len(names))
    for number, name in enumerate(names[trace.forward :], trace.forward):
        name = name.removeprefix("gradient_tape/")
        while name and name not in known:
            name = name.rpartition("/")[0]
        found[number] = known.get(name, -1)
    return found


def _is_backward(trace: StepTrace, sweep: Sweep, owners: np.ndarray) -> np.ndarray:
    """Returns which operations depend on a call that no other call reads: on the model's last ones. Shapes, constants and weights
    of examples are there before."""
    within = np.zeros(len(owners), bool)  # not of the loss: it computes with targets alone, too
    for call in trace.calls:
        within[call.start : call.stop] = True
    is_read = np.zeros(len(trace.calls), bool)
    for place in np.flatnonzero(within).tolist():
        is_read[[owners[other] for other in sweep.before[place] if owners[other] != owners[place]]] = True
    depends = np.zeros(len(owners), bool)
    for place, before in enumerate(sweep.before):
        ends = within[place] and len(before) > 0 and not is_read[owners[place]]
        depends[place] = ends or any(depends[other] for other in before if other < place)
    depends[: trace.forward] = False
    return depends


def _is_of_forward(trace: StepTrace, sweep: Sweep) -> np.ndarray:
    """Returns which operations are forward's, or depend on what is given: backward makes anew what it needs of constants."""
    depends = np.zeros(len(sweep.ops), bool)
    for place, (one, before) in enumerate(zip(sweep.ops, sweep.before, strict=True)):
        depends[place] = one.type in LEAVES or depends[before].any()
    return depends | (np.arange(len(depends)) < trace.forward)


def _is_read_by_own(buffers: Buffers, owners: np.ndarray, is_backward: np.ndarray) -> np.ndarray:
    """Returns for each buffer whether backward of the call that made it reads it, or of an earlier one."""
    return np.array(
        [
            any(is_backward[reader] and owners[reader] <= owners[maker] for reader in readers)
            for maker, readers in zip(buffers.makers, buffers.readers, strict=True)
        ],
        bool,
    )


def _windows(trace: StepTrace, buffers: Buffers, owners: np.ndarray, is_backward: np.ndarray) -> np.ndarray:
    steps = len(buffers.steps)
    windows = np.tile(np.array([steps, -1, steps, -1], np.int64), (len(trace.calls), 1))
    for step, place in enumerate(buffers.steps):
        if place >= trace.forward and not is_backward[place]:
            continue
        owner, side = owners[place], 0 if place < trace.forward else 2
        windows[owner, side] = min(windows[owner, side], step)
        windows[owner, side + 1] = max(windows[owner, side + 1], step)
    return windows
