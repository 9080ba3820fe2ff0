"""Four logical CPUs for every test, made before TensorFlow is initialised."""

import gc
import os

os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "2")

import hypothesis
import pytest

import tfdist

CPUS = tfdist.use_logical_cpus(4)

# The same examples on every run, and no failure because the machine is busy.
hypothesis.settings.register_profile("tfdist", derandomize=True, database=None, deadline=None)
hypothesis.settings.load_profile("tfdist")


@pytest.fixture
def cpus() -> list[str]:
    """The names of the four logical CPUs."""
    return CPUS


@pytest.fixture(autouse=True)
def _old_objects_are_left_alone():
    """Takes what a test leaves behind out of the garbage collector's sight.

    TensorFlow keeps the first trace of every function that may make variables, some 12,000 objects per `fit`. Keras collects
    garbage in `clear_session`, so every later test would look through all of them again: half of the suite's time, once.
    """
    yield
    gc.collect()
    gc.freeze()
