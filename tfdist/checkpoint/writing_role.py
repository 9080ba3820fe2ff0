"""Which worker writes what is saved, and which strategy all its workers meet by.

Reading a variable that is sharded over workers is a collective: all workers must read the same variables in the same order.
"""

import contextlib
from collections.abc import Iterable, Iterator
from typing import Any


def tfdist_strategy(model: Any) -> Any | None:
    """Returns the tfdist strategy that made `model`, or anything else that Keras saves; None where there is none.

    Such a strategy has `barrier(name)`, which returns when all workers have called it, and `share(name, value)`, which returns
    the chief's value on all of them; with one worker both return at once. Both may be called with one name again and again.
    """
    # A model put together outside `scope()` of layers made inside it: its variables know.
    parts = (model, *getattr(model, "variables", ()))
    return next((strategy for strategy in _strategies(parts) if hasattr(strategy, "share")), None)


def cluster_strategy_of(parts: Iterable[Any]) -> Any | None:
    """Returns the tfdist strategy over several workers that made one of the variables, of Keras or TensorFlow, among `parts`;
    None where there is none. Such a strategy has `cluster`, too, with `is_chief`."""
    return next((strategy for strategy in _strategies(parts) if getattr(strategy, "cluster", None) is not None), None)


def _strategies(parts: Iterable[Any]) -> Iterator[Any]:
    return (getattr(getattr(part, "_value", part), "_distribute_strategy", None) for part in parts)


def is_chief(strategy: Any) -> bool:
    """Whether this worker is the one that writes: the first, or the only one, or one without a tfdist strategy (None)."""
    cluster = getattr(strategy, "cluster", None)
    return cluster is None or cluster.is_chief


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
