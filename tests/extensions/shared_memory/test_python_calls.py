"""Python functions as operations."""

import threading
import time

import ml_dtypes
import numpy as np
import pytest
import tensorflow as tf
from resident import resident_bytes

from tfdist.collectives.communicator import Communicator
from tfdist.collectives.plan import CollectivePlan
from tfdist.collectives.program import RankProgram
from tfdist.collectives.transports.kernels import RING
from tfdist.extensions.shared_memory import python_calls
from tfdist.extensions.shared_memory.python_calls import call_python
from tfdist.mesh import DeviceMesh

SPEC = tf.TensorSpec([None, 2], tf.float32)


@pytest.fixture
def counter():
    return tf.Variable(0, dtype=tf.int64)


def emit(counter, function, inputs, results):
    """Calls `call_python` in the graph that is being traced."""
    mesh = DeviceMesh(["CPU:0"])
    program = RankProgram(Communicator(mesh, RING), 0, tf.compat.v1.get_default_graph(), CollectivePlan(1, (0,)))
    return call_python(program, function, inputs, results, counter.handle)


def traced(function, *specs):
    return tf.function(function, autograph=False).get_concrete_function(*specs)


def test_arrays_go_in_and_are_filled(counter):
    seen = []

    def swap(x, y, first, second):
        seen.append((type(x), x.dtype, y.shape))
        first[...] = y
        second[...] = x + 1

    def call(x):
        y = tf.constant([7, 8], tf.int64)
        return emit(counter, swap, [x, y], [([2], tf.int64), (tf.shape(x), tf.float32)])

    run = traced(call, SPEC)
    for rows in (3, 1):
        x = np.arange(2.0 * rows, dtype=np.float32).reshape(rows, 2)
        y, z = run(tf.constant(x))
        np.testing.assert_array_equal(y, [7, 8])
        np.testing.assert_array_equal(z, x + 1)
    assert seen == [(np.ndarray, np.float32, (2,))] * 2


DTYPES = ["float32", "float64", "float16", ml_dtypes.bfloat16, "int32", "int64", "bool", "uint8", "complex64"]


@pytest.mark.parametrize("dtype", DTYPES, ids=lambda dtype: np.dtype(dtype).name)
@pytest.mark.parametrize("shape", [(), (0, 3), (1,), (7, 3), (500, 33)])
def test_what_is_filled_is_what_is_read(counter, dtype, shape):
    """Of every dtype and shape that a message may have: nothing is a copy, and it is aligned."""
    expected = np.random.default_rng(1).integers(0, 2, shape).astype(dtype)
    aligned = []

    def fill(_, found):
        aligned.append(found.size == 0 or found.ctypes.data % 64 == 0)
        found[...] = expected

    [found] = traced(lambda x: emit(counter, fill, [x], [(shape, tf.as_dtype(dtype))]), SPEC)(tf.ones([1, 2]))
    assert found.shape == shape and found.dtype == dtype and aligned == [True]
    np.testing.assert_array_equal(np.asarray(found.numpy()), expected)


@pytest.mark.parametrize("shape", [(), (4,), None])
@pytest.mark.parametrize("between", [tf.identity, lambda x: tf.reshape(x, [-1]), lambda x: tf.expand_dims(x, 0), tf.transpose])
@pytest.mark.parametrize(("wide", "narrow"), [("int32", "uint8"), ("float32", "float16"), ("int64", "float32")])
def test_a_cast_waits_for_what_is_filled(counter, shape, between, wide, narrow):
    """The graph optimizer puts a cast to fewer bytes before what only hands values on: there it read what was not filled yet."""

    def fill(x, found):
        time.sleep(0.02)
        found[...] = 7

    def run(x):
        [found] = emit(counter, fill, [x], [(tf.shape(x)[:1] if shape is None else shape, tf.as_dtype(wide))])
        return tf.cast(between(found), narrow)

    for _ in range(3):
        assert (traced(run, SPEC)(tf.ones([4, 2])).numpy() == 7).all()


def test_each_function_is_one_of_its_own_and_calls_are_not_merged(counter):
    calls = []

    def function(number):
        def call(x, found):
            calls.append(number)
            found[...] = x * number

        return call

    def run(x):
        return [emit(counter, function(number), [x], [([1, 2], tf.float32)])[0] for number in (1, 2, 2)]

    results = traced(run, SPEC)(tf.ones([1, 2]))
    assert [float(x[0, 0]) for x in results] == [1, 2, 2] and sorted(calls) == [1, 2, 2]


def test_a_call_runs_although_nobody_reads_it(counter):
    calls = []

    def run(x):
        emit(counter, calls.append, [x], [])
        emit(counter, lambda x, found: calls.append(found), [x], [([3], tf.float32)])
        return x

    traced(run, SPEC)(tf.ones([1, 2]))
    assert len(calls) == 2


def test_calls_do_not_wait_for_each_other(counter):
    """In the order of tracing the first would wait for ever."""
    second = threading.Event()

    def first(x, found):
        found[...] = second.wait(20)

    def run(x):
        [is_met] = emit(counter, first, [x], [([1], tf.bool)])
        emit(counter, lambda x, found: second.set(), [x], [([1], tf.bool)])
        return is_met

    assert traced(run, SPEC)(tf.ones([1, 2])).numpy().all()


def test_results_are_freed_when_they_have_been_read(counter):
    """And not when the next call of a Python function ends, as what NumPy has allocated: two of them take the memory of one.

    So also with oneDNN's allocator, which keeps what is freed, and gives it to the next.
    """
    size, resident = 2**26, []

    def note(x, found):
        resident.append(resident_bytes())
        found[...] = x

    def fill(x, found):
        found[...] = 1 + x
        resident.append(resident_bytes())

    def run(x):
        [x] = emit(counter, note, [x], [(x.shape, x.dtype)])
        for _ in range(2):
            [filled] = emit(counter, fill, [x], [([size // 4], tf.float32)])
            x = tf.reshape(tf.reduce_sum(filled) - size / 4, [1])
        return x

    assert traced(run, tf.TensorSpec([1]))(tf.zeros([1])).numpy() == 0
    before, _, after = resident
    assert after - before < 1.5 * size


def test_memory_is_given_back_in_the_first_run_of_a_trace(counter, monkeypatch):
    """When TensorFlow has made it a graph that can run, and before what runs takes memory."""
    times = []
    monkeypatch.setattr(python_calls, "give_back_free_memory", lambda: times.append(len(times)))

    def run(x):
        mesh = DeviceMesh(["CPU:0"])
        program = RankProgram(Communicator(mesh, RING), 0, tf.compat.v1.get_default_graph(), CollectivePlan(1, (0,)))
        for _ in range(3):
            call_python(program, lambda x: None, [x], [], counter.handle)
        return x

    run = traced(run, SPEC)
    assert not times
    run(tf.ones([1, 2]))
    run(tf.ones([1, 2]))
    assert len(times) == 1


def test_an_error_is_raised_with_its_text(counter):
    def call(x):
        raise ValueError("something about x")

    run = traced(lambda x: emit(counter, call, [x], []), SPEC)
    with pytest.raises(tf.errors.OpError, match="something about x"):
        run(tf.ones([1, 2]))
