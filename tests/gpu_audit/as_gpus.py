"""Steps traced as they are for GPUs: tfdist and Keras take the ranks' CPUs for GPUs."""

from __future__ import annotations

import contextlib
import importlib
from collections.abc import Iterator
from unittest import mock

from tests.pretended_gpus import pretended_gpus

_rnn = importlib.import_module("keras.src.backend.tensorflow.rnn")


@contextlib.contextmanager
def as_gpus(transport: str) -> Iterator[None]:
    """Within it "nccl" carries what whole GPUs send each other, or "ring" what logical GPUs of a card do."""
    with pretended_gpus(are_whole=transport == "nccl"), mock.patch.object(_rnn, "_is_gpu_available", lambda: True):
        yield
