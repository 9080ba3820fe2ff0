"""The arithmetic of the compressors, written again in NumPy: what a rank decodes of what it is sent."""

import math

import numpy as np
from ml_dtypes import bfloat16

F = np.float32


def blocks(x, block_size, most, scale_dtype):
    """Returns a vector (n,) as it is decoded: block by block, `x / s` rounded, times `s`."""
    n = x.size
    padded = np.zeros(-(-n // block_size) * block_size, F)
    padded[:n] = x
    decoded = []
    for block in padded.reshape(-1, block_size):
        if not np.isfinite(block).all():
            decoded.append(np.full(block_size, np.nan, F))
            continue
        scale = F(F(np.abs(block).max() * F(1 / most)).astype(scale_dtype))
        if scale < 2.0**-126:
            decoded.append(np.zeros(block_size, F))
            continue
        decoded.append(np.round(block * (F(1) / scale)) * scale)
    return np.concatenate(decoded)[:n] if n else x.astype(F)


def int8(x, block_size=256):
    return blocks(x, block_size, 127, F)


def int4(x, block_size=32):
    return blocks(x, block_size, 7, bfloat16)


def as_bfloat16(x):
    return x.astype(bfloat16).astype(F)


def top_k(x, fraction=0.01, rest=int8):
    n = x.size
    chunks = -(-n // 4096)
    length = -(-n // chunks)
    kept = math.ceil(round(fraction * length, 6))
    padded = np.zeros(chunks * length, F)
    padded[:n] = x
    places = []
    for number, chunk in enumerate(padded.reshape(chunks, length)):
        sizes = np.where(np.isnan(chunk), np.inf, np.abs(chunk))
        places += [number * length + place for place in np.argsort(-sizes, kind="stable")[:kept]]
    others = padded.copy()
    others[places] = 0
    decoded = np.zeros_like(padded)
    if rest is not None:
        decoded[:n] = rest(others[:n])
    decoded[places] = padded[places]
    return decoded[:n]


MODELS = {
    "bfloat16": as_bfloat16,
    "int8": int8,
    "int4": int4,
    "top_k": top_k,
}
