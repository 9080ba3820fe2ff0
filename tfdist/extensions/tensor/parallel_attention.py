"""Attention whose heads are computed by different tensor ranks: Keras's, and, by a change of their class, KerasHub's.

    rank i of t: H / t query heads; K / t heads of keys and values, or, where t is a multiple of K, the one that its queries ask
                 whole projections: queries, keys, values by column, the output by row

A call reads the numbers of heads of the layer in Python: within a replica those attributes give the rank's own numbers.
"""

import functools
import inspect
from collections.abc import Callable
from typing import Any

import keras
import tensorflow as tf

from tfdist import errors
from tfdist.extensions.tensor import regions, sharded_tensors
from tfdist.extensions.tensor.einsum_axes import COLUMN, sharded_axes
from tfdist.extensions.tensor.headed_layers import GROUPED_QUERY, MULTI_HEAD, HeadedLayer, are_shared
from tfdist.extensions.tensor.parallel_dense import ColumnParallelDense, RowParallel, RowParallelDense
from tfdist.extensions.tensor.parallel_einsum_dense import ColumnParallelEinsumDense, RowParallelEinsumDense
from tfdist.extensions.tensor.sharded_weights import ShardedWeights, check_divisible, check_is_sharded, shard_variables
from tfdist.keras_layers.randomness import sharded_region
from tfdist.sharding import Shard
from tfdist.sharding.sharded_activations import ActivationShard, copy_mask, mark_shard, shard_of


class SharedHeadsEinsumDense(keras.layers.EinsumDense):
    """A projection to fewer heads of keys and values than there are tensor ranks, which several of them share.

    K heads on t = 4 ranks     K = 2: ranks 0 and 1 use head 0, ranks 2 and 3 use head 1        K = 1: all use the one head

    Every rank keeps the projection whole, and computes the one head that its queries ask. Its gradient is then a summand, and
    the summands are added up over the ranks.

    Source: Shazeer 2019, *Fast Transformer Decoding: One Write-Head is All You Need*; sharded as by Megatron-LM.
    """

    def call(self, inputs: Any, training: bool | None = None) -> Any:
        if regions.tensor_program() is None:
            return super().call(inputs, training=training)
        axes = sharded_axes(self, COLUMN)
        x = keras.ops.einsum(self.equation, inputs, self._of_own_head(self.kernel, axes.kernel, "kernel"))
        if self.bias is not None:
            x = keras.ops.add(x, self.bias if axes.bias is None else self._of_own_head(self.bias, axes.bias, "bias"))
        return x if self.activation is None else self.activation(x)

    def _of_own_head(self, weight: Any, axis: int, name: str) -> tf.Tensor:
        weight = regions.copy_to(tf.convert_to_tensor(weight), f"{self.name}/{name}")
        ranks = regions.tensor_program().mesh.tensor_parallel_size
        own = regions.tensor_rank() * weight.shape[axis] // ranks
        return weight[tuple([slice(None)] * axis + [slice(own, own + 1)])]


class _ParallelAttention(ShardedWeights):
    """An attention of which each tensor rank computes some heads; mixed in before its class."""

    _made: HeadedLayer
    sequence_parallel = False
    # The bias of the scores, if it returns one; False: it stays sharded, for attentions that are sharded too.
    gather_output = True

    @classmethod
    def _shards(cls, layer: Any) -> dict[str, Shard]:
        return {name: Shard(axis) for name, axis in cls._made.per_head.items()}

    @classmethod
    def shards_of(cls, layer: Any, ranks: int) -> list[tuple[keras.Variable, Shard]]:
        sublayers = [pair for pair in cls._projections(layer, ranks) if issubclass(pair[1], ShardedWeights)]
        return super().shards_of(layer, ranks) + [pair for dense, become in sublayers for pair in become.shards_of(dense, ranks)]

    @classmethod
    def _projections(cls, layer: Any, ranks: int) -> list[tuple[keras.Layer, Any]]:
        """Returns the projections of a layer, each with the class that it is changed into."""
        made = cls._made
        found: list[tuple[keras.Layer, Any]] = []
        is_shared = are_shared(made.heads_of(layer)[1], ranks)
        for name in (*made.queries, *made.keys_values, made.outputs):
            dense = getattr(layer, name, None)
            is_dense = isinstance(dense, keras.layers.Dense)
            if dense is None:
                continue
            if name == made.outputs:
                found.append((dense, RowParallelDense if is_dense else RowParallelEinsumDense))
            elif is_shared and name in made.keys_values:
                found.append((dense, SharedHeadsEinsumDense))
            else:
                found.append((dense, ColumnParallelDense if is_dense else ColumnParallelEinsumDense))
        return found

    def shard_weights(self) -> None:
        """Shards the projections, of a layer that is built, by heads."""
        ranks = regions.scope_tensor_size()
        shard_variables(super().shards_of(self, ranks))
        for dense, become in self._projections(self, ranks):
            dense.__class__ = become
            if become is SharedHeadsEinsumDense:
                continue
            if issubclass(become, RowParallel):
                dense.input_is_parallel, dense.sequence_parallel = True, self.sequence_parallel
            else:
                dense.gather_output, dense.input_has_entered = False, True
            dense.shard_weights()
        for name in self._made.norms:
            norm = getattr(self, name, None)
            if norm is not None:
                norm.__class__ = entered_norm(norm.__class__)

    def call(self, *args: Any, **kwargs: Any) -> Any:
        """Computes this rank's heads, and adds the ranks' outputs; outside replicas it is the layer that it is mixed into."""
        program = regions.tensor_program()
        if program is None:
            return super().call(*args, **kwargs)
        made = self._made
        check_is_sharded(self, getattr(self, made.queries[0])._kernel)
        given = inspect.signature(super().call).bind(*args, **kwargs).arguments
        if given.get("cache") is not None:
            raise errors.not_implemented(
                f"A cache of keys and values in layer {self.name!r}, whose heads are spread over the tensor ranks.",
                fix="Generate outside `strategy.run`, as `generate` does: there the layer is whole.",
            )
        inputs = {id(given[name]): given[name] for name in made.inputs if given.get(name) is not None}  # each once
        for x in inputs.values():
            entered = regions.enter_region(x, self.sequence_parallel, self.name)
            copy_mask(x, entered)
            given.update((name, entered) for name in made.inputs if given.get(name) is x)
        for name in ("attention_mask", made.bias):
            x = given.get(name)
            if x is None or len(x.shape) != 4 or x.shape[1] == 1:
                continue  # all heads share it
            if name == "attention_mask":
                given[name] = regions.own_part(program, tf.convert_to_tensor(x), 1)
            elif shard_of(x) is None:  # that an earlier layer gathered, and did not leave as it is here
                given[name] = regions.scatter_to(x, 1, f"{self.name}/{name}")
        with sharded_region():
            outputs = super().call(**given)
        if given.get("return_attention_scores"):
            output, scores, *rest = outputs  # (batch, heads / t, target, source)
            return (output, regions.gather_from(scores, 1, f"{self.name}/scores"), *rest)
        if made.bias is None:
            return outputs
        output, bias, *rest = outputs
        bias = mark_shard(tf.identity(bias), ActivationShard(1))
        return (output, sharded_tensors.whole(bias) if self.gather_output else bias, *rest)


@functools.cache
def entered_norm(norm_class: Any) -> Any:
    """Returns the class of a normalization of a rank's own heads or positions: its gradient of the whole `scale` is a summand."""

    def scale(self: Any) -> Any:
        weight = vars(self).get("scale")
        if regions.tensor_program() is None:
            return weight
        return regions.copy_to(tf.convert_to_tensor(weight), f"{self.name}/weights")

    body = {"scale": _stored("scale", scale), "__module__": norm_class.__module__}
    return type(norm_class.__name__, (norm_class,), body)


def _stored(name: str, read: Callable[[Any], Any], doc: str | None = None) -> property:
    """Returns a property that is set as an attribute of the object, which `read` returns in its way."""
    return property(read, lambda self, value: vars(self).update({name: value}), doc=doc)


def _of_this_rank(name: str, made: HeadedLayer, doc: str | None = None) -> property:
    """Returns the property that an attribute becomes: inside a replica the number of the rank's own heads."""

    def number(self: Any) -> Any:
        program = regions.tensor_program()
        if program is None:
            return vars(self).get(name)  # which Keras asks before it sets it
        ranks = program.mesh.tensor_parallel_size
        queries, keys_values = made.heads_of(self)
        if name == made.key_value_heads:
            return max(1, keys_values // ranks)
        if name == made.groups:
            return (queries // ranks) // max(1, keys_values // ranks)
        return vars(self)[name] // ranks

    return _stored(name, number, doc)


class _ParallelKerasAttention(_ParallelAttention):
    """Keras's attentions, which can also be made as parallel ones."""

    def get_config(self) -> dict[str, Any]:
        return {**super().get_config(), "sequence_parallel": self.sequence_parallel}

    def build(self, query_shape: Any, value_shape: Any, key_shape: Any = None) -> None:  # as Keras's
        super().build(query_shape, value_shape, key_shape)

    def _check_sizes(self, input_shape: Any, parts: int) -> None:
        for name, size in self._made.sizes_of(self, parts).items():
            check_divisible(name, size, parts, self.name)
        regularizer = self._made.activity_regularizer_of(self)
        if parts > 1 and regularizer is not None:
            raise errors.not_implemented(
                f"`activity_regularizer` of layer {self.name!r} would see a part of the heads only.",
                activity_regularizer=regularizer,
                fix="Regularize the weights, or the output of the layer.",
            )


def _call_of(keras_class: Any) -> Callable[..., Any]:
    """Returns `call` with the arguments of `keras_class`: Keras looks at their names for who is to get masks and `training`."""

    @functools.wraps(keras_class.call)
    def call(self: Any, *args: Any, **kwargs: Any) -> Any:
        return _ParallelAttention.call(self, *args, **kwargs)

    return call


@keras.saving.register_keras_serializable("tfdist")
class ParallelMultiHeadAttention(_ParallelKerasAttention, keras.layers.MultiHeadAttention):
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

    _made = MULTI_HEAD
    call = _call_of(keras.layers.MultiHeadAttention)

    def __init__(self, num_heads: int, key_dim: int, sequence_parallel: bool = False, **kwargs: Any):
        super().__init__(num_heads, key_dim, **kwargs)
        self.sequence_parallel = sequence_parallel


@keras.saving.register_keras_serializable("tfdist")
class ParallelGroupedQueryAttention(_ParallelKerasAttention, keras.layers.GroupQueryAttention):
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

    _made = GROUPED_QUERY
    call = _call_of(keras.layers.GroupQueryAttention)
    num_repeats = _of_this_rank(
        "num_repeats", GROUPED_QUERY, "How many query heads ask each head of keys and values; inside a replica, of this rank's."
    )

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


@functools.cache
def parallel_class(made: HeadedLayer) -> type:
    """Returns the mixin that spreads the heads of a KerasHub attention over the tensor ranks."""
    # A MultiHeadAttention does not look at its number of heads when it computes.
    counts = [
        name for name in (made.query_heads, made.key_value_heads, made.groups, *made.sizes) if name and name != "_num_heads"
    ]
    body = {"_made": made, "__module__": __name__, **{name: _of_this_rank(name, made) for name in counts}}
    return type(f"Parallel{made.class_name}", (_ParallelAttention,), body)
