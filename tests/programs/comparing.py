"""Programs as users write them, run on one device and under a strategy: both must leave the same behind.

A program is a function of a strategy that returns numbers: losses, logs, weights, slots (see `tests.parity.comparison`).
It is written as for one device, with `strategy.scope()`, which changes nothing there.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterable, Iterator
from typing import Any

import keras
import tensorflow as tf
from grids import exhaustive
from training import one_device, strategy_for

from tests.parity.comparison import RTOL, BatchLogs, assert_same_tree, state

Program = Callable[[tf.distribute.Strategy], Any]

STAGES = (0, exhaustive(1), exhaustive(2), 3)  # values of a parameter `zero_stage`
SHARDED = (*map(exhaustive, (0, 1, 2)), 3)  # of programs in which whole weights could make no difference


def stages_in_turns(programs: Iterable[Any], first: int = 0) -> Iterator[Any]:
    """Cases of a program and a stage: by default each program at stage 0 or 3, in turns, from 0, or from 3 if `first` is 1."""
    for place, program in enumerate(programs):
        for stage in range(4):
            yield (program, stage) if stage == 3 * ((place + first) % 2) else exhaustive(program, stage)


def run(program: Program, strategy: tf.distribute.Strategy) -> Any:
    """Runs `program` from the same state of Keras each time, and returns what it returns."""
    keras.backend.clear_session()
    keras.utils.set_random_seed(3)
    return program(strategy)


@functools.cache
def fitted(make: Callable[..., keras.Model], *arguments: Any, data: tf.data.Dataset) -> Program:
    """A program that trains what `make(*arguments)` returns with momentum for two epochs: what each step logs, and the state."""

    def program(strategy: tf.distribute.Strategy) -> Any:
        with strategy.scope():
            model = make(*arguments)
            model.compile(keras.optimizers.SGD(0.1, momentum=0.9))
        logs = BatchLogs()
        model.fit(data, epochs=2, verbose=0, callbacks=[logs])
        return {"logs": logs.train, **state(model)}

    return program


@functools.cache
def on_one_device(program: Program) -> Any:
    return run(program, one_device())


def assert_as_on_one_device(program: Program, zero_stage: int, devices: int = 2, rtol: float = RTOL, **settings: Any) -> None:
    """What `program` returns under a strategy of `devices` devices is what it returns on one."""
    expected = on_one_device(program)
    assert_same_tree(run(program, strategy_for(devices, zero_stage, **settings)), expected, program.__name__, rtol)
