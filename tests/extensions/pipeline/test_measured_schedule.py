"""When the actions of a pipeline really run. Times are compared with each other only: that of one action says nothing."""

import numpy as np
import pytest
from ranks import strategy_on
from training import one_device

from tests.extensions.pipeline.pipeline_models import compiled, data
from tfdist.extensions.pipeline import measure, simulate
from tfdist.extensions.pipeline.schedules.dataflow import inputs_of


def assert_possible(measured, schedule):
    """Every action once and on its rank, in the schedule's order, one after the other; none before what it needs has begun.

    Has begun, not ended: a result is sent when it exists, which may be before the time of the action's end is read.
    """
    assert measured.schedule is schedule
    starts = {span.action: span.start for span in measured.spans}
    assert len(starts) == len(measured.spans) == len(simulate(schedule).spans)
    assert min(starts.values()) == 0
    for rank in range(schedule.num_ranks):
        spans = [span for span in measured.spans if span.rank == rank]
        assert [span.action for span in spans] == schedule.actions(rank)
        assert all(span.start <= span.end for span in spans)
        assert all(one.end <= other.start for one, other in zip(spans, spans[1:], strict=False))
    for span in measured.spans:
        assert all(starts[needed] < span.start for needed in inputs_of(span.action, starts)), str(span.action)


SETTINGS = [
    (4, "tied", {"num_microbatches": 4}),
    (2, "chain", {"num_microbatches": 2, "schedule": "zero_bubble"}),
    (2, "branches", {"num_microbatches": 2, "schedule": "interleaved", "stages_per_rank": 2}),
]


@pytest.mark.as_traced
@pytest.mark.parametrize(("ranks", "name", "settings"), SETTINGS)
def test_what_ran(ranks, name, settings):
    model = compiled(strategy_on(ranks, zero_stage=0, pipeline_parallel_size=ranks), name, **settings)
    x, y, sample_weight = data(name)
    assert_possible(measure(model, x, y, sample_weight, runs=1), model.schedule)


def test_as_tensorflow_optimizes_it_and_the_weights_stay():
    model = compiled(strategy_on(2, zero_stage=0, pipeline_parallel_size=2), "tied", num_microbatches=2, schedule="zero_bubble")
    before = model.get_weights()
    assert_possible(measure(model, *data("tied")[:2], runs=2), model.schedule)
    for one, other in zip(model.get_weights(), before, strict=True):
        np.testing.assert_array_equal(one, other)


def test_without_a_pipeline():
    model = compiled(one_device(), "tied", num_microbatches=2)
    assert_possible(measure(model, *data("tied")[:2], runs=1), model.schedule)


def test_runs_is_a_number():
    with pytest.raises(ValueError, match="`runs` must be a positive integer"):
        measure(compiled(one_device(), "tied", num_microbatches=2), *data("tied")[:2], runs=0)
