"""Estimates of memory and time for a model of a hundred parameters, where the model does not matter."""

from __future__ import annotations

from tfdist.tools.planning.candidate import Candidate
from tfdist.tools.planning.device_memory import DeviceMemory
from tfdist.tools.planning.step_time import StepTime


def memory_of(candidate: Candidate) -> DeviceMemory:
    """A hundred bytes of each state, as the stages say, and of activations, half of them recomputed."""
    states = [100 // (candidate.shards if candidate.zero_stage >= least else 1) for least in (3, 2, 1)]
    return DeviceMemory(*states, activations=50 if candidate.recompute else 100)


def time_of(candidate: Candidate) -> StepTime:
    together = 1.0 + 0.1 * candidate.zero_stage + 0.5 * candidate.recompute
    return StepTime(1.0, 0.0, 0.0, 0.0, together)
