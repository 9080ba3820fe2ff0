"""Optimizers that a `train_step` applies in a branch which all ranks take: every few steps, when all is finite."""

import functools

import keras
import pytest
import tensorflow as tf
from grids import exhaustive
from training import BATCH, loss_function, small, strategy_for, vectors

from tests.parity.comparison import state
from tests.programs.comparing import assert_as_on_one_device

ROWS = 5 * BATCH - 5  # the last batch is smaller


class Stepping(keras.Sequential):
    """Counts its steps in `steps`."""

    def __init__(self, layers):
        super().__init__(layers)
        self.steps = self.add_weight(name="steps", shape=(), dtype="int32", initializer="zeros", trainable=False)

    def gradients(self, data):
        x, y = data
        with tf.GradientTape() as tape:
            loss = self.compute_loss(x, y, self(x, training=True))
        return loss, tape.gradient(loss, self.trainable_variables)

    def is_turn(self, every=2):
        self.steps.assign_add(1)
        return tf.equal(self.steps.value % every, 0)


class AppliesInABranch(Stepping):
    def train_step(self, data):
        loss, grads = self.gradients(data)

        def apply():
            self.optimizer.apply(grads, self.trainable_variables)

        tf.cond(self.is_turn(), apply, lambda: None)
        return {"loss": loss}


class AppliesWhatItChanges(Stepping):
    """Reads gradients from outside in the branch, by something that is not linear."""

    def train_step(self, data):
        loss, grads = self.gradients(data)

        def apply():
            scaled = [g * 0.5 for g in grads]
            norm = tf.linalg.global_norm(grads)
            self.optimizer.apply([g / (1.0 + norm) for g in scaled], self.trainable_variables)
            return norm

        norm = tf.cond(self.is_turn(), apply, lambda: 0.0)
        return {"loss": loss, "norm": norm}


class MeetsNumbersFromOutside(Stepping):
    """Multiplies gradients by the loss, over a count that a constant is added to, in a branch, and in a branch of that."""

    def train_step(self, data):
        loss, grads = self.gradients(data)
        tokens = tf.reduce_sum(tf.cast(data[1] > 2, tf.float32)) + 1.0

        def scaled():
            self.optimizer.apply([g * 20.0 / tokens for g in grads], self.trainable_variables)

        def by_the_loss():
            self.optimizer.apply([g * loss for g in grads], self.trainable_variables)

        tf.cond(self.is_turn(), scaled, lambda: tf.cond(tf.equal(self.steps.value % 3, 0), by_the_loss, lambda: None))
        return {"loss": loss}


class MeetsNumbersInside(Stepping):
    """Adds gradients from outside, over a count, to gradients that are taken in the branch, by the loss there."""

    def train_step(self, data):
        loss, grads = self.gradients(data)
        tokens = tf.reduce_sum(tf.cast(data[1] > 2, tf.float32))

        def apply():
            again, others = self.gradients(data)
            found = [20.0 * g / tokens * loss + h * again for g, h in zip(grads, others, strict=True)]
            self.optimizer.apply(found, self.trainable_variables)

        tf.cond(self.is_turn(), apply, lambda: None)
        return {"loss": loss}


class Stateful(Stepping):
    """Has a variable that is not trainable, by which gradients are multiplied."""

    def __init__(self, layers):
        super().__init__(layers)
        self.state = self.add_weight(name="state", shape=(), initializer="ones", trainable=False)

    def train_step(self, data):
        loss, grads = self.gradients(data)
        tf.cond(*self.branches(loss, grads))
        self.optimizer.apply([g * self.state for g in grads], self.trainable_variables)
        return {"loss": loss}


class AssignsByTheLoss(Stateful):
    """Assigns in a branch that the loss selects, the loss itself, and what is read in the same step."""

    def branches(self, loss, grads):
        def assign():
            self.state.assign(loss)

        return loss < 3.0 * self.state, assign, lambda: None


class AssignsFunctions(Stateful):
    """Assigns functions of the batch, and of gradients, in branches of branches."""

    def branches(self, loss, grads):
        def root():
            self.state.assign(0.9 * self.state + 0.1 * tf.sqrt(loss))

        def norm():
            self.state.assign(0.9 * self.state + 0.1 * tf.linalg.global_norm(grads))

        return self.is_turn(), root, lambda: tf.cond(tf.equal(self.steps.value % 3, 0), norm, lambda: None)


class AssignsAndReturns(Stepping):
    """Returns functions of the batch from branches that assign, and send nothing."""

    def train_step(self, data):
        loss, grads = self.gradients(data)

        def root():
            self.steps.assign_add(2)
            return tf.sqrt(loss)

        found = tf.cond(self.is_turn(3), root, lambda: loss**2)
        self.optimizer.apply([g * found for g in grads], self.trainable_variables)
        return {"loss": loss, "found": found}


class StepsAndReturns(Stepping):
    """Returns functions of the batch from branches, of which the first has stepped."""

    def train_step(self, data):
        loss, grads = self.gradients(data)

        def step():
            self.optimizer.apply([g * loss for g in grads], self.trainable_variables)
            return tf.sqrt(loss), tf.math.reduce_std(data[0])

        root, spread = tf.cond(self.is_turn(), step, lambda: (loss**2, loss * tf.reduce_max(data[0])))
        self.trainable_variables[0].assign_add(0.01 * root)
        return {"loss": loss, "root": root, "spread": spread}


class StepsByTheBatch(Stepping):
    """Steps where a number of the batch says so, and chooses by another."""

    def train_step(self, data):
        loss, grads = self.gradients(data)

        def scaled():
            self.optimizer.apply([g * loss for g in grads], self.trainable_variables)

        def plain():
            self.optimizer.apply(grads, self.trainable_variables)

        choice = tf.cast(20.0 * tf.reduce_mean(data[0]), tf.int32) % 2
        tf.cond(loss < 2.36, lambda: tf.switch_case(choice, [scaled, plain]), lambda: None)
        return {"loss": loss}


class TakesGradientsInside(Stepping):
    """Takes in branches, of branches too, the gradients of losses that were computed outside: of a mean, a sum, a ratio."""

    def train_step(self, data):
        x, y = data
        with tf.GradientTape(persistent=True) as tape:
            found = self(x, training=True)
            loss = self.compute_loss(x, y, found)
            total = 0.01 * tf.reduce_sum(found**2)
            ratio = tf.sqrt(loss) + tf.reduce_sum(found) / (1.0 + tf.reduce_sum(found**2))

        def step(target):
            self.optimizer.apply(tape.gradient(target, self.trainable_variables), self.trainable_variables)

        def other():
            tf.cond(tf.equal(self.steps.value % 3, 0), lambda: step(total), lambda: step(loss))

        tf.cond(self.is_turn(), lambda: step(ratio), other)
        return {"loss": loss}


class TrainsInABranch(Stepping):
    """Takes gradients in the branch, twice (SAM), and clips them."""

    def train_step(self, data):
        def train():
            loss, grads = self.gradients(data)
            norm = tf.linalg.global_norm(grads)
            moves = [0.05 * g / norm for g in grads]
            for weight, move in zip(self.trainable_variables, moves, strict=True):
                weight.assign_add(move)
            _, grads = self.gradients(data)
            for weight, move in zip(self.trainable_variables, moves, strict=True):
                weight.assign_sub(move)
            grads, _ = tf.clip_by_global_norm(grads, 0.05)
            self.optimizer.apply(grads, self.trainable_variables)
            return loss

        return {"loss": tf.cond(self.is_turn(), train, lambda: 0.0)}


class Accumulates(Stepping):
    """Adds gradients to variables, and applies them every third step."""

    def __init__(self, layers):
        super().__init__(layers)
        self.sums = [
            self.add_weight(name=f"sum_{number}", shape=weight.shape, initializer="zeros", trainable=False)
            for number, weight in enumerate(self.trainable_weights)
        ]

    def train_step(self, data):
        loss, grads = self.gradients(data)
        for total, grad in zip(self.sums, grads, strict=True):
            total.assign_add(grad)

        def apply():
            self.optimizer.apply([total / 3 for total in self.sums], self.trainable_variables)
            for total in self.sums:
                total.assign(tf.zeros(total.shape))

        tf.cond(self.is_turn(3), apply, lambda: None)
        return {"loss": loss}


class SkipsWhatIsNotFinite(Stepping):
    def train_step(self, data):
        loss, grads = self.gradients(data)
        finite = tf.reduce_all([tf.reduce_all(tf.math.is_finite(g)) for g in grads])
        tf.cond(finite, lambda: self.optimizer.apply(grads, self.trainable_variables), lambda: None)
        return {"finite": tf.cast(finite, tf.float32)}


class OneOfSeveral(Stepping):
    """Chooses what to train by `tf.switch_case`, and within it by a `tf.cond`."""

    def train_step(self, data):
        loss, grads = self.gradients(data)
        weights = self.trainable_variables

        def both():
            tf.cond(tf.equal(self.steps.value % 4, 0), lambda: self.optimizer.apply(grads, weights), lambda: None)

        def others():
            _, again = self.gradients(data)
            self.optimizer.apply([None, *again[1:]], weights)

        self.is_turn()
        tf.switch_case(tf.cast(self.steps.value % 3, tf.int32), [lambda: None, both, others])
        return {"loss": loss}


MODELS = (
    AppliesInABranch,
    AppliesWhatItChanges,
    MeetsNumbersFromOutside,
    MeetsNumbersInside,
    AssignsByTheLoss,
    AssignsFunctions,
    AssignsAndReturns,
    StepsAndReturns,
    StepsByTheBatch,
    TakesGradientsInside,
    TrainsInABranch,
    Accumulates,
    SkipsWhatIsNotFinite,
    OneOfSeveral,
)
OPTIMIZERS = {
    "adam": lambda: keras.optimizers.Adam(0.01, global_clipnorm=0.05),
    "lamb": lambda: keras.optimizers.Lamb(0.01),
    "accumulating": lambda: keras.optimizers.Adam(0.01, gradient_accumulation_steps=2),
    "scaled": lambda: keras.optimizers.LossScaleOptimizer(keras.optimizers.SGD(0.1), initial_scale=1.0),
}


@functools.cache
def fitted(kind, optimizer="adam", **arguments):
    def program(strategy):
        x, y = vectors(ROWS)
        if kind is SkipsWhatIsNotFinite:
            x[BATCH + 1] = float("nan")
        with strategy.scope():
            model = kind(small().layers)
            model.build((None, 15))
            model.compile(OPTIMIZERS[optimizer](), loss_function(), **arguments)
        found = []
        record = keras.callbacks.LambdaCallback(
            on_train_batch_end=lambda _, logs: found.append({k: float(v) for k, v in logs.items()})
        )
        model.fit(x, y, batch_size=BATCH, epochs=2, shuffle=False, verbose=0, callbacks=[record])
        return found, state(model)

    return program


def _grid():
    """Each model at stages 0 and 3 in turns; the rest in the exhaustive suite."""
    for place, kind in enumerate(MODELS):
        for stage in range(4):
            yield (kind, stage) if stage == 3 * (place % 2) else exhaustive(kind, stage)


@pytest.mark.as_traced
@pytest.mark.parametrize(("kind", "zero_stage"), list(_grid()))
def test_in_fit(kind, zero_stage):
    assert_as_on_one_device(fitted(kind), zero_stage)


class StepsBetweenBranches(Stepping):
    """A step in each of two branches, and one between them: each rank has variables of its own, and none waits for another."""

    def step(self, data):
        loss, grads = self.gradients(data)
        self.optimizer.apply(grads, self.trainable_variables)
        return loss

    def train_step(self, data):
        first = tf.cond(self.is_turn(), lambda: self.step(data), lambda: 0.0)
        second = self.step(data)
        third = tf.cond(self.is_turn(3), lambda: self.step(data), lambda: 0.0)
        return {"first": first, "second": second, "third": third}


@pytest.mark.as_traced
@pytest.mark.parametrize("zero_stage", (0, exhaustive(1), 2, exhaustive(3)))
def test_a_step_between_branches_that_step(zero_stage):
    assert_as_on_one_device(fitted(StepsBetweenBranches), zero_stage)


@pytest.mark.exhaustive
@pytest.mark.parametrize("kind", MODELS)
@pytest.mark.parametrize("optimizer", ("lamb", "accumulating", "scaled"))
@pytest.mark.parametrize("zero_stage", range(4))
def test_optimizers(kind, optimizer, zero_stage):
    assert_as_on_one_device(fitted(kind, optimizer), zero_stage)


@pytest.mark.exhaustive
@pytest.mark.parametrize("kind", MODELS)
@pytest.mark.parametrize("zero_stage", (0, 3))
def test_several_steps_at_once(kind, zero_stage):
    assert_as_on_one_device(fitted(kind, steps_per_execution=3), zero_stage, 3)


@pytest.mark.exhaustive
@pytest.mark.parametrize("kind", (AppliesInABranch, Accumulates, OneOfSeveral))
@pytest.mark.parametrize("zero_stage", (0, 3))
def test_eagerly(kind, zero_stage):
    assert_as_on_one_device(fitted(kind, run_eagerly=True), zero_stage, 3)


def test_messages():
    """What selects the branch is compared once; the gradients of outside are summed outside, in every step."""
    strategy = strategy_for(2, 2)
    fitted(AppliesInABranch)(strategy)
    labels = [record.label for record in strategy.last_plan.records[0]]
    assert labels.count("branch") == 1
    assert labels.index("branch") < labels.index("all_gather/bucket_0")
