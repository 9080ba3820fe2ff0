"""Lookup tables that functions use: what is in them, as one number, which two workers compare.

A `StringLookup` of a `set` has its words in another order in each process, one that is adapted to a worker's own part has other
words: a token would be another row of the embedding on each worker.
"""

from typing import Any

import tensorflow as tf

from tfdist.sharding.fingerprints import as_integers

_ODD = (0x9E3779B97F4A7C15 - 2**64, 0x7F4A7C159E3779B9, 0x1CE4E5B9BF58476D)  # by which numbers are spread


def digests_of_tables(graph: Any) -> list[int]:
    """Returns a digest of each lookup table in which a traced function looks up something, in the order of its captures.

    Not of those that only a function within it uses.
    """
    found = []
    for outside, inside in getattr(graph, "captures", ()):
        lookups = [user for user in inside.consumers() if user.type == "LookupTableFindV2"]
        if lookups and outside.dtype == tf.resource and hasattr(outside, "numpy"):
            found.append(_digest(outside, lookups[0].get_attr("Tin"), lookups[0].get_attr("Tout")))
    return found


def _digest(table: tf.Tensor, keys: tf.DType, values: tf.DType) -> int:
    """Returns the digest of the table of this handle, in whatever order it has its pairs. Other dtypes would end the process."""
    with tf.init_scope(), tf.device("CPU"):
        one, other = map(as_integers, tf.raw_ops.LookupTableExportV2(table_handle=table, Tkeys=keys, Tvalues=values))
        return int(tf.reduce_sum((one * _ODD[0] + other) * (other * _ODD[1] + one * _ODD[2] + 1)))
