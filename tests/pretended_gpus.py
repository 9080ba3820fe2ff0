"""CPUs that tfdist takes for GPUs: what it traces for GPUs can then be looked at and, where TensorFlow's ring serves, be run."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from unittest import mock

import tensorflow as tf

from tfdist.collectives import communicator, rank
from tfdist.collectives.transports import choice, same_host


@contextlib.contextmanager
def pretended_gpus(*, are_whole: bool) -> Iterator[None]:
    """Within it every device is a GPU to tfdist: whole ones, for NCCL, or logical ones of a card, for the ring."""
    with contextlib.ExitStack() as stack:
        stack.enter_context(mock.patch.object(choice, "uses_physical_gpus", lambda devices: are_whole))
        stack.enter_context(mock.patch.object(rank, "are_cpus", lambda devices: False))
        stack.enter_context(mock.patch.object(same_host.SAME_HOST, "now", same_host.AsOtherHosts()))
        for module in (communicator, rank):
            stack.enter_context(mock.patch.object(module, "host_of", _host_of))
        yield


def _host_of(device: str) -> str:
    """Returns the process's first CPU."""
    return tf.DeviceSpec.from_string(device).replace(device_index=0).to_string()
