"""Random numbers inside replicas: every data rank draws its own, all from the one state of the seed generator.

Keras's layers (dropout, noise, random augmentation) ask a `SeedGenerator` for a seed in each call; its state is a variable,
[seed, draws so far]. Under tf.distribute every rank reads the same state, so that all draw the same mask, each for its part of
the batch. Here data rank r gets

    r = 0    [seed, draws]              what one device would draw
    r > 0    [hash(seed, r), draws]     of a stream of its own

Within `sharded_region()`, where tensor ranks compute different things, r is the data rank plus the data size times the tensor
rank: each draws for its own part. The state itself moves on alike on all ranks, as on one device, and is saved as ever. So two
runs from one `keras.utils.set_random_seed` are equal bit by bit, and a run on other numbers of devices differs in its random
numbers (and in nothing else). In a job of several workers r counts over all of them. Outside sharded regions ranks that share a
data index, tensor and pipe peers, draw the same.

Note: what has no generator. `keras.random.normal(shape, seed=3)`, with an integer, is a constant in Keras: the same in each
call, and so on each rank. Layers turn their `seed=3` into a generator. A function of `keras.random` without a seed raises in a
replica, as it does under tf.distribute's own strategies: Keras's global generator is a variable of the thread, and replicas are
traced in threads of their own. Initial values are drawn outside replicas, once. `tf.random.uniform` and the like are
TensorFlow's own, not Keras's, and are left alone.
"""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Iterator

import tensorflow as tf

from tfdist.collectives import rank_program

_local = threading.local()


@contextlib.contextmanager
def sharded_region() -> Iterator[None]:
    """Within it, tensor ranks draw different random numbers."""
    before = getattr(_local, "is_sharded", False)
    _local.is_sharded = True
    try:
        yield
    finally:
        _local.is_sharded = before


def of_this_rank(seed: tf.Tensor) -> tf.Tensor:
    """Returns the seed that this rank draws from, where `seed` is what one device would draw from."""
    stream = _stream()
    return seed if stream == 0 else fold_in(seed, stream)


def fold_in(seed: tf.Tensor, stream: int) -> tf.Tensor:
    """Returns the seed of stream `stream`, at least 1, from that of stream 0: integers of shape (2,), a `SeedGenerator`'s."""
    key = tf.stack([seed[0], tf.cast(stream, seed.dtype)])
    hashed = tf.random.stateless_uniform([], key, minval=None, maxval=None, dtype=seed.dtype, alg="philox")
    return tf.stack([hashed, seed[1]])


def _stream() -> int:
    """Returns r of the rank that computes here; 0 outside the replicas of a tfdist strategy."""
    program = rank_program()
    if program is None:
        return 0
    coordinate = program.mesh.coordinate(program.rank)
    is_sharded = getattr(_local, "is_sharded", False)
    return coordinate.data + (program.mesh.data_parallel_size * coordinate.tensor if is_sharded else 0)
