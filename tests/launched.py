"""The launcher in this process, on programs that begin as a user's do, each with its own start of TensorFlow."""

from __future__ import annotations

import os
import signal
import threading
from collections.abc import Sequence

from tfdist.tools.launch.cli import main


def run(options: Sequence[str], seconds: float) -> int:
    """Returns the exit code of `python -m tfdist run` with `options`; after `seconds` the launcher ends its workers."""
    limit = threading.Timer(seconds, os.kill, [os.getpid(), signal.SIGTERM])
    limit.start()
    try:
        return main(["run", *options])
    finally:
        limit.cancel()
