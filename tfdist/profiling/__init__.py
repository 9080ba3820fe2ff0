"""Level 9: what a model holds and what a step costs."""

from tfdist.profiling.memory_report import DeviceMemory, MemoryReport, memory_report
