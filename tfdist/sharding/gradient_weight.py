"""The weight of a rank's gradients in their sum over the data axis."""

import contextlib
from collections.abc import Callable, Iterator

import tensorflow as tf

from tfdist import temporary
from tfdist.collectives import Part, RankProgram


class GradientWeight(Part):
    """The weight of one rank's gradients in one trace. A part of its state.

    In a custom training loop a rank's gradient is its summand and counts 1, which is no weight. In a step of Keras's
    trainer it is the gradient of the rank's own mean, and counts the rank's share of the batch's rows:

        gradient that the reduction gets                               it is multiplied by
        whole (stages 0 to 2, or made by the program itself)           the weight
        what a tape hands to a sharded parameter (stage 3)             1, the tape began with the weight; 0 without rows
        of a loss that was weighted itself (`entered_with_the_loss`)   nothing; where it `has_numbers`, 1, or 0 without rows
        made of what a tape returned for rows, which counts the weight 1, it is divided by the weight first (`of_own_mean`)

    A gradient of a rank without rows may be NaN, the mean of nothing. It counts nothing.
    """

    def __init__(self, program: RankProgram):
        del program
        self._weight: Callable[[], tf.Tensor] | None = None
        self.is_in_loss = False
        self._has_entered = False
        self._num_going_back = 0  # tapes, one within the other
        self.began_with: tf.Tensor | None = None  # with what weight at the losses the gradient began that is being taken
        self.has_numbers = False  # whether layers or loss functions make one number, NaN times a weight without rows
        self.has_of_rows = False  # whether a tape has returned gradients of rows of the batch, which count the weight already

    def use(self, weight: Callable[[], tf.Tensor]) -> None:
        """Lets gradients count what `weight` returns, a scalar; it may send a message, and is called where all ranks run."""
        self._weight = weight

    @property
    def is_of_trainer(self) -> bool:
        """Whether gradients are taken in a step of Keras's trainer, and count a weight, wherever it is entered."""
        return self._weight is not None

    def entered_with_the_loss(self, has_entered: bool = True) -> contextlib.AbstractContextManager[None]:
        """A block in which gradients are those of losses that were weighted before they were differentiated; or are not."""
        return temporary.attributes(self, is_in_loss=has_entered)

    def note_entered(self) -> None:
        """Notes that the weight has entered in a loss: the next gradient is that of this loss."""
        self._has_entered = True

    @contextlib.contextmanager
    def of_gradient(self) -> Iterator[None]:
        """A block in which a gradient is taken and noted: in one that a loss, or a metric, is made of no weight has entered."""
        has_entered, self._has_entered = self._has_entered, False
        is_in_loss = self.is_in_loss and has_entered
        with temporary.attributes(self, is_in_loss=is_in_loss, _num_going_back=self._num_going_back + 1):
            yield

    @property
    def is_nested(self) -> bool:
        """Whether the gradient is taken on the way back of another tape, by the function of a `tf.custom_gradient`.

        TensorFlow's `tf.recompute_grad` does so. It is a part of what the outer tape returns: nothing is weighted or summed here.
        """
        return self._num_going_back > 1

    def of_wholes(self) -> tf.Tensor | None:
        """Returns what whole gradients are multiplied by, a scalar; None: nothing."""
        if self._weight is None or self.is_in_loss and not self.has_numbers:
            return None
        weight = self._weight()
        return tf.cast(weight > 0, weight.dtype) if self.is_in_loss else weight

    def of_tape(self) -> tf.Tensor | None:
        """Returns what gradients of sharded parameters are multiplied by, a scalar; None: nothing."""
        weight = self.of_wholes()
        return None if weight is None else tf.cast(weight > 0, weight.dtype)


def weighted(grad: tf.Tensor, weight: tf.Tensor | None) -> tf.Tensor:
    """Returns `grad` times `weight`, zeros where that is 0, whatever `grad` is; `grad` itself without a weight."""
    return grad if weight is None else tf.math.multiply_no_nan(grad, tf.cast(weight, grad.dtype))


def without_weight(grad: tf.Tensor, weight: tf.Tensor | None) -> tf.Tensor:
    """Returns `grad` over `weight`, with which its tape began; `grad` itself without a weight."""
    return grad if weight is None else tf.math.divide_no_nan(grad, tf.cast(weight, grad.dtype))
