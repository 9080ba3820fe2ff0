"""Four logical CPUs for every test, made before TensorFlow is initialised."""

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
