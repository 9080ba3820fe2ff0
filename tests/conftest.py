"""Four logical CPUs for every test, made before TensorFlow is initialised."""

import os

os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "2")

import pytest

import tfdist

CPUS = tfdist.use_logical_cpus(4)


@pytest.fixture
def cpus() -> list[str]:
    """The names of the four logical CPUs."""
    return CPUS
