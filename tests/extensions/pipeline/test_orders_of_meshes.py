"""No mesh has ranks that wait for each other: steps on GPUs of several processes are traced, and their collectives looked at.

Which ranks would is asked of every step while it is traced (`tfdist.collectives.circles`): it is refused. So these trace.
"""

import pytest

from tests import workers
from tests.extensions.pipeline.as_processes import cases, plan_of
from tfdist.extensions.pipeline import executor
from tfdist.extensions.pipeline.schedules.messages import Message, events


def test_a_pipeline_of_two_over_two_replicas(cpus):
    plan = plan_of(cpus, (2, 2, 1), 3, "1f1b", 1)
    for rank, chain in plan.chains().items():
        messages = [one for one in chain if one.op == "send"]
        assert len(messages) == 8 and {one.ranks for one in messages} == {(rank // 2 * 2, rank // 2 * 2 + 1)}
        assert {one.op for one in chain} > {"all_gather", "reduce_scatter"}


def test_an_order_for_each_rank_is_seen(cpus, monkeypatch):
    """Messages between three ranks that each receives where it needs what they bring."""

    def when_needed(schedule, rank):
        found = []
        for event in events(schedule, rank):
            if not isinstance(event, Message):
                found += [one for one in events(schedule, rank) if isinstance(one, Message) and one.taker == event]
                found.append(event)
                found += [one for one in events(schedule, rank) if isinstance(one, Message) and one.source == event]
        return found

    monkeypatch.setattr(executor, "events", when_needed)
    with pytest.raises(RuntimeError, match="Ranks disagree on collective"):
        plan_of(cpus, (1, 3, 1), 0, "1f1b", 1)


@pytest.mark.exhaustive
@pytest.mark.timeout(1500)
@pytest.mark.parametrize("size", range(2, 9))
def test_no_mesh_has_ranks_that_wait_for_each_other(tmp_path, size):
    with workers.job(tmp_path, 1, "tests.extensions.pipeline.as_processes:trace_all", size) as job:
        (found,) = job.results(1400)
    assert list(found) == cases(size)
    for ((_, pipe, _), _, _, each), (collectives, messages) in found.items():
        assert collectives
        assert messages if pipe > 1 and each == 1 else not messages or pipe > 1
