"""Running one function on several ranks, with numpy in and out."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import pytest
import tensorflow as tf

import tfdist
from tests.devices import names
from tfdist.collectives import current_program


def strategy_on(num_ranks: int, **settings: Any) -> tfdist.ShardedStrategy:
    return tfdist.ShardedStrategy(names(num_ranks), **settings)


def rank_id() -> int:
    """This rank's number, a Python integer: each rank is traced on its own."""
    return current_program("`rank_id`").rank


def per_rank(strategy: tf.distribute.Strategy, values: Sequence[Any]) -> Any:
    """Gives rank i `values[i]`, an array or a structure of arrays."""
    flat = [tf.nest.flatten(value) for value in values]
    distributed = [
        strategy.experimental_distribute_values_from_function(
            lambda context, column=column: tf.convert_to_tensor(column[context.replica_id_in_sync_group])
        )
        for column in zip(*flat, strict=True)
    ]
    return tf.nest.pack_sequence_as(values[0], distributed)


def trace(strategy: tf.distribute.Strategy, function: Callable[..., Any]) -> Any:
    """Returns `function` as a `tf.function` of per-rank values that runs it on every rank."""

    @tf.function(autograph=False)
    def step(*arguments):
        return strategy.run(function, args=arguments)

    return step


def in_a_rank(function: Callable[[], Any]) -> Any:
    """Returns what `function` returns, any object, while a rank is traced."""
    found = []
    trace(strategy_on(1), lambda: found.append(function()) or tf.zeros([]))()
    return found[0]


def local(strategy: tf.distribute.Strategy, results: Any) -> list[Any]:
    """Returns the ranks' results, numpy structures, in rank order."""
    size = strategy.mesh.world_size
    flat = [strategy.experimental_local_results(leaf) for leaf in tf.nest.flatten(results)]
    return [tf.nest.pack_sequence_as(results, [leaf[rank].numpy() for leaf in flat]) for rank in range(size)]


def run(strategy: tf.distribute.Strategy, function: Callable[..., Any], *values: Sequence[Any]) -> list[Any]:
    """Traces `function`, runs it with `values` (per argument, one value a rank) and returns the ranks' results."""
    return local(strategy, trace(strategy, function)(*[per_rank(strategy, value) for value in values]))


def integers(rng: np.random.Generator, shape: Sequence[int], dtype: tf.DType = tf.float32) -> np.ndarray:
    """Small integers: exact in every dtype, also summed over the ranks."""
    return rng.integers(-8, 9, size=shape).astype(dtype.as_numpy_dtype)


def transposed(values: dict[str, list[Any]]) -> list[dict[str, Any]]:
    """From one list per case to one dictionary per rank."""
    return [{name: ranks[rank] for name, ranks in values.items()} for rank in range(len(next(iter(values.values()))))]


def refused(error_type: type[Exception], match: str, function: Callable[..., Any], n: int = 2) -> str:
    """Asserts that running `function` on `n` ranks is refused while it is traced, and returns the error's text."""
    strategy = strategy_on(n)
    with pytest.raises(error_type, match=match) as error:
        trace(strategy, function)()
    return str(error.value)
