"""Measures what `tfdist.tools.planning.Hardware` says of devices and links: each figure is a check, as the doctor's are.

Everything is computed on all ranks at once, as in training: devices that share a processor then share it. How much faster one is
alone is a figure of its own (`sharing`).
"""

import functools
import itertools
import statistics
import time
from collections.abc import Callable, Sequence
from typing import Any

import keras
import tensorflow as tf

from tfdist import collectives, errors
from tfdist.tools.doctor.bandwidth import COLLECTIVES, MIB, measured_rows
from tfdist.tools.doctor.block import block_seconds, with_operations
from tfdist.tools.doctor.check import Check, Finding, LeftOutError, Outcome, Status
from tfdist.tools.doctor.machine import DEVICES
from tfdist.tools.doctor.session import Session
from tfdist.tools.doctor.timing import least_seconds, seconds_of_one
from tfdist.tools.planning.hardware import Hardware, fitted

# Widths of square matrices, by kind of device; the dtypes in which models compute.
_WIDTHS = {"CPU": (128, 512, 1536), "GPU": (512, 2048, 8192)}
_DTYPES = ("float32", "bfloat16", "float16")
_SLOW_DTYPE_SECONDS = 0.5  # a dtype without kernels of its own is measured at the widths that take no longer
_SIZES = (4 * 1024, 256 * 1024, 16 * MIB, 64 * MIB)
_LONG_SECONDS = 0.2  # more of a size tells no more of a link
_COPIED_BYTES = {"CPU": MIB, "GPU": 256 * MIB}  # of each tensor
_COPIES = {"CPU": 64, "GPU": 1}  # of several tensors, which together no cache keeps
_FUNCTION_ELEMENTS = {"CPU": 2**20, "GPU": 2**24}
_STEPS = 40
_UPDATED = {"CPU": 2**21, "GPU": 2**25}  # parameters
_OVERLAP_BYTES = 16 * MIB
_STAGED = ("reduce_scatter", "all_gather", "all_reduce", "send")


def calibration_checks() -> list[Check]:
    """Returns the checks, whose findings `hardware_of` puts together."""
    checks = [Check(f"matmul/{dtype}", functools.partial(_matmul, dtype)) for dtype in _DTYPES]
    checks += [
        Check("copy", _copy),
        Check("function", _function),
        Check("block", block_seconds),
        Check("step", _step),
        Check("sharing", _sharing),
        Check("update", _update),
    ]
    for kind in ("between", "within"):
        checks += [Check(f"{kind}/{name}", functools.partial(_collective, kind, name)) for name in COLLECTIVES]
    checks += [Check(f"staged/{name}", functools.partial(_staged, name)) for name in _STAGED]
    return [DEVICES, *checks, Check("overlap", _overlap)]


def hardware_of(outcomes: Sequence[Outcome]) -> Hardware:
    """Returns what the checks have found, of several workers the slowest's.

    Raises:
        RuntimeError: a check that it needs went wrong.
    """
    found = {outcome.name: [result.data for result in outcome.results] for outcome in outcomes}
    for outcome in outcomes:
        if outcome.status.is_bad and not outcome.name.startswith("matmul/"):
            raise errors.runtime_error(f"{outcome.name} could not be measured: {outcome.summary}")
    known = {outcome.name for outcome in outcomes if outcome.status is Status.HOLDS}
    devices = found["devices"][0]
    n = devices["world_size"]
    matmul = {
        dtype: [
            (flops, min(data["rates"][place][1] for data in found[f"matmul/{dtype}"])) for place, (flops, _) in enumerate(rows)
        ]
        for dtype in _DTYPES
        if f"matmul/{dtype}" in known and (rows := found[f"matmul/{dtype}"][0]["rates"])
    }
    if "float32" not in matmul:
        raise errors.runtime_error("No product of float32 could be measured.")
    links: dict[str, dict[str, Any]] = {}
    for kind in ("within", "between", "staged"):
        for name in COLLECTIVES:
            if f"{kind}/{name}" in known:
                workers = found[f"{kind}/{name}"]
                sizes = zip(*(data["sizes"] for data in workers), strict=False)
                slowest = [max(rows, key=lambda row: row["seconds"]) for rows in sizes]
                links.setdefault(kind, {})[name] = fitted(slowest, name, workers[0]["ranks"])
    cards = sorted({device["card"] or "CPU" for data in found["devices"] for device in data["devices"]})
    memory = [device["memory_bytes"] for data in found["devices"] for device in data["devices"] if device["memory_bytes"]]
    hosts = len({data["host"] for data in found["devices"]})
    hardware = Hardware(
        name=f"{n} x {', '.join(cards)}" + (f" on {hosts} hosts" if hosts > 1 else ""),
        matmul=matmul,
        bytes_per_second=min(data["bytes_per_second"] for data in found["copy"]),
        function_seconds=max(data["seconds"] for data in found["function"]),
        operation_seconds=0.0,
        step_seconds=max(data["seconds"] for data in found["step"]),
        links=links,
        overlap=max((data["slowdown"] for data in found["overlap"] if data), default=1.0),
        update_seconds=max(data["seconds"] for data in found["update"]),
        sharing=max((data["sharing"] for data in found["sharing"] if data), default=1.0),
        measured=True,
        source=f"python -m tfdist calibrate, {time.strftime('%Y-%m-%d')}, {devices['transport']}",
        memory_bytes=min(memory, default=None),
    )
    each, seconds = (max(data[name] for data in found["block"]) for name in ("operation", "seconds"))
    return with_operations(hardware, each, seconds, found["block"][0]["work"])


def _kind(session: Session) -> str:
    return "GPU" if session.has_gpus else "CPU"


def _unknown() -> tf.Tensor:
    """Returns a number near 1 that the graph optimizer does not know: it would compute beforehand what rests on constants.

    So near that it stays so when it is multiplied with itself some thousand times.
    """
    return tf.random.uniform([], 1 - 1e-7, 1 + 1e-7)


def _products(width: int, dtype: str) -> tuple[tf.Tensor, Callable[[tf.Tensor], tf.Tensor]]:
    """Returns a matrix, and what multiplies one with it."""
    matrix = tf.cast(tf.fill([width, width], _unknown() / width), dtype)
    return matrix, lambda x: tf.matmul(x, matrix)


def _product(width: int, dtype: str, repeats: int) -> tf.Tensor:
    """Returns a number that depends on `repeats` products in a row."""
    x, product = _products(width, dtype)
    for _ in range(repeats):
        x = product(x)
    return tf.cast(x[0, 0], tf.float32)


def _matmul(dtype: str, session: Session) -> Finding:
    strategy, rates = session.base, []
    for width in _WIDTHS[_kind(session)]:
        seconds = seconds_of_one(strategy, functools.partial(_products, width, dtype))
        rates.append((2.0 * width**3, 2.0 * width**3 / seconds))
        if strategy.share("calibrate: is slow", repr(seconds > _SLOW_DTYPE_SECONDS)) == "True":
            break
    return Finding(f"up to {max(rate for _, rate in rates) / 1e9:,.1f} GFLOP/s", {"rates": rates})


def _copy(session: Session) -> Finding:
    """Of tensors as large as a step's: what is read has left the caches since, as what forward keeps for backward has.

    Of one tensor over and over a CPU's caches would tell, thrice as fast, or the pages that the system gives for one of 64 MiB.
    """
    size, count = _COPIED_BYTES[_kind(session)], _COPIES[_kind(session)]

    def copies() -> tuple[tf.Tensor, Callable[[tf.Tensor], tf.Tensor]]:
        tensors = [tf.fill([size // 4], _unknown()) for _ in range(count)]

        def once(last: tf.Tensor) -> tf.Tensor:
            for x in tensors:
                last = (x * last)[-1]  # one after the other, or all copies would be there at once
            return last

        return _unknown(), once

    speed = 2 * size * count / seconds_of_one(session.base, copies)
    return Finding(f"{speed / 1e9:,.1f} GB/s read and written", {"bytes_per_second": speed})


def _function(session: Session) -> Finding:
    """Of one tanh: what it takes longer than a product, which only moves its bytes, and they."""
    elements = _FUNCTION_ELEMENTS[_kind(session)]

    def things(is_function: bool) -> tuple[tf.Tensor, Callable[[tf.Tensor], tf.Tensor]]:
        y = tf.fill([elements], _unknown())
        return y, lambda x: (tf.tanh(x) if is_function else x) * y

    both, product = (seconds_of_one(session.base, functools.partial(things, is_function)) for is_function in (True, False))
    seconds = max((both - product) / elements, 1e-15)
    return Finding(f"{seconds * 1e9:,.2f} ns an element", {"seconds": seconds})


def _step(session: Session) -> Finding:
    """A step of `fit` of the least model: what Keras, the data and the sums over ranks take before anything is computed."""
    ends: list[float] = []
    with session.base.scope():
        model = keras.Sequential([keras.Input((1,)), keras.layers.Dense(1, use_bias=False)])
        model.compile("sgd", "mse")
    rows = tf.zeros([_STEPS * session.world_size, 1])
    noting = keras.callbacks.LambdaCallback(on_train_batch_end=lambda *_, **__: ends.append(time.perf_counter()))
    model.fit(rows, rows, batch_size=session.world_size, shuffle=False, verbose=0, callbacks=[noting])
    seconds = statistics.median(after - before for before, after in itertools.pairwise(ends[_STEPS // 4 :]))
    return Finding(f"{seconds * 1e3:,.2f} ms", {"seconds": seconds})


def _sharing(session: Session) -> Finding:
    session.needs_several("a comparison of one with all")
    products = functools.partial(_products, _WIDTHS[_kind(session)][1], "float32")

    def alone() -> tuple[tf.Tensor, Callable[[tf.Tensor], tf.Tensor]]:
        return products() if collectives.current_program("calibrate").rank == 0 else (tf.zeros([]), lambda x: x)

    together, single = (seconds_of_one(session.base, one) for one in (products, alone))
    sharing = min(float(session.world_size), max(1.0, together / single))
    return Finding(f"one device alone computes {sharing:.2f} times as fast as among all", {"sharing": sharing})


def _update(session: Session) -> Finding:
    """Adam's update on this worker's first device, timed on each worker at once, and for devices that share a process."""
    parameters = _UPDATED[_kind(session)]
    with tf.device(session.local_devices[0]):
        variable = keras.Variable(tf.zeros([parameters]))
        optimizer = keras.optimizers.Adam(1e-3)
        optimizer.build([variable])
        gradient = tf.fill([parameters], 1e-3)

        @tf.function
        def update() -> tf.Tensor:
            optimizer.apply([gradient])
            return tf.identity(variable.value[0])

        float(update())
        session.base.barrier("calibrate: an update")
        times = []
        for _ in range(9):
            start = time.perf_counter()
            float(update())
            times.append(time.perf_counter() - start)
    # The devices of one process do it after one another here, and at once in training.
    beside = len(session.local_devices) if not session.has_gpus else 1
    seconds = statistics.median(times) * beside / parameters
    return Finding(f"{seconds * 1e9:.2f} ns a parameter", {"seconds": seconds})


def _collective(kind: str, name: str, session: Session) -> Finding:
    session.needs_several("a collective")
    cluster = session.cluster
    hosts = len({task.host for task in cluster.tasks}) if cluster else 1
    on_host = session.world_size // hosts
    if kind == "between" and hosts == 1:
        raise LeftOutError("all devices are on one host")
    if kind == "within" and (on_host < 2 or session.world_size % hosts):
        raise LeftOutError("the hosts have one device each, or not as many as one another")
    strategy, axis = session.base, "data"
    if kind == "within" and hosts > 1:
        strategy, axis = session.strategy(tensor_parallel_size=on_host), "tensor"
    return _link(name, strategy, axis)


def _staged(name: str, session: Session) -> Finding:
    """Beside a pipeline of two stages: where workers share memory, messages go through it then, and collectives do not."""
    session.needs_several("a pipeline", 2)
    if not session.base.extended.communicator.transports:
        raise LeftOutError("collectives travel beside a pipeline as they do without one")
    if name != "send" and session.world_size < 4:
        raise LeftOutError("there is one replica")
    strategy = session.strategy(pipeline_parallel_size=2)
    return _link(name, strategy, "pipe" if name == "send" else "data")


def _link(name: str, strategy: Any, axis: str) -> Finding:
    ranks = strategy.mesh.size(axis)
    rows, _ = measured_rows(name, strategy, _SIZES, axis, _LONG_SECONDS)
    if len(rows) < 2:
        raise errors.runtime_error(f"{name} of {_SIZES[1]:,} bytes takes too long to be measured.")
    link = fitted(rows, name, ranks)
    return Finding(f"{link.alpha * 1e6:,.0f} µs + S k / {link.beta / 1e9:.3g} GB/s", {"sizes": rows, "ranks": ranks})


def _overlap(session: Session) -> Finding:
    """A message beside products that take about as long."""
    session.needs_several("a message")
    width = _WIDTHS[_kind(session)][1]
    elements = _OVERLAP_BYTES // 4

    def message() -> tf.Tensor:
        return collectives.all_reduce(tf.fill([elements], _unknown()))[0]

    sending = least_seconds(session.base, message)
    once = least_seconds(session.base, functools.partial(_product, width, "float32", 1))
    repeats = int(session.base.share("calibrate: products", str(max(1, min(256, round(sending / once))))))
    computing = least_seconds(session.base, functools.partial(_product, width, "float32", repeats))
    both = least_seconds(session.base, lambda: message() + _product(width, "float32", repeats))
    slowdown = max(1.0, both / max(sending, computing))
    return Finding(f"both at once take {slowdown:.2f} times as long as the longer one", {"slowdown": slowdown})
