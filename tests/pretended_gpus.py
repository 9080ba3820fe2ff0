"""CPUs that tfdist takes for GPUs: what it traces for GPUs can then be looked at and, where TensorFlow's ring serves, be run."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from unittest import mock

from tfdist.collectives import program
from tfdist.collectives.transports import choice
from tfdist.strategy import multi_worker_extended


@contextlib.contextmanager
def pretended_gpus(*, are_whole: bool) -> Iterator[None]:
    """Within it every device is a GPU to tfdist: whole ones, for NCCL, or logical ones of a card, for the ring."""
    with contextlib.ExitStack() as stack:
        stack.enter_context(mock.patch.object(choice, "uses_physical_gpus", lambda devices: are_whole))
        for module in (program, multi_worker_extended):
            stack.enter_context(mock.patch.object(module, "are_cpus", lambda devices: False))
        yield
