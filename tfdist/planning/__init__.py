"""Level 9.5: will it fit, how fast, and which plan.

planner ──> search, plans (the table, the picture)
   ├──> traced_model ──> memory, sent_bytes ──> device_memory
   └──> estimates ──> work, hardware (data_sheets) ──> step_time
command: `python -m tfdist plan`; candidate: a plan; known_models, decoder, builders: models by name
scaling: tokens, operations, days; out_of_memory: notes of the error of a step that had too little memory
"""

from tfdist.planning import out_of_memory
from tfdist.planning.candidate import Candidate
from tfdist.planning.device_memory import DeviceMemory
from tfdist.planning.hardware import Hardware
from tfdist.planning.planner import plan
from tfdist.planning.plans import Plans
from tfdist.planning.search import Estimated
from tfdist.planning.step_time import StepTime

__all__ = ["Candidate", "DeviceMemory", "Estimated", "Hardware", "Plans", "StepTime", "out_of_memory", "plan"]
