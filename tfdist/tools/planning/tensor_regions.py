"""Which operations of a step compute with a part of their tensors, where layers are sharded over tensor ranks.

    x ── column-parallel ══ gelu ══ row-parallel ── + ──        ── whole, ══ a part

A layer sharded by column leaves its output local up to one sharded by row, unless it has to gather it; within an attention there
are a part of the heads.
"""

import dataclasses
from collections.abc import Sequence

import keras
import numpy as np

from tfdist.extensions.tensor.plans.layer_kinds import COLUMN, ROW, is_attention
from tfdist.extensions.tensor.plans.layer_shardings import LayerSharding
from tfdist.tools.planning.lifetimes import Buffers, Sweep
from tfdist.tools.planning.operations import is_product
from tfdist.tools.planning.step_profile import sources_of
from tfdist.tools.planning.step_trace import StepTrace

_WHOLE, _LOCAL, _COLUMN, _ROW, _HEADS = range(5)


def on_tensor_rank(buffers: Buffers, trace: StepTrace, sweep: Sweep, shardings: Sequence[LayerSharding], tensor: int) -> Buffers:
    """Returns the buffers of one of `tensor` ranks: parts of what is divided, and what arrives where an output is gathered.

    The gathered parts lie one after the other, and are put together in a second buffer. What a row layer is given whole it
    splits, and keeps its part.
    """
    divided = divided_operations(trace, sweep, shardings)
    sizes = np.where(divided[buffers.makers], -(-buffers.sizes // tensor), buffers.sizes)
    gathering = [one.layer for one in shardings if one.gather_output and not is_attention(one.layer)]
    arriving = []
    for start, stop in _ranges(trace, gathering):
        own = np.flatnonzero((buffers.makers >= start) & (buffers.makers < stop))
        arriving += [own[np.argmax(sizes[own])]] if len(own) else []
    splits = _splits(buffers, trace, shardings)
    whole, deaths = list(splits), buffers.deaths.copy()
    deaths[whole] = [at for at, _ in splits.values()]
    parts = -(-sizes[whole] // tensor)
    births, makers = buffers.births[arriving], buffers.makers[arriving]
    return dataclasses.replace(
        buffers,
        sizes=np.concatenate([sizes, sizes[arriving], parts]),
        births=np.concatenate([buffers.births, births, [at for at, _ in splits.values()]]).astype(np.int64),
        deaths=np.concatenate([deaths, births, buffers.deaths[whole]]),
        makers=np.concatenate([buffers.makers, makers, [by for _, by in splits.values()]]).astype(np.int64),
        readers=buffers.readers + [[]] * len(arriving) + [buffers.readers[one] for one in whole],
    )


def _splits(buffers: Buffers, trace: StepTrace, shardings: Sequence[LayerSharding]) -> dict[int, tuple[int, int]]:
    """Returns, of each buffer that a row layer splits and nobody reads later, the step and the number of the layer's product."""
    ranges = _ranges(trace, [one.layer for one in shardings if one.role == ROW and not one.input_is_parallel])
    sources = sources_of(trace)
    step_of = {place: step for step, place in enumerate(buffers.steps)}
    found = {}
    for start, stop in ranges:
        read = [one for one, readers in enumerate(buffers.readers) if any(start <= place < stop for place in readers)]
        given = max(read, key=lambda one: buffers.sizes[one] * (buffers.makers[one] < start), default=None)
        if given is None or not 0 <= buffers.makers[given] < start:
            continue
        readers = buffers.readers[given]
        product = max(place for place in readers if start <= place < stop)
        others = [place for place in readers if not start <= sources[place] < stop]
        if all(step_of[place] <= step_of[product] for place in others):
            found[given] = (step_of[product], product)
    return found


def _ranges(trace: StepTrace, layers: Sequence[keras.Layer]) -> list[tuple[int, int]]:
    """Returns where calls of `layers` start and stop."""
    known = {id(layer) for layer in layers}
    return [(start, stop) for call in trace.calls for layer, start, stop in call.within if id(layer) in known]


def divided_work(trace: StepTrace, sweep: Sweep, shardings: Sequence[LayerSharding]) -> np.ndarray:
    """Returns for each operation whether the tensor ranks share its work, bool (operations,).

    They share what makes a part on each, and every product of a sharded layer, also if its results are summed or gathered then.
    All else each rank computes whole: what stands between two layers of whole outputs, and a loss of gathered logits.
    """
    sources, (_, within) = sources_of(trace), _regions(trace, sweep, shardings)
    products = np.array([is_product(one) for one in sweep.ops])
    return divided_operations(trace, sweep, shardings) | products & (sources >= 0) & within[sources]


def divided_operations(trace: StepTrace, sweep: Sweep, shardings: Sequence[LayerSharding]) -> np.ndarray:
    """Returns for each operation whether what it makes is divided among the tensor ranks, bool (operations,).

    A sum of gradients is as these are.
    """
    sources, (region, _) = sources_of(trace), _regions(trace, sweep, shardings)
    divided, products = np.isin(region, (_COLUMN, _LOCAL, _HEADS)), np.array([is_product(one) for one in sweep.ops])
    of_backward = np.isin(region[sources], (_LOCAL, _HEADS)) | (region[sources] == np.where(products, _ROW, _COLUMN))
    divided[trace.forward :] = (of_backward & (sources >= 0))[trace.forward :]
    for place in np.flatnonzero(sources < 0).tolist():
        if sweep.ops[place].type == "AddN":
            divided[place] = all(divided[other] for other in sweep.before[place])
    return divided


def _regions(trace: StepTrace, sweep: Sweep, shardings: Sequence[LayerSharding]) -> tuple[np.ndarray, np.ndarray]:
    """Returns in which region each operation of forward is, and whether it is within a sharded layer, both (operations,)."""
    of_layer = {id(one.layer): _region(one) for one in shardings}
    region = np.full(len(sweep.ops), _WHOLE)
    sharded = np.zeros(len(sweep.ops), bool)
    for call in trace.calls:
        for layer, start, stop in call.within:
            if of_layer.get(id(layer), _WHOLE) != _WHOLE:
                region[start:stop] = of_layer[id(layer)]
            sharded[start:stop] |= id(layer) in of_layer
    for place in range(trace.forward):
        if not sharded[place] and any(region[other] in (_COLUMN, _LOCAL) for other in sweep.before[place] if other < place):
            region[place] = _LOCAL
    return region, sharded


def _region(sharding: LayerSharding) -> int:
    if is_attention(sharding.layer):
        return _HEADS
    if sharding.role == COLUMN:
        return _WHOLE if sharding.gather_output else _COLUMN
    return _ROW if sharding.role == ROW and sharding.input_is_parallel else _WHOLE
