"""Initial weights, the batch and the optimizer of the gpt, the same in every framework. NumPy only."""

from __future__ import annotations

import zlib

import numpy as np

from benchmarks.cases import Case

LEARNING_RATE, WEIGHT_DECAY = 1e-4, 0.01
EPSILON = 1e-12  # of Adam; a larger one would not count alike: the frameworks add it in different places


def initial_weight(path: str, shape: tuple[int, ...]) -> np.ndarray:
    """Returns the initial value of the weight with this path in the Keras model, such as "block_0_mlp_in/kernel"."""
    kind = path.rpartition("/")[2]
    if kind in ("gamma", "beta", "bias"):
        return np.full(shape, float(kind == "gamma"), np.float32)
    return np.random.default_rng(zlib.crc32(path.encode())).standard_normal(shape, np.float32) * np.float32(0.02)


def token_batch(case: Case) -> tuple[np.ndarray, np.ndarray]:
    """Returns tokens and next tokens, (batch, sequence): always the same."""
    tokens = np.random.default_rng(1).integers(0, case.vocabulary, (case.global_batch_size, case.sequence_length + 1))
    return tokens[:, :-1], tokens[:, 1:]
