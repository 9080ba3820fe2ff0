"""Level 6: pipelines. A schedule is data, checked when it is made; what it costs is known before it runs. One executor runs any.

actions ──> grid, dataflow ──> validation ──> schedule ──> schedules ──> make_schedule
                                                 ├───────> simulation ──> drawing
stage ──> masks ──> split ─────────────────────────────────┴──> executor ──> step ──> model ──> measuring
stage ──> costs (flops, stopwatch) ──> cuts (balance) ────────────────────────────────┘
"""

from tfdist.pipeline.measuring import measure
from tfdist.pipeline.model import PipelineModel, Stage
from tfdist.pipeline.schedules.actions import Action, Phase
from tfdist.pipeline.schedules.drawing import draw
from tfdist.pipeline.schedules.make_schedule import make_schedule
from tfdist.pipeline.schedules.published import Schedule1F1B, ScheduleGPipe, ScheduleInterleaved1F1B, ScheduleZeroBubble
from tfdist.pipeline.schedules.schedule import Schedule
from tfdist.pipeline.schedules.simulation import simulate
from tfdist.pipeline.schedules.validation import validate

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
