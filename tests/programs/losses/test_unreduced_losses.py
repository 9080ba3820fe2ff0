"""A loss without a reduction, which divides each row's value by a number of that row."""

import keras
import pytest
import tensorflow as tf
from grids import exhaustive
from keras import layers

from tests.programs.comparing import assert_as_on_one_device
from tests.programs.small_training import fitted, normal, sgd

pytestmark = pytest.mark.as_traced


class Detection(keras.losses.Loss):
    """RetinaNet's: of each image, divided by its number of positive anchors."""

    def __init__(self):
        super().__init__(reduction="none", name="detection")

    def call(self, y, found):
        positive = tf.cast(y[..., 0] > 0.5, tf.float32)
        of_class = tf.nn.sigmoid_cross_entropy_with_logits(positive, found[..., 0])
        of_box = positive * tf.reduce_sum(tf.abs(y[..., 1:] - found[..., 1:]), -1)
        return tf.reduce_sum(of_class + of_box, -1) / tf.maximum(tf.reduce_sum(positive, -1), 1.0)


def detection(strategy):
    with strategy.scope():
        anchors = [layers.Conv2D(4, 3, 4, "same", activation="relu"), layers.Conv2D(5, 1), layers.Reshape((9, 5))]
        model = keras.Sequential([keras.Input((12, 12, 1)), *anchors])
        model.compile(sgd(), Detection())
    return fitted(model, normal(12, 12, 1), normal(9, 5, seed=2))


@pytest.mark.parametrize(("program", "zero_stage"), [exhaustive(detection, 0), exhaustive(detection, 3)])
def test_it_is_one_device(program, zero_stage):
    assert_as_on_one_device(program, zero_stage)
