"""Attention whose heads are computed by different tensor ranks.

    rank i: query, key and value projections of its heads (column), attention of them, its rows of the output projection (row)

One all-reduce forward, of the output, and one backward, of the input's gradient.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import keras
import tensorflow as tf

from tfdist import errors
from tfdist.layers import regions
from tfdist.layers.parallel_einsum_dense import ColumnParallelEinsumDense, RowParallelEinsumDense
from tfdist.layers.randomness import sharded_region
from tfdist.layers.sharded_weights import ShardedWeights, check_divisible, check_is_sharded
from tfdist.layers.shared_heads import SharedHeadsEinsumDense, are_shared, check_heads
from tfdist.sharding import Shard
from tfdist.sharding.sharded_activations import copy_mask


class _ParallelAttention(ShardedWeights):
    """What both attentions share. A subclass names its numbers of heads."""

    sequence_parallel = False

    def get_config(self) -> dict[str, Any]:
        return {**super().get_config(), "sequence_parallel": self.sequence_parallel}

    def _shards(self) -> Mapping[str, Shard]:
        return {}  # the weights are the sublayers'

    def _heads(self) -> dict[str, int]:
        raise NotImplementedError

    def build(self, query_shape: Any, value_shape: Any, key_shape: Any = None) -> None:  # type: ignore[override]  # as Keras's
        self.check_may_be_sharded(query_shape)
        keras_class: Any = next(base for base in type(self).__mro__ if base.__module__.startswith("keras.src.layers.attention"))
        keras_class.build(self, query_shape, value_shape, key_shape)
        self.shard_weights()

    def _check_sizes(self, input_shape: Any, parts: int) -> None:
        for argument, heads in self._heads().items():
            check = check_heads if argument == "num_key_value_heads" else check_divisible
            check(argument, heads, parts, self.name)
        regularizer = getattr(self, "_activity_regularizer", None) or getattr(self, "activity_regularizer", None)
        if parts > 1 and regularizer is not None:
            raise errors.not_implemented(
                f"`activity_regularizer` of layer {self.name!r} would see a part of the heads only.",
                activity_regularizer=regularizer,
                fix="Regularize the weights, or the output of the layer.",
            )

    def shard_weights(self) -> None:
        """Shards the projections by heads; also of a Keras attention that has become a parallel one."""
        self._output_dense.__class__ = RowParallelEinsumDense
        self._output_dense.input_is_parallel = True
        self._output_dense.sequence_parallel = self.sequence_parallel
        self._output_dense.shard_weights()  # (heads, head_dim, out)
        ranks = regions.scope_tensor_size()
        is_shared = are_shared(self._heads().get("num_key_value_heads", ranks), ranks)
        for name in ("_query_dense", "_key_dense", "_value_dense", "_gate_dense"):
            dense = getattr(self, name, None)
            if dense is not None and is_shared and name in ("_key_dense", "_value_dense"):
                dense.__class__ = SharedHeadsEinsumDense
            elif dense is not None:
                dense.__class__ = ColumnParallelEinsumDense
                dense.gather_output = False
                dense.input_has_entered = True
                dense.shard_weights()  # (in, heads, head_dim)

    # Keras looks at the names of the arguments: masks and `training` are passed to who asks for them.
    def call(
        self,
        query: Any,
        value: Any,
        key: Any = None,
        query_mask: Any = None,
        value_mask: Any = None,
        key_mask: Any = None,
        attention_mask: Any = None,
        return_attention_scores: bool = False,
        training: bool | None = None,
        use_causal_mask: bool = False,
    ) -> Any:
        options = {
            "query_mask": query_mask,
            "value_mask": value_mask,
            "key_mask": key_mask,
            "attention_mask": attention_mask,
            "return_attention_scores": return_attention_scores,
            "training": training,
            "use_causal_mask": use_causal_mask,
        }
        if regions.tensor_program() is None:
            return super().call(query, value, key=key, **options)
        check_is_sharded(self, self._query_dense._kernel)
        key = value if key is None else key
        entered = {id(x): x for x in (query, value, key)}  # one that is given twice enters once
        for name, x in entered.items():
            entered[name] = regions.enter_region(x, self.sequence_parallel, self.name)
            copy_mask(x, entered[name])
        if attention_mask is not None:
            options["attention_mask"] = self._own_heads(attention_mask)
        with sharded_region():
            outputs = super().call(entered[id(query)], entered[id(value)], key=entered[id(key)], **options)
        if not return_attention_scores:
            return outputs
        output, scores = outputs  # (batch, heads / t, target, source)
        return output, regions.gather_from(scores, 1, f"{self.name}/scores")

    def _own_heads(self, mask: Any) -> Any:
        """Returns the mask (batch, heads, target, source) of this rank's heads; others, which all heads share, as they are."""
        if mask.shape.rank != 4 or mask.shape[1] == 1:
            return mask
        return regions.own_part(regions.tensor_program(), tf.convert_to_tensor(mask), 1)


@keras.saving.register_keras_serializable("tfdist")
class ParallelMultiHeadAttention(_ParallelAttention, keras.layers.MultiHeadAttention):
    """`keras.layers.MultiHeadAttention` whose heads are spread over the tensor ranks (Megatron's parallel self-attention).

    Each rank stores and computes 1/t of the heads. Forward it all-reduces the output, backward the gradient of its input. Masks,
    causal or of padding, are whole on every rank.

    Outside replicas, and where the strategy has no tensor axis, it is `keras.layers.MultiHeadAttention`.

    Args:
        num_heads: heads; a multiple of the tensor size.
        key_dim: size of each head.
        sequence_parallel: True takes and returns activations that are sharded along the sequence, axis 1: it all-gathers its
            input and reduce-scatters its output instead of the all-reduce. See `ParallelTransformerBlock`.
        **kwargs: as of `keras.layers.MultiHeadAttention`.

    Raises:
        ValueError: when built: the tensor size does not divide `num_heads`.
        NotImplementedError: an `activity_regularizer`.

    Source: Megatron-LM, Shoeybi et al. 2019.
    """

    def __init__(self, num_heads: int, key_dim: int, sequence_parallel: bool = False, **kwargs: Any):
        super().__init__(num_heads, key_dim, **kwargs)
        self.sequence_parallel = sequence_parallel

    def _heads(self) -> dict[str, int]:
        return {"num_heads": self._num_heads}


@keras.saving.register_keras_serializable("tfdist")
class ParallelGroupedQueryAttention(_ParallelAttention, keras.layers.GroupQueryAttention):
    """`keras.layers.GroupQueryAttention` whose heads, those of queries and those of keys and values, are spread over the ranks.

    Args:
        head_dim: size of each head.
        num_query_heads: query heads; a multiple of the tensor size.
        num_key_value_heads: heads of keys and values; a multiple of the tensor size too, or a divisor of it: then several ranks
            share a head, and each keeps the projections of keys and values whole.
        sequence_parallel: as of `ParallelMultiHeadAttention`.
        **kwargs: as of `keras.layers.GroupQueryAttention`.

    Raises:
        ValueError: when built: the tensor size does not divide `num_query_heads`, or neither divides `num_key_value_heads` nor is
            a multiple of it.
        NotImplementedError: an `activity_regularizer`.

    Source: Ainslie et al. 2023; sharded as by Megatron-LM.
    """

    def __init__(
        self,
        head_dim: int,
        num_query_heads: int,
        num_key_value_heads: int,
        sequence_parallel: bool = False,
        **kwargs: Any,
    ):
        super().__init__(head_dim, num_query_heads, num_key_value_heads, **kwargs)
        self.sequence_parallel = sequence_parallel

    def _heads(self) -> dict[str, int]:
        return {"num_query_heads": self.num_query_heads, "num_key_value_heads": self.num_key_value_heads}

    @property
    def num_repeats(self) -> int:
        """How many query heads ask each head of keys and values; inside a replica, of this rank's."""
        program = regions.tensor_program()
        ranks = 1 if program is None else program.mesh.tensor_parallel_size
        return (self.num_query_heads // ranks) // max(1, self.num_key_value_heads // ranks)

    @num_repeats.setter
    def num_repeats(self, value: int) -> None:
        """Takes the number that Keras sets, which follows from those of the heads."""
