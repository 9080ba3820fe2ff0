"""Sums over a group whose summands travel compressed: encoded, exchanged, decoded, and added in float32 in the group's order.

    rank i    rows x_i (N, L)   -- encode -->   words (N, W)   -- all-to-all -->   what all have sent here (N, W)
                                                   shard   <--  sum in group order  --   decoded (N, L)

What a rank sends itself goes through the same, so that a sum does not depend on who takes it. Several tensors travel in one
message, each encoded on its own: how they are grouped in messages changes no bit. A group of one rank compresses nothing.
"""

from collections.abc import Sequence
from typing import Any, NamedTuple

import tensorflow as tf

from tfdist import errors
from tfdist.collectives import group_ops
from tfdist.collectives.communicator import Communicator
from tfdist.collectives.plan import Ranks
from tfdist.collectives.program import RankProgram
from tfdist.collectives.transports.kernel_settings import from_bytes
from tfdist.sharding.compression import Compressor


class Sums(NamedTuple):
    """A rank's share in the sums of several parts.

    Attributes:
        sums: of each part.
        words: all parts, encoded, as this rank has sent them; None: nothing is sent.
        losses: what the messages lack of each part, if its compressor has `feedback`; else None.
    """

    sums: list[tf.Tensor]
    words: tf.Tensor | None
    losses: list[tf.Tensor | None]


def reduce_scatter(
    program: RankProgram, parts: Sequence[tf.Tensor], compressors: Sequence[Compressor], ranks: Ranks, label: str
) -> Sums:
    """Sums several (N, L) over `ranks` in one message; returns of each this rank's (L,)."""
    if group_ops.is_trivial(tf.TensorSpec([sum(part.shape[1] for part in parts)]), ranks):
        return Sums([part[0] for part in parts], None, [None] * len(parts))
    words = [_encoded(part, compressor) for part, compressor in zip(parts, compressors, strict=True)]
    packed = words[0] if len(words) == 1 else tf.concat([_wire(program, one) for one in words], program.constant(1))
    received = group_ops.all_to_all(program, _wire(program, packed), ranks, label)
    sizes = [one.shape[1] for one in words]
    split = [received] if len(sizes) == 1 else tf.split(received, program.constant(sizes), program.constant(1), num=len(sizes))
    sums, losses = [], []
    for part, own, all_sent, compressor in zip(parts, words, split, compressors, strict=True):
        losses.append(None if compressor.feedback is None else part - compressor.decode(own, part.shape[1]))
        sums.append(compressor.summed(from_bytes(all_sent, tf.int32), part.shape[1]))
    return Sums(sums, packed, losses)


def all_gather(
    program: RankProgram, parts: Sequence[tf.Tensor], compressors: Sequence[Compressor], ranks: Ranks, label: str
) -> list[tf.Tensor]:
    """All-gathers vectors (L,) of float32 in one message; returns of each the (N, L) of all `ranks`, this one's decoded too."""
    if group_ops.is_trivial(tf.TensorSpec([sum(part.shape[0] for part in parts)]), ranks):
        return [tf.stack([part] * len(ranks)) for part in parts]
    encoded = [_encoded(part[tf.newaxis], compressor) for part, compressor in zip(parts, compressors, strict=True)]
    words = [tf.reshape(_wire(program, one), [-1]) for one in encoded]
    gathered = group_ops.all_gather_parts(program, words, ranks, label)
    rows = [tf.reshape(one, [len(ranks), own.shape[0]]) for one, own in zip(gathered, words, strict=True)]
    return [
        compressor.decode(from_bytes(one, tf.int32), part.shape[0])
        for one, part, compressor in zip(rows, parts, compressors, strict=True)
    ]


def all_reduce(
    program: RankProgram, parts: Sequence[tf.Tensor], compressors: Sequence[Compressor], ranks: Ranks, label: str
) -> Sums:
    """Sums vectors (L,) of float32 over `ranks` in two messages: each member sums its part of all, and all gather the sums.

    The words are those of the first message; the losses those of both: of the second one in the part that this rank has summed.
    """
    size = len(ranks)
    padded = [tf.pad(part, [[0, -part.shape[0] % size]]) for part in parts]
    rows = [tf.reshape(part, [size, part.shape[0] // size]) for part in padded]
    sums, words, lost_first = reduce_scatter(program, rows, compressors, ranks, f"{label}/scatter")
    gathered = all_gather(program, sums, compressors, ranks, f"{label}/gather")
    own, losses = ranks.index(program.rank), []
    for lost, total, whole, part in zip(lost_first, sums, gathered, parts, strict=True):
        if lost is not None:
            lost = tf.concat([lost[:own], [lost[own] + total - whole[own]], lost[own + 1 :]], 0)
            lost = tf.reshape(lost, [-1])[: part.shape[0]]
        losses.append(lost)
    return Sums([tf.reshape(whole, [-1])[: part.shape[0]] for whole, part in zip(gathered, parts, strict=True)], words, losses)


def check_it_pays(communicator: Communicator, compressor: Compressor, setting: dict[str, Any]) -> None:
    """Raises NotImplementedError where a group has no all-to-all, and gathering words would send more than exact sums do.

    The groups are those whose sums are compressed. `setting` is what the user has given, by the argument's name. Of n numbers
    each of N ranks then sends (N-1) b(n) bytes, where exact ones are 4 n (N-1)/N.
    """
    numbers = 2**20
    mesh = communicator.mesh
    for ranks in mesh.groups("replicate" if mesh.is_hybrid else "data"):
        size = len(ranks)
        if size == 1 or communicator.transport_of(ranks).exchanges(communicator, ranks):
            continue
        if size * compressor.bytes_of(numbers) >= 4 * numbers:
            raise errors.not_implemented(
                f"`{next(iter(setting))}` saves nothing here: TensorFlow has no all-to-all for this group of {size} "
                f"ranks, and gathering what is compressed takes {size * compressor.bytes_of(numbers) / (4 * numbers):.1f} times "
                "the bytes of exact gradients.",
                fix="Leave it out, or take a `gradient_compression` of fewer bytes: here int8 pays for up to 3 ranks, int4 for "
                "up to 7.",
                **setting,
            )


def _encoded(x: tf.Tensor, compressor: Compressor) -> tf.Tensor:
    """Returns the words of the rows of `x`, checked: a compressor may be the user's."""
    words = compressor.encode(tf.cast(x, tf.float32))
    expected = (x.shape[0], compressor.bytes_of(x.shape[1]) / 4)
    if words.dtype != tf.int32 or tuple(words.shape) != expected:
        raise errors.value_error(
            f"`{type(compressor).__name__}.encode` must return int32 of shape (rows, bytes_of(n) / 4), here {expected}.",
            dtype=words.dtype.name,
            shape=tuple(words.shape),
        )
    return words


def _wire(program: RankProgram, words: tf.Tensor) -> tf.Tensor:
    """Returns words as they are cut, joined and sent: on a GPU as float32, because TensorFlow keeps int32 on the host there."""
    return words if program.is_on_cpu else from_bytes(words, tf.float32)
