"""Level 6: pipelines. A schedule is data, checked when it is made; what it costs is known before it runs.

    actions ──> grid, dataflow ──> validation ──> schedule ──> schedules ──> make_schedule
                                                     └───────> simulation ──> drawing
"""

from tfdist.pipeline.actions import Action, Phase
from tfdist.pipeline.drawing import draw
from tfdist.pipeline.make_schedule import make_schedule
from tfdist.pipeline.schedule import Schedule
from tfdist.pipeline.schedules import Schedule1F1B, ScheduleGPipe, ScheduleInterleaved1F1B, ScheduleZeroBubble
from tfdist.pipeline.simulation import simulate
from tfdist.pipeline.validation import validate

__all__ = [
    "Action",
    "Phase",
    "Schedule",
    "Schedule1F1B",
    "ScheduleGPipe",
    "ScheduleInterleaved1F1B",
    "ScheduleZeroBubble",
    "draw",
    "make_schedule",
    "simulate",
    "validate",
]
