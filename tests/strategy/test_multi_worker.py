"""Jobs of several workers against one device: the same losses, weights and slots, on every worker.

And against as many devices of one process: the same random numbers.
"""

import functools

import keras
import numpy as np
import pytest
from grids import exhaustive

from tests import training, workers
from tests.parity import optimizer_cases
from tests.strategy import worker_cases

CASES = "tests.strategy.worker_cases"
FIT, LOOP = "fit", "custom_loop"
# workers, devices per worker, whether the first is called chief, loops by stage
JOBS = [
    (2, 1, False, {0: [FIT], 1: [LOOP], 2: [FIT], 3: [FIT, LOOP]}),
    exhaustive(2, 1, False, {0: [LOOP], 1: [FIT], 2: [LOOP]}),
    (2, 2, False, {3: [FIT]}),
    exhaustive(2, 2, False, {3: [LOOP]}),
    (4, 1, True, {1: [FIT], 3: [LOOP]}),
    exhaustive(4, 1, True, {1: [LOOP], 3: [FIT]}),
]


def assert_equal_trees(actual, expected, what, rtol=1e-5):
    """Numbers agree to `rtol` of the largest of each array."""
    if isinstance(expected, dict):
        assert list(actual) == list(expected), what
        for key in expected:
            assert_equal_trees(actual[key], expected[key], f"{what}, {key}", rtol)
    elif isinstance(expected, list) and not all(isinstance(value, float) for value in expected):
        assert len(actual) == len(expected), what
        for number, (one, other) in enumerate(zip(actual, expected, strict=True)):
            assert_equal_trees(one, other, f"{what} {number}", rtol)
    else:
        actual, expected = np.asarray(actual), np.asarray(expected)
        assert actual.shape == expected.shape, what
        scale = max(np.abs(expected).max(initial=0.0), 1e-2)
        np.testing.assert_allclose(actual, expected, rtol=0, atol=rtol * scale, err_msg=what)


def assert_same_as(expected, numbers):
    training.assert_same(training.Trained(**numbers), expected)


@pytest.mark.timeout(400)
@pytest.mark.parametrize(("number", "devices", "chief", "loops"), JOBS)
def test_training_is_that_of_one_device(tmp_path, number, devices, chief, loops):
    with workers.job(tmp_path, number, f"{CASES}:train_grid", loops, devices_per_worker=devices, chief=chief) as job:
        expected = {name: on_one_device(name) for names in loops.values() for name in names}
        masks = worker_cases.dropout_masks(training.strategy_for(number * devices, 0))
        for worker, found in enumerate(job.results(350)):
            for (_, what), numbers in found.items():
                if what == "masks":
                    np.testing.assert_array_equal(numbers, masks[worker * devices : (worker + 1) * devices])
                else:
                    assert_same_as(expected[what], numbers)
    assert len({mask.tobytes() for mask in masks}) == number * devices


@functools.cache
def on_one_device(loop):
    return getattr(training, loop)(training.one_device(), training.small, worker_cases.adam)


# What looks at more than its own elements, so that workers have to talk about it; and one that does not.
ASKED = [
    "global_clipnorm",
    "average",
    "constraints",
    "accumulation",
    "dynamic loss scale",
    "several optimizers",
    "muon",
    "unknown",
]


@pytest.mark.as_traced
@pytest.mark.timeout(500)
@pytest.mark.parametrize("names", [ASKED, exhaustive(list(optimizer_cases.CASES))], ids=len)
def test_whatever_an_optimizer_is_asked_for(tmp_path, names):
    with workers.job(tmp_path, 2, f"{CASES}:train_optimizers", [1, 3], names) as job:
        expected = {name: optimizer_cases.train(name, optimizer_cases.loop_of(name), training.one_device()) for name in names}
        for stage in (1, 3):
            overflowing = optimizer_cases.train_overflowing(training.one_device(), accumulates=stage == 1)
            expected[f"overflow {stage}"] = overflowing
        for found in job.results(450):
            assert list(found) == list(expected)
            for name, numbers in found.items():
                assert_same_as(expected[name], numbers)


@pytest.mark.as_traced
@pytest.mark.timeout(400)
@pytest.mark.parametrize(
    ("number", "devices", "methods"),
    [
        (2, 1, {2: ["fit"], 3: ["normalise", "steps", "between"]}),
        (2, 2, {0: ["batches"]}),
        exhaustive(2, 1, dict.fromkeys((0, 3), list(worker_cases.METHODS))),
        exhaustive(2, 2, {2: list(worker_cases.METHODS)}),
    ],
)
def test_methods_of_a_model_on_data_that_do_not_divide(tmp_path, number, devices, methods):
    """By the stage."""
    with workers.job(tmp_path, number, f"{CASES}:ask_models", methods, devices_per_worker=devices) as job:
        expected = {(stage, name): asked_on_one_device(name) for stage, names in methods.items() for name in names}
        for found in job.results(350):
            assert_equal_trees(found, expected, "stage and method")


@functools.cache
def asked_on_one_device(name):
    return worker_cases.METHODS[name](training.one_device())


@pytest.mark.timeout(200)
def test_workers_that_read_their_own_data(tmp_path):
    """The shorter worker takes part with no rows until the longer one is through."""
    with workers.job(tmp_path, 2, f"{CASES}:read_own_parts", 3) as job:
        first, second = job.results(150)
    assert len(first["losses"]) == 3
    assert_equal_trees(second, first, "the other worker")
    x, y = training.vectors(20)
    batches = [[0, 1, 2, 3, 12, 13, 14, 15], [4, 5, 6, 7, 16, 17, 18, 19], [8, 9, 10, 11]]
    assert_equal_trees(first, one_device_on(x, y, batches), "one device on the same batches")


def one_device_on(x, y, batches):
    keras.utils.set_random_seed(5)
    model = training.mlp()
    model.compile(worker_cases.adam(), training.loss_function())
    losses = [float(model.train_on_batch(x[rows], y[rows])) for rows in batches]
    found = {"losses": losses, "weights": model.get_weights()}
    model.compile(worker_cases.adam(), training.loss_function(), metrics=["accuracy"])
    found["logs"] = model.train_on_batch(x[:8], y[:8], return_dict=True)
    found["counted"] = [variable.numpy() for variable in model.metrics_variables]
    return {**found, "trained on batches of their own": model.get_weights()}


@pytest.mark.as_traced
@pytest.mark.timeout(500)
@pytest.mark.parametrize(("size", "does_train"), [(11, False), exhaustive(12, True)])
def test_the_order_of_more_than_ten_workers(tmp_path, size, does_train):
    """By name the eleventh, worker 10, would come behind worker 1."""
    with workers.job(tmp_path, size, f"{CASES}:rank_order", does_train) as job:
        expected = on_one_device(LOOP) if does_train else None
        results = job.results(450)
    ranks = np.arange(size, dtype="float32")
    for rank, found in enumerate(results):
        assert found["rank"] == rank
        np.testing.assert_array_equal(found["gathered"], np.repeat(ranks, 2))
        np.testing.assert_array_equal(found["gather"], np.repeat(ranks, 2))
        np.testing.assert_array_equal(found["summed"], [ranks.sum()] * 2)
        np.testing.assert_array_equal(found["scattered"], [size * rank + ranks.sum()])
        np.testing.assert_array_equal(found["exchanged"], ranks * 100 + rank)
        np.testing.assert_array_equal(found["from_3"], [3, 3])
        if does_train:
            assert_same_as(expected, found["trained"])
