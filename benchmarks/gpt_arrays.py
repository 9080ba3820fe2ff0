"""Initial weights, the batch and the optimizer of the gpt and the mlp, the same in every framework. NumPy only."""

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
    # In a stack of Dense layers with ReLU between them signals keep their size.
    scale = (2 / shape[0]) ** 0.5 if path.startswith("dense_") else 0.02
    return np.random.default_rng(zlib.crc32(path.encode())).standard_normal(shape, np.float32) * np.float32(scale)


def make_batch(case: Case) -> tuple[np.ndarray, np.ndarray]:
    """Returns inputs and targets of the global batch: always the same."""
    if case.model == "gpt":
        return tuple(tokens.astype(np.int32) for tokens in token_batch(case))
    return tuple(np.random.default_rng(1).standard_normal((2, case.global_batch_size, case.width), np.float32))


def token_batch(case: Case) -> tuple[np.ndarray, np.ndarray]:
    """Returns tokens and next tokens, (batch, sequence): always the same."""
    tokens = np.random.default_rng(1).integers(0, case.vocabulary, (case.global_batch_size, case.sequence_length + 1))
    return tokens[:, :-1], tokens[:, 1:]
