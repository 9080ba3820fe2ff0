"""What this worker does when a model is saved: all, nothing but reading, or what Keras does without tfdist."""

from __future__ import annotations

import contextlib
import enum
from collections.abc import Iterable, Iterator
from typing import Any


class WritingRole(enum.Enum):
    """What this worker does when a model is saved, and what that costs beyond the model.

    Reading a variable that is sharded over workers is a collective: all workers must read the same variables in the same order.
    """

    ALONE = "alone"
    """The worker saves as Keras does: no tfdist strategy made the model."""
    CHIEF = "chief"
    """The worker, which may be the only one, reads the variables and writes the file. The disk holds the new file beside the old
    one until the new one is whole."""
    READER = "reader"
    """The worker reads what the chief reads and drops it. It holds one variable at a time in memory, and on disk nothing but what
    a layer's `save_assets` writes in a temporary directory, layer by layer."""


def tfdist_strategy(model: Any) -> Any | None:
    """Returns the tfdist strategy that made `model`, None where there is none.

    Such a strategy has `barrier(name)`, which returns when all workers have called it, and `share(name, value)`, which returns
    the chief's value on all of them; with one worker both return at once. Both may be called with one name again and again.
    """
    return next((strategy for strategy in _strategies(model) if hasattr(strategy, "share")), None)


def is_chief(strategy: Any) -> bool:
    """Whether this worker is the one that writes: the first, or the only one."""
    cluster = getattr(strategy, "cluster", None)
    return cluster is None or cluster.is_chief


def cluster_strategy(model: Any) -> Any | None:
    """Returns the tfdist strategy over several workers that made `model`, None where there is none.

    Such a strategy has `cluster`, too, with `is_chief` and `num_workers`.
    """
    return _over_workers(_strategies(model))


def cluster_strategy_of(parts: Iterable[Any]) -> Any | None:
    """Returns the tfdist strategy over several workers that made one of the variables, of Keras or TensorFlow, among `parts`;
    None where there is none."""
    return _over_workers(getattr(getattr(part, "_value", part), "distribute_strategy", None) for part in parts)


def _over_workers(strategies: Iterable[Any]) -> Any | None:
    for strategy in strategies:
        cluster = getattr(strategy, "cluster", None)
        if cluster is not None and cluster.num_workers > 1:
            return strategy
    return None


def _strategies(model: Any) -> Iterator[Any]:
    yield getattr(model, "_distribute_strategy", None)
    # A model put together outside `scope()` of layers made inside it: its variables know.
    for variable in getattr(model, "variables", ()):
        yield getattr(getattr(variable, "value", None), "distribute_strategy", None)


def writing_role(model: Any) -> WritingRole:
    """Returns what this worker does when `model`, or anything else that Keras saves, is saved."""
    strategy = tfdist_strategy(model)
    if strategy is None:
        return WritingRole.ALONE
    return WritingRole.CHIEF if is_chief(strategy) else WritingRole.READER


def chief_decides(strategy: Any, name: str, decision: bool) -> bool:
    """Returns the chief's `decision` on every worker: if each decided for itself, one worker might save and another not."""
    return strategy.share(name, "yes" if decision else "no") == "yes"


@contextlib.contextmanager
def all_workers_inside(strategy: Any, name: str) -> Iterator[None]:
    """A block that no worker enters before all workers are there, nor leaves before all have come to its end.

    If only such blocks change files, no worker reads a file while the chief changes it. An error leaves the block at once.
    """
    strategy.barrier(f"{name}/begin")
    yield
    strategy.barrier(f"{name}/end")
