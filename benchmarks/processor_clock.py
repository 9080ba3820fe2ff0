"""A calibration in seconds of the processor, in the place of the clock's: for a machine that does other things as well.

They are those of all threads of all ranks, over the cores: what the clock would show if nothing ever waited. In a job every
worker does the same at once, so that its own seconds are as many as those of each other.
"""

from __future__ import annotations

import dataclasses
import os
import time
from unittest import mock

from tfdist.tools.doctor import calibration, timing
from tfdist.tools.doctor.check import LeftOutError, Outcome, Result, Status
from tfdist.tools.doctor.session import Session
from tfdist.tools.planning.hardware import Hardware


class ProcessorClock:
    """In the place of the module `time`, in one of several like processes."""

    strftime = staticmethod(time.strftime)

    def __init__(self, processes: int):
        self._processes = processes

    def perf_counter(self) -> float:
        return time.process_time() * self._processes / (os.cpu_count() or 1)


def calibrated_by_processor(devices: int, processes: int) -> Hardware:
    """Returns what `python -m tfdist calibrate` measures, in seconds of the processor.

    Args:
        devices: how many there are: logical CPUs of this process, or as many workers.
        processes: how many processes there are; all call it at once.
    """
    session = Session(devices if processes == 1 else None, is_quick=False, timeout_seconds=600.0)
    clock, outcomes = ProcessorClock(processes), []
    with mock.patch.object(timing, "time", clock), mock.patch.object(calibration, "time", clock):
        for check in calibration.calibration_checks():
            try:
                result = Result(check.name, Status.HOLDS, "", 0.0, check.run(session).data)
            except LeftOutError as reason:
                result = Result(check.name, Status.LEFT_OUT, str(reason), 0.0)
            outcomes.append(Outcome((result,)))
    # One alone takes as many seconds of the processor as among all.
    return dataclasses.replace(calibration.hardware_of(outcomes), sharing=float(devices))
