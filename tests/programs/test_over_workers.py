"""Programs of this folder over two workers: losses of the whole batch, steps in branches, exports, recomputation."""

import itertools
import pathlib

import pytest
from grids import exhaustive
from training import one_device

from tests import workers
from tests.parity.comparison import assert_same_tree
from tests.programs import worker_programs
from tests.programs.comparing import run
from tests.programs.memory import test_recomputation_of_models
from tests.programs.rows.test_functions_of_the_batch import members, parts
from tests.programs.rows.ways_of_training import PIPELINES, WAYS, Case, faults_of, on_one_device
from tests.programs.saving import test_deferred_restore, test_exports

pytestmark = pytest.mark.as_traced


@pytest.mark.timeout(180)
@pytest.mark.usefixtures("float64")
def test_losses_of_the_whole_batch(tmp_path):
    """They are one device's, and none is warned of: rows that another worker has sent are no worker's own."""
    with workers.job(tmp_path, 2, "tests.programs.worker_programs:run_losses", 3) as job:
        expected = {name: run(program, one_device()) for name, program in worker_programs.LOSSES.items()}
        for found in job.results(120):
            assert_same_tree(found, expected, "losses of the whole batch")


FUNCTIONS = [
    (Case(("rmse", "dice", "centred_rows", "in_batch_negatives"), "step", "uneven"), 3),
    (Case(("masked_mean", "flooding", "max_of_the_rows"), "fit", "empty"), 0),
    (Case(("correlation", "where_of_the_mean"), "loop", "coincide_dynamic"), 2),
    (Case(("rmse", "masked_mean"), "eager", "uneven"), 0),
]


def all_functions(way):
    """A third of the functions, each once: ways take thirds, forms and stages in turns. What a message carries is the same in one
    process, where `test_functions_of_the_batch` has them all."""
    turn = list(WAYS).index(way)
    for kind, (place, form) in itertools.product(WAYS[way][1], enumerate(("uneven", "empty", "coincide"))):
        taken = parts(members(kind, way, form))
        first = (turn + place) % 3
        yield from ((Case(part, way, form), 3 * ((turn + number) % 2)) for number, part in enumerate(taken[first::9]))


@pytest.mark.timeout(900)
@pytest.mark.usefixtures("float64")
@pytest.mark.parametrize("way", ["some", *(exhaustive(way) for way in WAYS if way not in PIPELINES)])
def test_functions_of_the_batch(tmp_path, way):
    assert_functions_over_workers(tmp_path, FUNCTIONS if way == "some" else all_functions(way))


def assert_functions_over_workers(folder, cases, devices=1, **settings):
    """Each case, at its stage, is one device's on both of two workers, which warn of nothing new."""
    cases = list(cases)
    target = "tests.programs.worker_programs:run_functions"
    with workers.job(folder, 2, target, cases, settings, devices_per_worker=devices) as job:
        expected = [on_one_device(case)[1] for case, _ in cases]
        results = job.results(880)
    faults = []
    for worker, result in enumerate(results):
        for (case, stage), (found, told), known in zip(cases, result, expected, strict=True):
            new = [message for message in told if message not in known]
            faults += [f"worker {worker}, {case.way}, {case.form}, {stage}: {x}" for x in faults_of(case, found) + new]
    assert not faults, "\n".join(faults)


@pytest.mark.exhaustive
@pytest.mark.timeout(180)
@pytest.mark.usefixtures("float64")
def test_recomputation(tmp_path):
    """Blocks that are computed again: beside one device."""
    with workers.job(tmp_path, 2, "tests.programs.worker_programs:run_recomputed") as job:
        expected = run(test_recomputation_of_models.dense_blocks, one_device())
        for found in job.results(150):
            assert_same_tree(found, expected)


@pytest.mark.exhaustive
@pytest.mark.timeout(300)
@pytest.mark.parametrize("zero_stage", [0, 3])
def test_examples(tmp_path, zero_stage):
    with workers.job(tmp_path, 2, "tests.programs.worker_programs:run_examples", zero_stage) as job:
        expected = {name: run(program, one_device()) for name, program in worker_programs.EXAMPLES.items()}
        for found in job.results(250):
            assert_same_tree(found, expected, "examples")


@pytest.mark.exhaustive
@pytest.mark.timeout(300)
def test_it_is_one_device(tmp_path):
    stages = [1, 3]
    with workers.job(tmp_path, 2, "tests.programs.worker_programs:run_all", str(tmp_path), stages) as job:
        expected = {name: run(program, one_device()) for name, program in worker_programs.PROGRAMS.items()}
        expected["restored"] = run(lambda strategy: test_deferred_restore.going_on(strategy, "adam"), one_device())
        results = job.results(250)
    for found in results:
        for name, numbers in expected.items():
            for stage in stages:
                assert_same_tree(found[f"{name}, {stage}"], numbers, f"{name}, {stage}")
    written = sorted(str(path.relative_to(tmp_path)) for path in tmp_path.glob("*/ckpt-*.index"))
    assert written == ["of_all/ckpt-1.index", "own_0/ckpt-1.index", "own_1/ckpt-1.index"]
    exported = {
        str(path): results[0][f"exported, {stage}"].tolist()
        for stage in stages
        for path in pathlib.Path(tmp_path / f"stage_{stage}").iterdir()
    }
    assert len(exported) == 6 * len(stages)
    test_exports.assert_served(exported, tmp_path)
