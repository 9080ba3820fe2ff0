"""Accumulation by hand: variables to which a loop adds gradients, and an optimizer that is applied every few steps."""

import keras
import pytest
import tensorflow as tf
from training import BATCH, loss_function, small, strategy_for, vectors

from tests.programs.comparing import STAGES, assert_as_on_one_device


def in_a_loop(strategy):
    with strategy.scope():
        model, optimizer = small(), keras.optimizers.Adam(0.01, global_clipnorm=0.05)
        optimizer.build(model.trainable_variables)
        sums = [tf.Variable(tf.zeros(weight.shape), trainable=False) for weight in model.trainable_variables]
    loss_of = keras.losses.SparseCategoricalCrossentropy(from_logits=True, reduction="sum")

    @tf.function
    def step(x, y):
        def on_rank(x, y):
            with tf.GradientTape() as tape:
                loss = loss_of(y, model(x)) / BATCH
            for total, grad in zip(sums, tape.gradient(loss, model.trainable_variables), strict=True):
                total.assign_add(grad)
            return loss

        return strategy.reduce("SUM", strategy.run(on_rank, args=(x, y)), axis=None)

    @tf.function
    def apply():
        def on_rank():
            optimizer.apply([total / 2 for total in sums], model.trainable_variables)
            for total in sums:
                total.assign(tf.zeros_like(total))

        strategy.run(on_rank)

    losses = []
    batches = tf.data.Dataset.from_tensor_slices(vectors(4 * BATCH)).batch(BATCH)
    for number, batch in enumerate(strategy.experimental_distribute_dataset(batches)):
        losses.append(float(step(*batch)))
        if number % 2:
            apply()
    return losses, model.get_weights(), [variable.numpy() for variable in optimizer.variables]


@pytest.mark.parametrize("zero_stage", STAGES)
def test_in_a_loop(zero_stage):
    assert_as_on_one_device(in_a_loop, zero_stage)


class AppliesInABranch(keras.Sequential):
    def train_step(self, data):
        x, y = data
        with tf.GradientTape() as tape:
            loss = self.compute_loss(x, y, self(x, training=True))
        grads = tape.gradient(loss, self.trainable_variables)

        def apply():
            self.optimizer.apply(grads, self.trainable_variables)

        tf.cond(tf.equal(self.optimizer.iterations % 2, 0), apply, lambda: None)
        return {"loss": loss}


def test_in_a_branch_of_a_step_it_is_refused_with_the_way():
    with strategy_for(2, 1).scope():
        model = AppliesInABranch(small().layers)
        model.compile("sgd", loss_function())
    x, y = vectors(BATCH)
    with pytest.raises(RuntimeError, match="inside a loop, a branch.*gradient_accumulation_steps"):
        model.fit(x, y, batch_size=BATCH, verbose=0)
