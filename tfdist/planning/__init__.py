"""Level 9.5: will it fit, how fast, and which plan.

traced_model ──> memory, sent_bytes ──> device_memory
candidate ─────────┘
"""

from tfdist.planning.candidate import Candidate
from tfdist.planning.device_memory import DeviceMemory

__all__ = ["Candidate", "DeviceMemory"]
