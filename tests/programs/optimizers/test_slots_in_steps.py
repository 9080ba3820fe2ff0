"""An optimizer's slots, read and written in a step by the user's code: whole, as on one device, though a rank has a part."""

import functools

import keras
import pytest
import tensorflow as tf
from grids import exhaustive
from training import BATCH, loss_function, small, vectors

from tests.parity.comparison import state
from tests.programs.comparing import assert_as_on_one_device
from tests.programs.gradients.test_changed_gradients import fitted

pytestmark = pytest.mark.as_traced


class Logging(keras.Sequential):
    """Logs how large the moments are, and their part in the direction of the weights."""

    def train_step(self, data):
        x, y = data
        with tf.GradientTape() as tape:
            loss = self.compute_loss(x, y, self(x, training=True))
        self.optimizer.apply(tape.gradient(loss, self.trainable_variables), self.trainable_variables)
        moments = [slot.value for slot in self.optimizer._momentums]
        aligned = [keras.ops.sum(slot * weight) for slot, weight in zip(moments, self.trainable_variables, strict=True)]
        return {"loss": loss, "norm": tf.linalg.global_norm(moments), "aligned": sum(aligned)}


class Lookahead(keras.optimizers.SGD):
    """Pulls the weights to an average of theirs in every second step (Zhang et al. 2019); in the others moves that a little."""

    def build(self, variables):
        super().build(variables)
        self.slow = [self.add_variable_from_reference(v, "slow") for v in variables]

    def apply(self, grads, trainable_variables=None):
        super().apply(grads, trainable_variables)
        pairs = list(zip(self.slow, self._trainable_variables, strict=True))

        def pull():
            for slow, fast in pairs:
                slow.assign(slow + 0.5 * (fast - slow))
                fast.assign(slow)
            return 0

        def average():
            for slow, fast in pairs:
                slow.assign_add(0.1 * (fast - slow))
            return 0

        tf.cond(self.iterations % 2 == 0, pull, average)


class Accumulating(keras.optimizers.SGD):
    """Keeps the sums of gradients in slots, and steps with their mean every second time."""

    def build(self, variables):
        super().build(variables)
        self.sums = [self.add_variable_from_reference(v, "sum") for v in variables]
        self.calls = self.add_variable((), name="calls", dtype="int32")

    def apply(self, grads, trainable_variables=None):
        for total, grad in zip(self.sums, grads, strict=True):
            total.assign_add(grad)
        self.calls.assign_add(1)

        def step():
            super(Accumulating, self).apply([total / 2 for total in self.sums], trainable_variables)
            for total in self.sums:
                total.assign(keras.ops.zeros_like(total))
            return 0

        tf.cond(self.calls % 2 == 0, step, lambda: 0)


@functools.cache
def with_logs(run_eagerly):
    def program(strategy):
        with strategy.scope():
            model = Logging(small().layers)
            model.build((None, 15))
            model.compile(keras.optimizers.Adam(0.01), loss_function(), run_eagerly=run_eagerly)
        return fitted(model)

    return program


@functools.cache
def in_fit(optimizer, run_eagerly=False):
    def program(strategy):
        with strategy.scope():
            model = small()
            model.compile(optimizer(0.1, momentum=0.9), loss_function(), run_eagerly=run_eagerly)
            model.optimizer.build(model.trainable_variables)
        return fitted(model)

    return program


@functools.cache
def in_a_loop(make):
    def program(strategy):
        with strategy.scope():
            model, optimizer = small(), make(0.1, momentum=0.9)
            optimizer.build(model.trainable_variables)
        loss_of = keras.losses.SparseCategoricalCrossentropy(from_logits=True, reduction="sum")

        def on_rank(x, y):
            with tf.GradientTape() as tape:
                loss = loss_of(y, model(x)) / BATCH
            optimizer.apply(tape.gradient(loss, model.trainable_variables), model.trainable_variables)
            return loss

        @tf.function
        def step(x, y):
            return strategy.reduce("SUM", strategy.run(on_rank, args=(x, y)), axis=None)

        batches = tf.data.Dataset.from_tensor_slices(vectors(4 * BATCH)).batch(BATCH)
        losses = [float(step(*batch)) for batch in strategy.experimental_distribute_dataset(batches)]
        model.optimizer = optimizer
        return losses, state(model)

    return program


@pytest.mark.parametrize(
    ("run_eagerly", "zero_stage"),
    [(False, 3), exhaustive(False, 0), exhaustive(False, 1), exhaustive(False, 2), exhaustive(True, 1), exhaustive(True, 3)],
)
def test_they_are_logged(run_eagerly, zero_stage):
    assert_as_on_one_device(with_logs(run_eagerly), zero_stage, 3)


@pytest.mark.exhaustive  # by default in a loop: the next test
@pytest.mark.parametrize("zero_stage", range(4))
@pytest.mark.parametrize("optimizer", [Lookahead, Accumulating])
def test_an_optimizer_reads_and_writes_them(optimizer, zero_stage):
    assert_as_on_one_device(in_fit(optimizer), zero_stage, 3)


@pytest.mark.parametrize(
    ("optimizer", "zero_stage"),
    [
        (Accumulating, 3),
        *(exhaustive(optimizer, zero_stage) for optimizer in (Lookahead, Accumulating) for zero_stage in range(4)),
    ],
)
def test_in_a_loop(optimizer, zero_stage):
    assert_as_on_one_device(in_a_loop(optimizer), zero_stage, 2)


@pytest.mark.exhaustive
@pytest.mark.parametrize("zero_stage", [1, 2, 3])
@pytest.mark.parametrize("optimizer", [Lookahead])
def test_in_eager_steps(optimizer, zero_stage):
    assert_as_on_one_device(in_fit(optimizer, run_eagerly=True), zero_stage, 2)
