"""What workers do in the tests of threads."""

from __future__ import annotations

import concurrent.futures
import threading
from typing import Any

import keras
import numpy as np
import tensorflow as tf

import tfdist
from tests import training
from tfdist.runtime import failure_watch


def in_thread(function: Any) -> Any:
    """Returns what `function` returns, or raises what it raises, in a thread of its own, once it has ended."""
    with concurrent.futures.ThreadPoolExecutor(1, thread_name_prefix="another") as threads:
        return threads.submit(function).result()


def hand_over(stage: int) -> list[Any]:
    """Trains and evaluates, in one thread and in two that wait for each other; returns what both come to."""
    found = []
    for call in (lambda function: function(), in_thread):
        strategy = tfdist.MultiWorkerShardedStrategy(zero_stage=stage)
        x, y = training.vectors()
        keras.utils.set_random_seed(3)
        with strategy.scope():
            model = training.small()
            model.compile("adam", training.loss_function())
        seen = []
        for _ in range(2):
            model.fit(x, y, batch_size=12, shuffle=False, verbose=0)
            seen.append(call(lambda model=model, x=x, y=y: model.evaluate(x, y, batch_size=12, verbose=0)))
        seen += call(model.get_weights)
        found.append([np.asarray(one) for one in seen])
    return found


def run_apart(way: str, stage: int) -> None:
    """Two threads take turns as nobody can follow: beside each other; or, on this worker or another, later than on the others."""
    failure_watch._GRACE_SECONDS = 2.0
    strategy = tfdist.MultiWorkerShardedStrategy(zero_stage=stage)
    step = tf.function(lambda x: strategy.run(lambda: tfdist.collectives.all_reduce(x, "data")))
    other = tf.function(lambda x: strategy.run(lambda: tfdist.collectives.all_reduce(x[:10], "data")))
    x = tf.ones([1000])
    step(x), other(x)
    print("acting", flush=True)
    if way == "beside":
        threads = [threading.Thread(target=lambda: [step(x) for _ in range(2000)], name=f"player {i}") for i in range(3)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
    else:
        for _ in range(2 if way == "late" else 1):
            step(x)
        in_thread(lambda: other(x))
        step(x), step(x)
