"""What the workers of `test_connect` run: every collective, by way of the memory they share and by the ring."""

from __future__ import annotations

import gc
import json
import os
import pathlib
from typing import Any
from unittest import mock

import numpy as np
import tensorflow as tf
from tensorflow.python.framework import func_graph

import tfdist
from tfdist.collectives import all_gather, all_reduce, all_to_all, current_program, point_to_point, reduce_scatter
from tfdist.extensions.shared_memory import connect, exchange
from tfdist.runtime import Coordination, threads

ALL_GATHER = Coordination.all_gather
WORKERS = 3
SLOT_BYTES = 64 * 2**10
# The last needs several turns of a slot, in every collective, and divides by nothing.
SHAPES = ([1], [6, 5], [3 * 50_001])
DTYPES = ("float32", "float64", "float16", "bfloat16", "int32", "int64")


def strategy_of(implementation: str, **settings: Any) -> Any:
    implementation = tf.distribute.experimental.CommunicationImplementation(implementation)
    options = tf.distribute.experimental.CommunicationOptions(implementation=implementation)
    return tfdist.MultiWorkerShardedStrategy(communication_options=options, **settings)


def run_everything() -> dict[str, Any]:
    """Returns the ways that groups take, and per way a digest of what every collective returns."""
    found: dict[str, Any] = {}
    for implementation in ("AUTO", "RING"):
        with (
            mock.patch.object(exchange, "_SLOT_BYTES", SLOT_BYTES),
            mock.patch.object(connect.tempfile, "mkdtemp", side_effect=connect.tempfile.mkdtemp) as made,
        ):
            strategy = strategy_of(implementation)
        found[f"{implementation} groups"] = sorted(strategy.extended.communicator.transports)
        found[f"{implementation} directories"] = [call.kwargs["dir"] for call in made.call_args_list]
        found[implementation] = collectives_of(strategy)
        found[f"{implementation} graphs of collectives"] = graphs_kept(strategy, every_collective)
        strategy = strategy_of(implementation, pipeline_parallel_size=WORKERS)
        found[f"{implementation} mailbox"] = sorted(strategy.extended.communicator.message_transports)
        found[f"{implementation} messages"] = messages_of(strategy)
        found[f"{implementation} graphs of messages"] = graphs_kept(strategy, pass_on)
    found["left behind"] = [str(path) for path in pathlib.Path("/dev/shm").glob(f"tfdist-{os.getpid()}-*")]
    found["other groups"] = groups_where_memory_cannot_be_shared()
    return found


def collectives_of(strategy: Any) -> dict[str, np.ndarray]:
    rank = strategy.cluster.worker_index
    found = {}
    for dtype in DTYPES:
        for shape in SHAPES if dtype in ("float32", "bfloat16") else SHAPES[:2]:
            values = np.random.default_rng(rank).integers(-5, 6, shape)
            step = tf.function(lambda x, run=strategy.run: run(every_collective, args=(x,)), autograph=False)
            for name, result in step(tf.constant(values, dtype)).items():
                found[f"{name} {dtype}{shape}"] = digest(tf.cast(result, tf.float64).numpy())
    found["lengths"] = tf.function(lambda: strategy.run(lambda: all_gather(tf.range(rank), uneven=True)))().numpy()
    found["of a loop"] = of_a_loop(strategy)
    return found


def every_collective(x: tf.Tensor) -> dict[str, tf.Tensor]:
    """Sums weigh elements, so that an element in a wrong place is seen; gradients where there are some."""
    found = {op: all_reduce(x, reduce_op=op) for op in ("sum", "max", "min")}
    found["gather"] = all_gather(x)
    found["scatter"] = reduce_scatter(x)
    if x.shape[0] % WORKERS == 0:
        found["exchange"] = all_to_all(x)
    if x.dtype.is_floating:
        with tf.GradientTape() as tape:
            tape.watch(x)
            gathered = tf.reshape(all_gather(x), [-1])
            loss = tf.reduce_sum(gathered * tf.cast(tf.range(tf.size(gathered)) % 7, x.dtype))
        found["gradient"] = tape.gradient(loss, x)
    return found


def messages_of(strategy: Any) -> dict[str, Any]:
    """What a pipeline's ranks receive that send each other, in a ring: of every dtype, of lengths known when it runs only, and in
    a loop; some of it is read by nobody."""
    rank = strategy.cluster.worker_index
    step = tf.function(lambda x: strategy.run(pass_on, args=(x,)), autograph=False)
    varying = tf.function(step.python_function, [tf.TensorSpec([None, 2])], autograph=False)

    @tf.function
    def loop(x: tf.Tensor) -> tf.Tensor:
        for _ in tf.range(5):
            x = tf.cast(strategy.run(pass_on, args=(x,))["float64"], tf.float32) + 1.0
        return x

    values = np.arange(14.0, dtype=np.float32).reshape(7, 2) + 100 * rank
    found = {f"{name} {rows} rows": x.numpy() for rows in (7, 3) for name, x in varying(values[:rows]).items()}
    found |= {f"{name} of known size": x.numpy() for name, x in step(tf.constant(values)).items()}
    mailboxes = {one.mailbox for one in strategy.extended.communicator.message_transports.values()}
    found["unread"] = [sum(map(len, mailbox._arrived.values())) for mailbox in mailboxes]
    return found | {"loop": loop(tf.constant(values)).numpy()}


def pass_on(x: tf.Tensor) -> dict[str, tf.Tensor]:
    """Sends `x` to the rank behind and receives that of the rank before, in every dtype."""
    program, rows, found = current_program(), tf.shape(x)[0], {}
    before, behind = (program.rank - 1) % WORKERS, (program.rank + 1) % WORKERS
    for name in (*DTYPES, "bool", "unread"):
        mine = tf.cast(x, name) if name in DTYPES else tf.cast(tf.cast(x, tf.int32) % 2, "bool")
        point_to_point.send_message(program, mine, behind, name)
        found[name] = point_to_point.receive_message(program, tf.TensorSpec(mine.shape, mine.dtype), rows, before, name)
    return {name: tf.cast(x, tf.float64) for name, x in found.items() if name != "unread"}


def graphs_kept(strategy: Any, on_rank: Any) -> list[int]:
    """Returns how many graphs of functions there are after each of some traces of one step, of which none is used any more."""
    counts = []
    for _ in range(5):
        tf.function(lambda x: strategy.run(on_rank, args=(x,)), autograph=False)(tf.ones([6, 2]))
        gc.collect()
        counts.append(sum(isinstance(one, func_graph.FuncGraph) for one in gc.get_objects()))
    return counts


def digest(values: np.ndarray) -> np.ndarray:
    """All of few values; of many, sums that tell where each stands."""
    flat = values.reshape(-1)
    if flat.size < 100:
        return values
    return np.array([flat.size, flat.sum(), flat @ (np.arange(flat.size) % 1009), flat[-1]])


def of_a_loop(strategy: Any) -> np.ndarray:
    """Steps in a loop of the graph, each of which needs the one before."""

    @tf.function
    def steps() -> tf.Tensor:
        x = tf.ones([5]) * (strategy.cluster.worker_index + 1)
        for _ in tf.range(4):
            x = strategy.run(lambda x: all_reduce(x, reduce_op="mean") + 1.0, args=(x,))
        return x

    return steps().numpy()


def meets(**settings: Any) -> list:
    """Returns the groups that meet in memory, and the ranks to which messages go through it."""
    communicator = strategy_of("AUTO", **settings).extended.communicator
    return [*communicator.transports, *communicator.message_transports]


def elsewhere(store: Coordination, *arguments: Any) -> list[Any]:
    """What others write, on a machine with another `/dev/shm`."""
    return json.loads(json.dumps(ALL_GATHER(store, *arguments)).replace("/dev/shm", "/nowhere"))


def groups_where_memory_cannot_be_shared() -> dict[str, list]:
    """No worker has such memory; one is elsewhere; or they run one operation at a time."""
    found = {}
    last = int(tfdist.MultiWorkerShardedStrategy().cluster.worker_index) == WORKERS - 1
    pipeline = {"pipeline_parallel_size": WORKERS}
    with mock.patch.object(connect, "_MEMORY", "/nowhere"):
        found["no memory"] = meets() + meets(**pipeline)
    with mock.patch.object(Coordination, "all_gather", elsewhere if last else ALL_GATHER):
        found["another machine"] = meets() + meets(**pipeline)
    with mock.patch.object(threads, "cores", lambda: 1):
        found["one thread"] = meets() + meets(**pipeline)
    with mock.patch.object(threads, "cores", lambda: 1 if last else 8):
        found["one thread of one worker"] = meets() + meets(**pipeline)
    return found
