"""Clipping of gradients in a `train_step` or a custom training loop: by the norm of the global batch's gradient."""

import keras
import pytest
import tensorflow as tf
from grids import exhaustive
from training import CLASSES, vectors

import tfdist
from tests.parity.comparison import state
from tests.programs.comparing import assert_as_on_one_device
from tests.programs.loops.test_custom_steps import Model, crossentropy, fit, grid

pytestmark = [pytest.mark.as_traced, pytest.mark.timeout(180), pytest.mark.usefixtures("float64")]

LIMIT = 0.3


class Clipping(Model):
    """One of its layers has no gradient."""

    def __init__(self):
        super().__init__()
        self.unused = keras.layers.Dense(2)
        self.unused.build((None, CLASSES))

    def train_step(self, data):
        x, y = data[:2]
        with tf.GradientTape() as tape:
            loss = self.optimizer.scale_loss(crossentropy()(y, self(x)))
        variables = self.trainable_variables
        gradients, norm = tfdist.clip_by_global_norm(tape.gradient(loss, variables), variables, LIMIT)
        self.optimizer.apply(gradients, variables)
        return {"loss": loss, "norm": norm}


@grid((2, 2))
@pytest.mark.filterwarnings("ignore:Gradients do not exist")
def test_in_fit(devices, zero_stage):
    def program(strategy):
        left = fit(strategy, Clipping, evaluates=False)
        assert min(logs["norm"] for logs in left["train"]) > LIMIT
        return left

    assert_as_on_one_device(program, zero_stage, devices)


@pytest.mark.parametrize("zero_stage", [exhaustive(0), exhaustive(2), 3])
def test_in_a_loop(zero_stage):
    """Outside `fit` a rank's gradient is its summand. An optimizer may go on with what was clipped as with any gradient."""

    def program(strategy):
        x, y = vectors(12)
        with strategy.scope():
            model = Model()
            optimizer = keras.optimizers.LossScaleOptimizer(keras.optimizers.Adam(0.01, use_ema=True), initial_scale=1.0)
            optimizer.build(model.trainable_variables)

        def step_of_rank(x, y):
            with tf.GradientTape() as tape:
                loss = crossentropy(reduction="sum")(y, model(x)) / 12
            variables = model.trainable_variables
            gradients, norm = tfdist.clip_by_global_norm(tape.gradient(loss, variables), variables, LIMIT)
            optimizer.apply(gradients, variables)
            return norm

        step = tf.function(lambda x, y: strategy.run(step_of_rank, args=(x, y)))
        dataset = tf.data.Dataset.from_tensor_slices((x, y)).batch(12).repeat(3)
        norms = [
            strategy.experimental_local_results(step(*batch))[0] for batch in strategy.experimental_distribute_dataset(dataset)
        ]
        model.optimizer = optimizer
        return {"norms": [float(norm) for norm in norms], **state(model)}

    assert_as_on_one_device(program, zero_stage)
