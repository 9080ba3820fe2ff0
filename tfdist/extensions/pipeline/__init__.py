"""Pipelines. A schedule is data, checked when it is made; its cost is known before it runs; one executor runs it.

schedules/  actions ──> grid, dataflow ──> validation ──> schedule ──> published ──> make_schedule
                                                             ├───────> simulation ──> drawing
stages/     stage ──> masks ──> staged_model, stage_functions┴──> executor ──> step ──> model ──> measured_schedule
            stage ──> costs (flops) ──> split_points ───────────────────────────────────┤
            block_calls ──> block_graph ────────────────────────────────────────────────┘
"""

from tfdist.collectives import OF_EXTENSIONS
from tfdist.extensions.pipeline.deferred_weights import UntilInAPipeline
from tfdist.extensions.pipeline.given_model import Stage
from tfdist.extensions.pipeline.measured_schedule import measure
from tfdist.extensions.pipeline.model import PipelineModel
from tfdist.extensions.pipeline.parameter_cache import ParameterCache
from tfdist.extensions.pipeline.schedules.actions import Action, Phase
from tfdist.extensions.pipeline.schedules.drawing import draw
from tfdist.extensions.pipeline.schedules.make_schedule import make_schedule
from tfdist.extensions.pipeline.schedules.published import (
    Schedule1F1B,
    ScheduleGPipe,
    ScheduleInterleaved1F1B,
    ScheduleZeroBubble,
)
from tfdist.extensions.pipeline.schedules.schedule import Schedule
from tfdist.extensions.pipeline.schedules.simulation import simulate
from tfdist.extensions.pipeline.schedules.validation import validate
from tfdist.sharding.deferral import DEFERRAL

__all__ = [
    "Action",
    "Phase",
    "PipelineModel",
    "Schedule",
    "Schedule1F1B",
    "ScheduleGPipe",
    "ScheduleInterleaved1F1B",
    "ScheduleZeroBubble",
    "Stage",
    "draw",
    "make_schedule",
    "measure",
    "simulate",
    "validate",
]

DEFERRAL.now = UntilInAPipeline()
OF_EXTENSIONS.append(ParameterCache)
