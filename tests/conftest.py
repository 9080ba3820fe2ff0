"""Four devices for every test, made before TensorFlow is initialised."""

import os
import re
import zlib

os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "2")

import hypothesis
import keras
import pytest

from tests import devices, garbage, graph_optimizer, layer_groups, op_creation
from tfdist import keras_hooks

CPUS = devices.take(4)
graph_optimizer.only_for_calls()
layer_groups.gather_each_layer_alone()
garbage.collect_seldom()
op_creation.simplify()
keras_hooks.install()  # many tests are of what Keras does then without a strategy, or with another one

# The same examples on every run, and no failure because the machine is busy.
hypothesis.settings.register_profile("tfdist", derandomize=True, database=None, deadline=None)
hypothesis.settings.load_profile("tfdist")


def pytest_addoption(parser):
    parser.addoption(
        "--round", metavar="K/N", default="1/1", help="of the exhaustive cases, the K-th of N parts of about one size"
    )


def pytest_collection_modifyitems(config, items):
    """Leaves out the exhaustive cases of other rounds: together they take longer than anyone waits."""
    given = re.fullmatch(r"(\d+)/(\d+)", config.getoption("--round"))
    number, rounds = map(int, given.groups()) if given else (0, 0)
    if not 1 <= number <= rounds:
        raise pytest.UsageError(f"--round {config.getoption('--round')}: K/N, with K from 1 to N, is expected: --round 2/6.")
    others = [x for x in items if x.get_closest_marker("exhaustive") and zlib.crc32(x.nodeid.encode()) % rounds != number - 1]
    config.hook.pytest_deselected(items=others)
    left_out = {id(x) for x in others}
    items[:] = [x for x in items if id(x) not in left_out]


@pytest.fixture
def cpus() -> list[str]:
    """The names of the four logical CPUs, or of the parts of a card in their place."""
    return CPUS


@pytest.fixture
def float64():
    """Layers and variables in float64. The policy too: Keras makes it of the float type when first asked, and keeps it."""
    _use_float_type("float64")
    yield
    _use_float_type("float32")


def _use_float_type(dtype: str) -> None:
    keras.config.set_floatx(dtype)
    keras.config.set_dtype_policy(dtype)


@pytest.fixture(autouse=True)
def _graph_optimizer_is_switched(request):
    """Off for tests marked `as_traced`, except for three devices of a grid: see tests/graph_optimizer.py."""
    case = getattr(request.node, "callspec", None)
    number = case.params.get("devices") if case else None
    if not request.node.get_closest_marker("as_traced") or number == graph_optimizer.DEVICES_THAT_KEEP_IT:
        yield
        return
    graph_optimizer.switch(on=False)
    yield
    graph_optimizer.switch(on=True)


@pytest.fixture(autouse=True)
def _old_objects_are_left_alone():
    """Takes what a test leaves behind out of the garbage collector's sight.

    TensorFlow keeps the first trace of every function that may make variables, some 12,000 objects per `fit`. Keras collects
    garbage in `clear_session`, so every later test would look through all of them again: half of the suite's time, once.
    """
    yield
    garbage.leave_alone_what_is_there()
