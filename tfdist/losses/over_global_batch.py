"""A loss of the rows of all ranks, which are gathered first, for what is no mean over rows."""

from typing import Any

import keras
import tensorflow as tf
from keras.src.losses.losses import LossFunctionWrapper

from tfdist import errors
from tfdist.collectives import RankProgram, can_be_gathered, gather_rows, rank_program
from tfdist.losses.global_losses import of_all_rows, whole_batch
from tfdist.losses.undivided_batch import is_given_everywhere
from tfdist.sharding import keras_scope
from tfdist.sharding.sharded_activations import may_hold_parts, shard_of

_BORNE = ("_keras_mask", "_keras_logits")  # what Keras has put on a tensor of rows: rows, too


@keras.saving.register_keras_serializable("tfdist")
class OverGlobalBatch(keras.losses.Loss):
    """Computes a loss of the whole global batch, where a device would compute it of its own rows.

    For losses that are no mean over rows: ratios of sums (Dice, masked means), roots of means, and rows that are compared with
    each other (contrastive losses with the rest of the batch as negatives: SimCLR, CLIP, Circle).

    In `fit`, `evaluate`, a custom `train_step` and a loop around `strategy.run` targets, predictions and sample weights of
    all devices are gathered, every device computes the loss, and the gradient of its predictions finds its way back to each.
    Loss and weights are those of one device, with uneven batches, masks and weights. Outside replicas it is the loss itself.

    It costs one all-gather for each tensor, and for each that needs a gradient a reduce-scatter, of the batch's predictions; and
    the loss of the whole batch on every device. A mean over rows needs none of it.

    >>> model.compile("adam", loss=tfdist.losses.OverGlobalBatch(keras.losses.Dice()))

    In a step or a loop both arguments may be what a model makes of rows:

    >>> contrast = tfdist.losses.OverGlobalBatch(info_nce)
    >>> loss = contrast(image_vectors, text_vectors)

    Args:
        loss: a Keras loss, its name, or a function of (y_true, y_pred), which returns one number, or one for each row, of which
            the mean is taken. Called in a step, without weights or a mask, a function is given integers and structures as
            the step gives them; else it gets floats of one rank, as Keras's losses do.
        name: of the loss; that of `loss` if it is not given.

    Call arguments:
        y_true: tensors whose axis 0 is the batch, in any structure that `loss` takes; numbers are passed on.
        y_pred: as `y_true`.
        sample_weight: None, or the weights of the rows.

    Raises:
        ValueError: `loss` is none, or its reduction is None, which leaves nothing to differentiate.
        NotImplementedError: called on ragged or sparse tensors or strings, or on what a layer with `gather_output=False` leaves
            sharded.
    """

    def __init__(self, loss: Any, name: str | None = None):
        found = keras.losses.get(loss) if isinstance(loss, str) else loss
        if not isinstance(found, keras.losses.Loss):
            if not callable(found) or isinstance(found, type):
                raise errors.value_error("`loss` must be a Keras loss, its name, or a function of (y_true, y_pred).", loss=loss)
            # A lambda's name is none that TensorFlow takes.
            found = LossFunctionWrapper(found, name=getattr(found, "__name__", "").strip("<>") or None)
        if found.reduction in (None, "none"):
            raise errors.value_error(
                "`loss` must return one number.", reduction=found.reduction, fix='Use `reduction="sum_over_batch_size"`.'
            )
        super().__init__(name=name or found.name, reduction=found.reduction, dtype=found.dtype)
        self.loss = found
        self._given = loss

    def __call__(self, y_true: Any, y_pred: Any, sample_weight: Any = None) -> Any:
        program = rank_program(peers_on="data")
        if program is None:
            return self._of_all(y_true, y_pred, sample_weight)
        arguments = y_true, y_pred, sample_weight
        if not is_given_everywhere():
            arguments = tf.nest.map_structure(lambda x: _all_rows(program, x), arguments)
        with whole_batch():
            loss = self._of_all(*arguments)
        return of_all_rows(loss)

    def _of_all(self, y_true: Any, y_pred: Any, sample_weight: Any) -> Any:
        """Returns the loss; a function that a step calls gets what the step gives: Keras would turn integers into floats."""
        is_plain = self.loss is not self._given and callable(self._given) and not keras_scope.is_in_compiled_loss()
        leaves = [x for x in tf.nest.flatten((y_true, y_pred)) if tf.is_tensor(x)]
        is_plain &= len(leaves) != 2 or any(x.dtype.is_integer for x in leaves)
        if is_plain and sample_weight is None and getattr(y_pred, "_keras_mask", None) is None:
            return keras.ops.mean(self._given(y_true, y_pred))
        return self.loss(y_true, y_pred, sample_weight)

    def call(self, y_true: Any, y_pred: Any) -> Any:
        return self.loss.call(y_true, y_pred)

    def get_config(self) -> dict[str, Any]:
        return {"loss": keras.saving.serialize_keras_object(self._given), "name": self.name}

    @classmethod
    def from_config(cls, config: dict[str, Any]) -> "OverGlobalBatch":
        return cls(**{**config, "loss": keras.saving.deserialize_keras_object(config["loss"])})


def _all_rows(program: RankProgram, x: Any) -> Any:
    """Returns `x`, any argument of a loss, with the rows of all data ranks, and so what Keras has put on it."""
    if isinstance(x, tf.RaggedTensor | tf.SparseTensor) or tf.is_tensor(x) and not can_be_gathered(x):
        raise errors.not_implemented(
            f"`OverGlobalBatch` cannot gather a {type(x).__name__} of {x.dtype.name} from the devices.",
            shape=x.shape,
            fix="Turn it into a dense tensor of numbers.",
        )
    if shard_of(x) is not None and may_hold_parts(program):
        raise errors.not_implemented(
            "`OverGlobalBatch` takes whole predictions, and not those of a layer with `gather_output=False`.",
            shape=x.shape,
            fix="Make the layer with `gather_output=True`.",
        )
    if not hasattr(x, "shape") or (tensor := tf.convert_to_tensor(x)).shape.rank == 0:
        return x  # None, or a number
    whole = gather_rows(tensor, "loss/rows_of_all")
    for name in _BORNE:
        if (borne := getattr(x, name, None)) is not None:
            setattr(whole, name, gather_rows(borne, "loss/rows_of_all"))
    return whole
