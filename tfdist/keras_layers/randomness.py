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

Note: what has no seed. `keras.random.normal(shape)` draws from Keras's global generator, which Keras keeps for each thread; the
ranks have threads of their own. Here they draw from that of the thread that runs them (`RankSeeds`), as one device does; it is
made when a rank asks for the first one. A generator whose state was made outside the strategy's scope, this one or a layer's, is
given a state of the strategy when a rank draws from it first: of one plain variable each rank would draw the next number.

Note: TensorFlow's own. `tf.random.normal(shape)` and the like have two numbers for a seed, which follow from `tf.random.set_seed`
and from how many such operations the graph has. The first rank that comes to the n-th one gets what one device gets, and all
others a hash of that and of their place; so workers draw different numbers, and tensor peers the same.

Note: constants. `keras.random.normal(shape, seed=3)`, with an integer, is a constant in Keras, the same in each call, and so on
each rank; `tf.random.stateless_normal` is, too. Layers turn their `seed=3` into a generator. Initial values are drawn outside
replicas, once. `keras.random.shuffle` and what pairs examples (`MixUp`) shuffle a rank's own rows.
"""

import collections
import contextlib
import hashlib
import itertools
import secrets
import threading
from collections.abc import Callable, Iterator
from typing import Any

import keras
import tensorflow as tf

from tfdist import temporary
from tfdist.collectives import RankProgram, rank_program
from tfdist.sharding import keras_scope
from tfdist.sharding.separate_thread import in_separate_thread, move

_OpSeeds = tuple[int | None, int | None]

_local = threading.local()


def sharded_region() -> contextlib.AbstractContextManager[None]:
    """Within it, tensor ranks draw different random numbers."""
    return temporary.attributes(_local, is_sharded=True)


class RankSeeds:
    """The source of seeds of one run of `strategy.run`; one object, which all their programs share.

    It is made in the thread that runs the ranks, which enters `lent` in each rank's thread, and calls `take_back` at the end.
    In the threads of ranks it stands for Keras's global generator: `next` and `state` are those of that thread's.
    """

    def __init__(self) -> None:
        self._global = keras_scope.global_generator()
        self._drawn: list[_OpSeeds] = []  # of TensorFlow's random operations, in the order of a rank's program
        self._numbers: dict[int, Iterator[int]] = collections.defaultdict(itertools.count)  # of these, by rank

    @contextlib.contextmanager
    def lent(self) -> Iterator[None]:
        """Within it, Keras's global generator in this thread, a rank's, is that of the thread that runs the ranks."""
        before = keras_scope.global_generator()
        keras_scope.set_global_generator(self)
        try:
            yield
        finally:
            keras_scope.set_global_generator(before)

    def take_back(self) -> None:
        """Keeps the global generator in this thread, if it is a rank that drew from it first."""
        if self._global is not None and keras_scope.global_generator() is None:
            keras_scope.set_global_generator(self._global)

    @property
    def has_drawn(self) -> bool:
        """Whether a rank has made a random operation of TensorFlow, which draws from a state that nobody saves."""
        return bool(self._drawn)

    @property
    def global_generator(self) -> keras.random.SeedGenerator:
        """The global generator of the thread that runs the ranks, made now if there is none."""
        if self._global is None:
            self._global = in_separate_thread(keras.random.SeedGenerator)
        return self._global

    def next(self, ordered: bool = True) -> Any:
        return self.global_generator.next(ordered)

    @property
    def state(self) -> keras.Variable:
        return self.global_generator.state

    def op_seeds(self, program: RankProgram, draw: Callable[[], _OpSeeds]) -> _OpSeeds:
        """Returns the seeds of the next random operation of this rank's program; `draw` returns those of one device."""
        number = next(self._numbers[program.rank])
        while len(self._drawn) <= number:
            self._drawn.append(draw())
        global_seed, seed = self._drawn[number]
        if global_seed is None or seed is None:
            if program.mesh.world_size == program.mesh.data_parallel_size:
                return None, None  # each rank asks the operating system; over workers there is always a global seed
            global_seed, seed = self._drawn[number] = secrets.randbits(31), secrets.randbits(31)
        stream = _stream(), program.mesh.coordinate(program.rank).pipe  # stages of a pipeline make different operations
        if stream == (0, 0):
            return global_seed, seed
        digest = hashlib.blake2b(repr((seed, stream)).encode(), digest_size=4).digest()
        return global_seed, int.from_bytes(digest, "little") & 0x7FFFFFFF


def op_seeds(draw: Callable[[], _OpSeeds]) -> _OpSeeds:
    """Returns the seeds of the random operation of TensorFlow that is made here; `draw` returns those of one device."""
    program = rank_program()
    return draw() if program is None else program.plan.shared(RankSeeds).op_seeds(program, draw)


def settle(generator: keras.random.SeedGenerator) -> None:
    """Gives `generator`, of which a rank is to draw, a state that is the strategy's, where it has another."""
    if rank_program() is not None:
        move([generator.state], tf.distribute.get_strategy())


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
