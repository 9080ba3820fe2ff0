"""Will it fit, how fast, and which plan.

planner ──> search, plans (the table, the picture)
   ├──> traced_model ──> memory, sent_bytes ──> device_memory
   └──> estimates ──> work, hardware (data_sheets) ──> step_time
command: `python -m tfdist plan`; candidate: a plan; known_models, decoder, builders: models by name
scaling: tokens, operations, days; out_of_memory: notes of the error of a step that had too little memory
"""

from tfdist.tools.planning.candidate import Candidate
from tfdist.tools.planning.device_memory import DeviceMemory
from tfdist.tools.planning.hardware import Hardware
from tfdist.tools.planning.planner import plan
from tfdist.tools.planning.plans import Plans
from tfdist.tools.planning.search import Estimated
from tfdist.tools.planning.step_time import StepTime

__all__ = ["Candidate", "DeviceMemory", "Estimated", "Hardware", "Plans", "StepTime", "plan"]
