"""Instance keys: the numbers under which the members of a group find each other's call of a collective."""

import hashlib
import threading
from typing import Any

import numpy as np
import tensorflow as tf

from tfdist.collectives.plan import CollectiveRecord

# A collective whose length is known at run time only uses one key per power of two: instance_key + log2(length).
KEYS_PER_COLLECTIVE = 32
_POWERS = np.array([1 << k for k in range(KEYS_PER_COLLECTIVE - 1)], np.int32)

# Key 0 is for the question about the order of a group (`transports.member_order`). The upper half is for unknown lengths.
_FIRST_BLOCK = 1 << 30
_BLOCKS = (1 << 30) // KEYS_PER_COLLECTIVE


class InstanceKeys:
    """The instance keys of one communicator, by what a collective is.

    TensorFlow binds a key to one operation, shape and dtype for the life of the process. Collectives of a rank run one after the
    other (on its token), and one is over only when its peers have taken what it sent, so that all collectives of one kind can
    share a key. Where each has a turn of its own (`Transport.has_own_turns`), several may be under way: there the key also says
    the how manieth of its kind in the step it is. Pieces of a message that are under way at once have the numbers of their lanes.

    The key follows from the kind alone: a number drawn while tracing would differ between workers as soon as one of them traces
    a step once more (a last batch of another size, say).
    """

    def __init__(self) -> None:
        self._keys: dict[tuple[Any, ...], int] = {}
        self._taken: set[int] = set()
        self._lock = threading.Lock()  # several threads may trace: one kind must not get two keys

    def key(self, record: CollectiveRecord, number: int = 0) -> int:
        """Returns the key of `record`; the first of `KEYS_PER_COLLECTIVE` where its length is known at run time only.

        `number` tells those of one kind apart that may be under way at once.
        """
        kind = (*record.kind, number) if number else record.kind
        with self._lock:
            if kind not in self._keys:
                self._keys[kind] = self._free_key(kind, None in record.shape)
            return self._keys[kind]

    def _free_key(self, kind: tuple[Any, ...], is_dynamic: bool) -> int:
        number = int.from_bytes(hashlib.sha256(repr(kind).encode()).digest()[:8], "big")
        while True:
            key = _FIRST_BLOCK + number % _BLOCKS * KEYS_PER_COLLECTIVE if is_dynamic else 1 + number % (_FIRST_BLOCK - 1)
            if key not in self._taken:
                self._taken.add(key)
                return key
            number += 1  # two kinds met, about once in 2**30 pairs; workers that differ in this are told by `PlanAgreement`


def power_of_two(length: tf.Tensor) -> tf.Tensor:
    """Returns the least power of two that is at least `length`, a positive int32 scalar."""
    return 1 + tf.reduce_sum(_POWERS * _is_below(length))  # 1 + 1 + 2 + 4 + ...


def log2_ceiling(length: tf.Tensor) -> tf.Tensor:
    """Returns the least k, as int32, with 2**k >= `length`, a positive int32 scalar."""
    return tf.reduce_sum(_is_below(length))


def _is_below(length: tf.Tensor) -> tf.Tensor:
    """Returns 1 for each of `_POWERS` that is less than `length`, else 0.

    By arithmetic, which GPUs do on the host for int32: keys and shapes are wanted there. Of a comparison and a cast the host
    would have to wait for the GPU.
    """
    return tf.minimum(tf.maximum(length - _POWERS, 0), 1)
