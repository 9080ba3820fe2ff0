"""Checks of which one worker of two fails, for a job of the tests."""

from __future__ import annotations

import functools
import os
import signal
import time

import tensorflow as tf

from tfdist import collectives
from tfdist.runtime import read_cluster
from tfdist.tools.doctor.check import Check, Finding
from tfdist.tools.doctor.command import all_checks
from tfdist.tools.doctor.examination import run_checks
from tfdist.tools.doctor.session import Session
from tfdist.tools.doctor.workers import Workers

SECONDS = 25.0


def _meet(session: Session) -> None:
    strategy = session.base
    tf.function(lambda: strategy.run(lambda: collectives.all_reduce(tf.ones([3]))))()


def dies(session: Session) -> Finding:
    """Worker 1 is killed while worker 0 waits for it in a collective."""
    if session.base.cluster.worker_index == 1:
        os.kill(os.getpid(), signal.SIGKILL)
    _meet(session)
    return Finding("")


def hangs(session: Session) -> Finding:
    if session.base.cluster.worker_index == 1:
        time.sleep(600)
    return Finding("")


def raises(session: Session) -> Finding:
    if session.base.cluster.worker_index == 0:
        raise ValueError("no")
    _meet(session)
    return Finding("")


def examine() -> dict[str, tuple[str, str]]:
    """Returns, on every worker, how each check has ended, and what was said."""
    known = {check.name: check for check in all_checks()}
    checks = [
        known["devices"],
        Check("dies", dies),
        known["bandwidth/all_reduce"],
        Check("hangs", hangs),
        Check("raises", raises),
        known["parity/zero_stage_3"],
    ]
    cluster = read_cluster()
    workers = Workers(cluster, 60.0)
    session = functools.partial(Session, None, True, SECONDS)
    outcomes = run_checks(checks, session, SECONDS, workers, lambda text: None)
    workers.close()
    return {outcome.name: (str(outcome.status), outcome.summary if outcome.status.is_bad else "") for outcome in outcomes}
