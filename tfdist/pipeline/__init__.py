"""Level 6: pipelines. A schedule is data, checked when it is made; its cost is known before it runs; one executor runs it.

schedules/  actions ──> grid, dataflow ──> validation ──> schedule ──> published ──> make_schedule
                                                             ├───────> simulation ──> drawing
stages/     stage ──> masks ──> staged_model, stage_functions┴──> executor ──> step ──> model ──> measured_schedule
            stage ──> costs (flops) ──> split_points ───────────────────────────────────┤
            block_calls ──> block_graph ────────────────────────────────────────────────┘
"""

from tfdist.pipeline.given_model import Stage
from tfdist.pipeline.measured_schedule import measure
from tfdist.pipeline.model import PipelineModel
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
