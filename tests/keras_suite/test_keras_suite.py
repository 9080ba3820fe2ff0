"""Keras's own distribution tests pass with `ShardedStrategy` in the place of `MirroredStrategy`, at every stage."""

import json
import os

import pytest

from tests import forks
from tests.keras_suite import run

# Cases that cannot apply, and why, by stage.
NOT_MIRRORED = "a parameter of stage 3 is no MirroredVariable: each device holds a part"
PARTS = "what `.values` of a parameter holds at stage 3 are the devices' parts"
NO_TF_KERAS = "tf_keras, of Keras 2, is not installed"
SHARED = "MirroredStrategy takes a gradient that is one tensor on all devices as summed already; here each device adds its own"
OWN_SUM = "MirroredStrategy reads the first device's own accumulator; here it reads as the sum over the devices, as on one"
CANNOT_APPLY = {
    (3, "DistributeTest.test_variable_creation"): (NOT_MIRRORED, "'MirroredVariable' not found in 'ShardedVariable'"),
    (3, "DistributeTest.test_correctness_with_fit_and_regularizer"): (PARTS, "(shapes (1,), (1, 1) mismatch)"),
    **{
        (stage, "OptimizerDistributeTest.test_single_step1 ('tf_keras_sgd')"): (NO_TF_KERAS, "skipped: tf_keras not installed")
        for stage in range(4)
    },
    **{(stage, "OptimizerDistributeTest.test_ema"): (SHARED, "1.0 (ACTUAL), 2.0 (DESIRED)") for stage in range(4)},
    **{
        (stage, "OptimizerDistributeTest.test_gradient_accumulation"): (OWN_SUM, "2.0 (ACTUAL), 1.0 (DESIRED)")
        for stage in range(4)
    },
}


@pytest.fixture(scope="module")
def outcomes(tmp_path_factory):
    """By the stage; all in one process: starting TensorFlow costs more than the cases."""
    folder = tmp_path_factory.mktemp("keras_suite")
    files = {"output": folder / "output.txt", "errors": folder / "errors.txt"}
    process = forks.start(run.main, list(range(4)), environment=dict(os.environ), folder=folder, **files)
    try:
        code = process.wait(280)
    finally:
        process.kill()
    assert code == 0, files["errors"].read_text("utf-8")[-3000:]
    return {int(stage): found for stage, found in json.loads(files["output"].read_text("utf-8").splitlines()[-1]).items()}


@pytest.mark.timeout(300)
@pytest.mark.parametrize("zero_stage", range(4))
def test_cases_pass(zero_stage, outcomes):
    found = outcomes[zero_stage]
    assert len(found) >= 17, "Keras has fewer distribution tests than it had"
    for name, outcome in found.items():
        if (zero_stage, name) in CANNOT_APPLY:
            _, expected = CANNOT_APPLY[zero_stage, name]
            assert expected in outcome, f"{name} is said not to apply, but ended with:\n{outcome}"
        else:
            assert outcome == "passed", f"{name}:\n{outcome}"


@pytest.mark.timeout(300)
def test_the_list_of_exceptions_names_existing_cases(outcomes):
    for zero_stage, name in CANNOT_APPLY:
        assert name in outcomes[zero_stage]
