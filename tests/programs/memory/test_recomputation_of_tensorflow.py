"""`tf.recompute_grad` in a `train_step`: one device's numbers where weights are whole, refused where they are sharded."""

import keras
import pytest
import tensorflow as tf
from training import strategy_for

from tests.programs.comparing import run
from tests.programs.published_steps import assert_without_a_warning, program_of, sgd

pytestmark = pytest.mark.as_traced


def recomputed(model, x, y):
    """TensorFlow's own recomputation, whose gradient function has a tape of its own."""
    again = tf.recompute_grad(lambda hidden: model.head(hidden))
    with tf.GradientTape() as tape:
        loss = tf.reduce_mean(keras.losses.sparse_categorical_crossentropy(y, again(model.body(x)), from_logits=True))
    weights = [*model.body.trainable_variables, *model.head.trainable_variables]
    model.optimizer.apply(tape.gradient(loss, weights), weights)
    return {"loss": loss}


@pytest.mark.exhaustive
@pytest.mark.parametrize(("name", "zero_stage", "devices"), [("recomputed", 0, 2), ("recomputed", 3, 3)])
def test_it_is_one_device(name, zero_stage, devices):
    program = program_of(recomputed, sgd)
    if zero_stage == 3:
        with pytest.raises(NotImplementedError, match="tfdist.layers.recompute"):
            run(program, strategy_for(devices, zero_stage))
        return
    assert_without_a_warning(program, zero_stage, devices)
