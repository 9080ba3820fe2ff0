"""What machine it is: the first row, without which no other can run."""

from __future__ import annotations

import sys

import keras
import tensorflow as tf

import tfdist
from benchmarks.one_card.card import Card
from tfdist.mesh.device_details import details_of
from tfdist.tools.doctor.check import Check, Finding, Result
from tfdist.tools.doctor.process import run_in_process

_SECONDS = 120.0


def machine_row(card: Card) -> Result:
    """Returns versions and the card, as a process beside this one finds them: this one must leave the GPU alone."""
    (found,) = run_in_process([Check("machine", _look, is_needed=True)], lambda: card, _SECONDS)
    return found


def _look(card: Card) -> Finding:
    devices = card.devices(1)
    (one,) = details_of(devices)
    versions = {"tensorflow": tf.__version__, "keras": keras.__version__, "tfdist": tfdist.__version__}
    data = {
        **versions,
        "card": one.card,
        "compute_capability": one.compute_capability,
        "memory_bytes": one.memory_bytes,
        "cuda": {name: str(value) for name, value in tf.sysconfig.get_build_info().items() if "version" in name},
        "python": sys.version.split()[0],
    }
    told = ", ".join(f"{name} {version}" for name, version in versions.items())
    memory = f"{one.memory_bytes / 2**30:.1f} GiB" if one.memory_bytes else "memory unknown"
    return Finding(f"{card.kind} {one.card}, {memory}; {told}", data)
