"""Programs that go wrong on one worker, for the tests of failures."""

from __future__ import annotations

import contextlib
import ctypes
import os
import signal
import sys
import time
from typing import Any

import keras
import numpy as np
import tensorflow as tf

import tfdist
from tests import training
from tests.ranks import rank_id
from tfdist.runtime import coordination, failure_watch


class AtBatch(keras.callbacks.Callback):
    """Calls `act` at the end of batch `batch` of epoch `epoch`."""

    def __init__(self, epoch: int, batch: int, act: Any):
        super().__init__()
        self._at = (epoch, batch)
        self._act = act
        self._epoch = 0

    def on_epoch_begin(self, epoch, logs=None):
        self._epoch = epoch

    def on_train_batch_end(self, batch, logs=None):
        if (self._epoch, batch) == self._at:
            print("acting", flush=True)
            self._act()


def heed_ctrl_c() -> None:
    """Lets SIGINT interrupt this process: a shell's background jobs, and so their children, ignore it."""
    signal.signal(signal.SIGINT, signal.default_int_handler)


def die() -> None:
    os.kill(os.getpid(), signal.SIGKILL)


def raise_error() -> None:
    raise ValueError("the data of this worker are spoilt")


def leave() -> None:
    sys.exit(0)


def terminate() -> None:
    os.kill(os.getpid(), signal.SIGTERM)
    time.sleep(5)


def hang() -> None:
    time.sleep(600)


def stop() -> None:
    os.kill(os.getpid(), signal.SIGSTOP)


def stop_for_a_while() -> None:
    pid = os.getpid()
    if not os.fork():
        time.sleep(3)
        os.kill(pid, signal.SIGCONT)
        os._exit(0)
    stop()


def hold_the_interpreter() -> None:
    ctypes.PyDLL(None).sleep(9)  # unlike CDLL it keeps Python's lock


def break_the_watch() -> None:
    tfdist.MultiWorkerShardedStrategy._watch._peers.listen = lambda _: [][0]
    hang()


def fit_and_alone(folder: str, act: str, is_known: bool) -> None:
    """Trains on data whose length is known, or not; and does on this worker what all must do, if anything: in the second epoch,
    or, a checkpoint, behind the first.

    Over gRPC: collectives in shared memory that do not belong together are told at once.
    """
    failure_watch._GRACE_SECONDS = 2.0
    options = tf.distribute.experimental.CommunicationOptions(
        implementation=tf.distribute.experimental.CommunicationImplementation.RING
    )
    strategy = tfdist.MultiWorkerShardedStrategy(communication_options=options, zero_stage=3)
    x, y = training.vectors()
    with strategy.scope():
        model = training.small()
        model.compile("sgd", training.loss_function())
    data = tf.data.Dataset.from_tensor_slices((x, y)).batch(12)
    data = data if is_known else data.filter(lambda x, y: True)
    path = f"{folder}/model.weights.h5"
    acts = {"save": lambda: model.save_weights(path), "read": model.get_weights}
    callbacks = [AtBatch(1, 2, acts[act])] if act in acts else []
    if act == "checkpoint":
        callbacks = [AtBatch(0, 2, lambda: None), keras.callbacks.ModelCheckpoint(path, save_weights_only=True)]
    model.get_weights()
    model.fit(data, epochs=1000, verbose=0, callbacks=callbacks)


def fit_generator(seed: int, batches: int, way: str) -> None:
    """Trains on what Python draws from a seed: a generator, a dataset of one, or a `PyDataset`."""
    failure_watch._GRACE_SECONDS = 2.0
    strategy = tfdist.MultiWorkerShardedStrategy(zero_stage=1)
    rng = np.random.default_rng(seed)

    def batch() -> Any:
        return rng.normal(size=(12, training.FEATURES)).astype("float32"), rng.integers(0, training.CLASSES, size=12)

    class Drawn(keras.utils.PyDataset):
        def __len__(self) -> int:
            return batches

        def __getitem__(self, index: int) -> Any:
            return batch()

    def generator() -> Any:
        for _ in range(batches):
            yield batch()

    specs = (tf.TensorSpec((None, training.FEATURES)), tf.TensorSpec((None,), tf.int64))
    made = {
        "generator": generator,
        "from_generator": lambda: tf.data.Dataset.from_generator(generator, output_signature=specs),
        "sequence": Drawn,
    }
    with strategy.scope():
        model = training.small()
        model.compile("sgd", training.loss_function())
    model.fit(made[way](), epochs=1 if way == "generator" else 2, verbose=0)


def say() -> None:
    """`AtBatch` has said that it acts."""


ACTS = {
    "say": say,
    "die": die,
    "raise": raise_error,
    "leave": leave,
    "terminate": terminate,
    "hang": hang,
    "stop": stop,
    "stop for a while": stop_for_a_while,
    "hold the interpreter": hold_the_interpreter,
    "break the watch": break_the_watch,
}


def fit_and(act: str, epochs: int = 1000, grace_seconds: float = 12.0, **timeouts: float) -> None:
    """Trains; in the middle of the second epoch the worker does `act` ("" goes on)."""
    failure_watch._GRACE_SECONDS = grace_seconds
    strategy = tfdist.MultiWorkerShardedStrategy(zero_stage=3, **timeouts)
    x, y = training.vectors()
    with strategy.scope():
        model = training.small()
        model.compile("sgd", training.loss_function())
    callbacks = [AtBatch(1, 2, ACTS[act])] if act else []
    model.fit(x, y, batch_size=12, epochs=epochs, verbose=0, callbacks=callbacks)


def connect_and(act: str) -> None:
    """Connects to the others; the worker does `act`, if any, when it has found them, and TensorFlow's servers are to meet."""
    heed_ctrl_c()
    if act:
        enable = coordination.enable_collective_ops

        def enable_and(*arguments: Any) -> None:
            print("acting", flush=True)
            ACTS[act]()
            enable(*arguments)

        coordination.enable_collective_ops = enable_and
    tfdist.MultiWorkerShardedStrategy(peer_timeout_seconds=3)


def _signature(*arrays: Any) -> Any:
    return tuple(tf.TensorSpec(array.shape[1:], array.dtype) for array in arrays)


def wait_for_data(does_wait: bool, **timeouts: float) -> list[Any]:
    """Trains on a dataset that may come to no end on one worker; the others wait for it in a collective.

    Returns the programs that ranks were in after each epoch.
    """
    heed_ctrl_c()
    strategy = tfdist.MultiWorkerShardedStrategy(zero_stage=0, **timeouts)
    x, y = training.vectors()

    def rows() -> Any:
        for index, row in enumerate(zip(x, y, strict=True)):
            if does_wait and index == 40:
                print("waiting", flush=True)
                time.sleep(600)
            yield row

    with strategy.scope():
        model = training.small()
        model.compile("sgd", training.loss_function())
    running: list[Any] = []
    look = keras.callbacks.LambdaCallback(on_epoch_end=lambda *_: running.append(strategy.extended.communicator.running()))
    data = tf.data.Dataset.from_generator(rows, output_signature=_signature(x, y)).batch(12)
    model.fit(data, epochs=3, verbose=0, callbacks=[look])
    return running


def run_out_of_data() -> list[Any]:
    """Runs steps that take their data themselves until there are none; then it does something else for longer than a step may."""
    strategy = tfdist.MultiWorkerShardedStrategy(zero_stage=3, step_timeout_seconds=3)
    x, y = training.vectors()
    with strategy.scope():
        model = training.small()
        optimizer = keras.optimizers.SGD(0.1)
        optimizer.build(model.trainable_variables)
    loss_function = training.loss_function()
    rows = tf.data.Dataset.from_generator(lambda: zip(x, y, strict=True), output_signature=_signature(x, y))
    data = strategy.experimental_distribute_dataset(rows.batch(12))

    @tf.function
    def step(iterator: Any) -> Any:
        batch = tf.nest.map_structure(lambda part: strategy.experimental_local_results(part)[0], next(iterator))

        def on_rank() -> None:  # what it is given is in its closure
            with tf.GradientTape() as tape:
                loss = loss_function(batch[1], model(batch[0], training=True))
            optimizer.apply(tape.gradient(loss, model.trainable_variables), model.trainable_variables)

        strategy.run(on_rank)

    for _ in range(2):
        iterator = iter(data)
        with contextlib.suppress(tf.errors.OutOfRangeError):
            while True:
                step(iterator)
        time.sleep(7)
    return []


def make_strategy(**settings: Any) -> int:
    return tfdist.MultiWorkerShardedStrategy(**settings).num_replicas_in_sync


def end_after(seconds: float) -> None:
    make_strategy()
    time.sleep(seconds)
    print("over", flush=True)


def make_strategy_on(devices: int) -> int:
    tfdist.use_logical_cpus(devices)
    return make_strategy()


def settings_differ(worker_index: int) -> list[str]:
    """Makes strategies whose settings differ between the workers; returns the errors."""
    found = []
    for settings in ({"zero_stage": 2 + worker_index}, {"bucket_bytes": 1000 * (1 + worker_index)}):
        try:
            make_strategy(**settings)
        except ValueError as error:
            found.append(str(error))
    return found


def different_collectives(worker_index: int, odd: int, axis: str) -> None:
    """On a 2 x 2 mesh the worker `odd` runs another collective over one axis, in the second of two steps."""
    strategy = tfdist.MultiWorkerShardedStrategy(tensor_parallel_size=2)
    assert strategy.mesh.shape == (2, 1, 2)

    def on_rank(collective: Any, size: int) -> tf.Tensor:
        total = tfdist.collectives.all_reduce(tf.ones([2]), "data") + tfdist.collectives.all_reduce(tf.ones([2]), "tensor")
        return total + tf.reduce_sum(collective(tf.ones([size]), axis))

    gather, reduce = tfdist.collectives.all_gather, tfdist.collectives.all_reduce
    tf.function(lambda: strategy.run(on_rank, args=(gather, 2)))()
    print("agreed", flush=True)
    tf.function(lambda: strategy.run(on_rank, args=(reduce if worker_index == odd else gather, 3)))()
    print("not caught", flush=True)


def circle() -> None:
    """On a 2 x 2 mesh each worker has an order of its devices' collectives, and both together have none."""
    strategy = tfdist.MultiWorkerShardedStrategy(tensor_parallel_size=2)

    def on_rank() -> tf.Tensor:
        total = tf.ones([3])
        for axis in ("data", "tensor") if rank_id() in (0, 3) else ("tensor", "data"):
            total = tfdist.collectives.all_reduce(total, axis)
        return total

    tf.function(lambda: strategy.run(on_rank))()
    print("not caught", flush=True)


def different_programs(case: str, worker_index: int) -> None:
    """Worker 1 differs from worker 0 in one thing."""
    odd = worker_index == 1
    strategy = tfdist.MultiWorkerShardedStrategy(zero_stage=3)
    x, y = training.vectors()
    width = 11 if odd and case == "width" else 9
    layers = 2 if odd and case == "layers" else 1
    optimizer = keras.optimizers.SGD(0.1) if odd and case == "optimizer" else keras.optimizers.Adam(0.1)
    if odd and case == "setting of the optimizer":
        optimizer.epsilon = 1e-3
    with strategy.scope():
        hidden = [keras.layers.Dense(width, activation="relu") for _ in range(layers)]
        model = keras.Sequential([keras.Input((training.FEATURES,)), *hidden, keras.layers.Dense(training.CLASSES)])
        model.compile(type(optimizer).from_config(optimizer.get_config()), training.loss_function())
    if case == "own collective":

        def on_rank():
            value = tf.ones([2])
            return tfdist.collectives.all_reduce(value) if odd else tfdist.collectives.all_gather(value)

        tf.function(lambda: strategy.run(on_rank))()
    if case == "data":
        y = y[:36] if odd else y
        x = x[: len(y)]
    model.fit(x, y, batch_size=12, epochs=2, verbose=0)
    if case == "only the chief evaluates" and not odd:
        model.evaluate(x, y, verbose=0)
    model.fit(x, y, batch_size=12, epochs=2, verbose=0)
    print("not caught", flush=True)
