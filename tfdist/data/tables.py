"""Lookup tables that functions use: what is in them, as one number, which two workers compare.

A `StringLookup` of a `set` has its words in another order in each process, one that is adapted to a worker's own part has other
words: a token would be another row of the embedding on each worker.
"""

import contextlib
import weakref
from typing import Any

import tensorflow as tf

from tfdist.sharding.fingerprints import as_integers

_ODD = (0x9E3779B97F4A7C15 - 2**64, 0x7F4A7C159E3779B9, 0x1CE4E5B9BF58476D)  # by which numbers are spread
_known: dict[int, tuple[Any, int | None]] = {}  # by the handle's id: a reference to it, and the digest when it was seen first


def digests_of_tables(graph: Any) -> list[int]:
    """Returns a digest of each lookup table in which a traced function looks up something, in the order of its captures.

    It is that of what the table had when it was seen first; a table that has nothing yet, or only a function within it uses, has
    none.
    """
    found = []
    for outside, inside in getattr(graph, "captures", ()):
        lookups = [user for user in inside.consumers() if user.type == "LookupTableFindV2"]
        if lookups and outside.dtype == tf.resource and hasattr(outside, "numpy"):
            if id(outside) not in _known or _known[id(outside)][0]() is not outside:
                digest = _digest(outside, lookups[0].get_attr("Tin"), lookups[0].get_attr("Tout"))
                _known[id(outside)] = weakref.ref(outside), digest
            found.append(_known[id(outside)][1])
    return [digest for digest in found if digest is not None]


def _digest(table: tf.Tensor, keys: tf.DType, values: tf.DType) -> int | None:
    """Returns the digest of the table of this handle, in whatever order it has its pairs. Other dtypes would end the process."""
    with tf.init_scope(), tf.device("CPU"), contextlib.suppress(tf.errors.OpError):
        one, other = map(as_integers, tf.raw_ops.LookupTableExportV2(table_handle=table, Tkeys=keys, Tvalues=values))
        by_key = tf.reshape(other, [tf.size(one), -1]) if tf.size(one) else tf.zeros([0, 1], tf.int64)
        other = tf.reduce_sum(by_key * (2 * tf.range(tf.shape(by_key, tf.int64)[1]) + 1), axis=1)
        return int(tf.reduce_sum((one * _ODD[0] + other) * (other * _ODD[1] + one * _ODD[2] + 1)))
    return None
