"""A calibration in seconds of the processor, in the place of the clock's: for a machine that does other things as well."""

from __future__ import annotations

import os
import time
from unittest import mock

from tfdist.doctor import calibration, timing
from tfdist.doctor.check import LeftOutError, Outcome, Result, Status
from tfdist.doctor.session import Session
from tfdist.planning.hardware import Hardware


class ProcessorClock:
    """In the place of the module `time`: seconds of all threads of this process, over the cores."""

    strftime = staticmethod(time.strftime)

    @staticmethod
    def perf_counter() -> float:
        return time.process_time() / (os.cpu_count() or 1)


def calibrated_by_processor(devices: int) -> Hardware:
    """Returns what `python -m tfdist calibrate` measures, of logical CPUs of this process, in seconds of the processor."""
    session = Session(devices, is_quick=False, timeout_seconds=600.0)
    outcomes = []
    with mock.patch.object(timing, "time", ProcessorClock), mock.patch.object(calibration, "time", ProcessorClock):
        for check in calibration.calibration_checks():
            try:
                result = Result(check.name, Status.HOLDS, "", 0.0, check.run(session).data)
            except LeftOutError as reason:
                result = Result(check.name, Status.LEFT_OUT, str(reason), 0.0)
            outcomes.append(Outcome((result,)))
    return calibration.hardware_of(outcomes)
