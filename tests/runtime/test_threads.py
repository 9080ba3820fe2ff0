"""How many threads an operation of a rank uses."""

import os

import pytest
import tensorflow as tf

from tfdist.runtime import operations_at_once, share_cores, threads


@pytest.fixture
def tensorflow(monkeypatch):
    """8 cores, and a TensorFlow that only keeps the number of threads: `set`, `get`, and `start`, after which it refuses."""

    class Threading:
        number = 0
        is_started = False

        def get(self):
            return self.number

        def set(self, number):
            if self.is_started:
                raise RuntimeError("Intra op parallelism cannot be modified after initialization.")
            self.number = number

    pretended = Threading()
    monkeypatch.setattr(tf.config.threading, "get_intra_op_parallelism_threads", pretended.get)
    monkeypatch.setattr(tf.config.threading, "set_intra_op_parallelism_threads", pretended.set)
    monkeypatch.setattr(threads, "cores", lambda: 8)
    monkeypatch.setattr(threads, "_set_here", None)
    monkeypatch.delenv("TF_NUM_INTRAOP_THREADS", raising=False)
    return pretended


@pytest.mark.parametrize(("ranks", "expected"), [(1, 0), (2, 4), (3, 2), (8, 1), (20, 1)])
def test_ranks_share_the_cores(tensorflow, ranks, expected):
    share_cores(ranks)
    assert tensorflow.get() == expected


def test_workers_of_several_devices_share_them_too(tensorflow):
    share_cores(2)
    share_cores(2 * 4)
    assert tensorflow.get() == 1


def test_a_number_that_the_program_has_chosen_stays(tensorflow):
    tensorflow.set(3)
    share_cores(4)
    assert tensorflow.get() == 3


def test_a_number_in_the_environment_stays(tensorflow, monkeypatch):
    monkeypatch.setenv("TF_NUM_INTRAOP_THREADS", "5")
    share_cores(4)
    assert tensorflow.get() == 0


def test_nothing_is_done_once_tensorflow_runs(tensorflow):
    tensorflow.is_started = True
    share_cores(4)
    assert tensorflow.get() == 0
    tensorflow.is_started = False
    tensorflow.set(6)  # nor is it remembered as done
    share_cores(4)
    assert tensorflow.get() == 6


@pytest.mark.parametrize(("chosen", "environment", "expected"), [(0, "", 8), (3, "5", 3), (0, "5", 5), (0, "0", 8)])
def test_how_many_operations_run_at_once(tensorflow, monkeypatch, chosen, environment, expected):
    monkeypatch.setattr(tf.config.threading, "get_inter_op_parallelism_threads", lambda: chosen)
    monkeypatch.setenv("TF_NUM_INTEROP_THREADS", environment)
    assert operations_at_once() == expected


def test_tensorflow_takes_the_number(cpus):
    tf.constant(0)
    expected = 0 if os.environ.get("TF_NUM_INTRAOP_THREADS") else max(1, threads.cores() // len(cpus))
    assert tf.config.threading.get_intra_op_parallelism_threads() == expected
