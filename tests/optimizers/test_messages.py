"""What clipping, accumulation, averages and loss scaling send, message by message."""

import math

import keras
import numpy as np
import pytest
import tensorflow as tf
from training import BATCH, CLASSES, FEATURES, strategy_for, vectors

import tfdist
from tests.devices import is_on
from tfdist.optimizers import plan

WEIGHTS = 2  # of `build`


def build():
    return keras.Sequential([keras.Input((FEATURES,)), keras.layers.Dense(CLASSES, name="head")])


def traced(strategy, optimizer, with_norm=False):
    """Returns the graph of a step and the plan's (op, shape, label) of rank 0."""
    with strategy.scope():
        model = build()
        trainer = optimizer()
        trainer.build(model.trainable_variables)

    def on_rank(x):
        with tf.GradientTape() as tape:
            loss = tf.reduce_sum(model(x) ** 2)
        grads = tape.gradient(loss, model.trainable_variables)
        norm = tfdist.global_norm(grads, model.trainable_variables) if with_norm else 0.0
        trainer.apply(grads, model.trainable_variables)
        return norm

    step = tf.function(lambda x: strategy.run(on_rank, args=(x,)))
    graph = step.get_concrete_function(tf.zeros((4, FEATURES))).graph
    return graph, [(record.op, record.shape, record.label) for record in strategy.last_plan.records[0]]


def added(zero_stage, **settings):
    """Returns the messages that a setting of the optimizer adds to a step."""
    plain = traced(strategy_for(2, zero_stage), lambda: keras.optimizers.SGD(0.1))[1]
    messages = traced(strategy_for(2, zero_stage), lambda: keras.optimizers.SGD(0.1, **settings))[1]
    return [message for message in messages if message not in plain]


@pytest.mark.parametrize("zero_stage", range(4))
def test_clipping_adds_one_message_of_numbers(zero_stage):
    messages = {"global_clipnorm": [("all_reduce", (), "global_norm")], "clipnorm": [("all_reduce", (WEIGHTS,), "clipnorm")]}
    for setting, expected in messages.items():
        assert added(zero_stage, **{setting: 1.0}) == (expected if zero_stage else [])
    assert added(zero_stage, clipvalue=1.0) == []


@pytest.mark.parametrize("zero_stage", range(4))
def test_a_norm_that_is_asked_for_costs_no_second_reduction(zero_stage):
    plain = traced(strategy_for(2, zero_stage), lambda: keras.optimizers.SGD(0.1))[1]
    messages = traced(strategy_for(2, zero_stage), lambda: keras.optimizers.SGD(0.1), with_norm=True)[1]
    assert [message for message in messages if message not in plain] == (
        [("all_reduce", (), "global_norm")] if zero_stage else []
    )
    assert len(messages) == len(plain) + bool(zero_stage)


@pytest.mark.parametrize("zero_stage", range(4))
def test_the_overflow_flag_is_one_number(zero_stage):
    plain = traced(strategy_for(2, zero_stage), lambda: keras.optimizers.SGD(0.1))[1]
    scaled = traced(strategy_for(2, zero_stage), lambda: keras.optimizers.LossScaleOptimizer(keras.optimizers.SGD(0.1)))[1]
    assert [message for message in scaled if message not in plain] == ([("all_reduce", (), "is_finite")] if zero_stage else [])


def of_every_step(graph):
    """Returns the kinds of collectives of rank 0 that run in every step: those outside branches."""
    return sorted(op.type for op in graph.get_operations() if op.type.startswith("Collective") and is_on(op, 0))


@pytest.mark.parametrize(
    ("zero_stage", "every", "last"),
    [
        (0, [], ["all_reduce"]),
        (1, [], ["reduce_scatter", "all_gather"]),
        (2, ["CollectiveAllToAllV2"], ["all_gather"]),
        (3, ["CollectiveAllToAllV2", "CollectiveGatherV2"], []),
    ],
)
def test_what_a_micro_step_sends(zero_stage, every, last):
    """Stages 0 and 1 send nothing before the last micro-step; 2 and 3 reduce in each, into sharded accumulators."""
    strategy = strategy_for(2, zero_stage)
    graph, messages = traced(strategy, lambda: keras.optimizers.SGD(0.1, gradient_accumulation_steps=3))
    assert of_every_step(graph) == every
    assert [op for op, _, _ in messages[len(every) :]] == last


@pytest.mark.parametrize(("zero_stage", "size"), [(0, 1), (1, 1), (2, 2), (3, 2)])
def test_where_accumulators_live(zero_stage, size):
    strategy = strategy_for(2, zero_stage)
    with strategy.scope():
        model = build()
        optimizer = keras.optimizers.SGD(0.1, gradient_accumulation_steps=2)
        optimizer.build(model.trainable_variables)
    kernel = optimizer._accumulated_gradients[0].value
    assert [component.shape.num_elements() for component in kernel.values] == [-(-FEATURES * CLASSES // size)] * 2
    assert kernel.shape == (FEATURES, CLASSES)


def test_partial_sums_read_as_their_sum_and_can_be_set():
    """Between two updates, saved accumulators are those of one device."""
    x, y = vectors(BATCH)
    found = []
    for strategy in (strategy_for(3, 1), tf.distribute.get_strategy()):
        keras.utils.set_random_seed(3)
        with strategy.scope():
            model = build()
            model.compile(keras.optimizers.SGD(0.1, gradient_accumulation_steps=2), "mse")
        model.train_on_batch(x, tf.one_hot(y, CLASSES))
        found.append(model.optimizer._accumulated_gradients[0].numpy())
        model.optimizer._accumulated_gradients[0].assign(found[-1])
        np.testing.assert_allclose(model.optimizer._accumulated_gradients[0].numpy(), found[-1], rtol=1e-6)
    assert np.abs(found[1]).max() > 1e-3
    np.testing.assert_allclose(*found, rtol=0, atol=1e-5 * np.abs(found[1]).max())


@pytest.mark.parametrize("zero_stage", range(4))
def test_global_norm_is_that_of_the_global_batch(zero_stage):
    x = vectors(BATCH)[0]

    def norm(strategy):
        keras.utils.set_random_seed(3)
        with strategy.scope():
            model = build()

        def on_rank(x):
            with tf.GradientTape() as tape:
                loss = tf.reduce_sum(model(x) ** 2)
            grads = tape.gradient(loss, model.trainable_variables)
            return tfdist.global_norm([*grads, None], [*model.trainable_variables, model.trainable_variables[0]])

        data = iter(strategy.experimental_distribute_dataset(tf.data.Dataset.from_tensors(x)))
        values = tf.function(lambda: strategy.run(on_rank, args=(next(data),)))()
        return [float(value) for value in strategy.experimental_local_results(values)]

    (expected,) = norm(tf.distribute.get_strategy())
    np.testing.assert_allclose(norm(strategy_for(3, zero_stage)), [expected] * 3, rtol=1e-5)


@pytest.mark.parametrize("zero_stage", range(4))
@pytest.mark.parametrize("make", [lambda: keras.optimizers.Adam(0.1, global_clipnorm=1.0), lambda: keras.optimizers.Lamb(0.1)])
def test_the_list_is_what_is_sent(zero_stage, make):
    """The plan of the step, which `last_plan` keeps, names every message that the rank's optimizer sends, in order."""
    strategy = strategy_for(2, zero_stage, bucket_bytes=4 * CLASSES)
    messages = traced(strategy, make)[1]
    (step,) = strategy.last_plan.steps[0]
    expected = []
    for action in step.step:
        if isinstance(action, plan.Reduce):
            expected.append(f"{'reduce_scatter' if zero_stage else 'all_reduce'}/bucket_{action.bucket}")
        elif isinstance(action, plan.Clip) and zero_stage:
            expected.append("global_norm")
        elif isinstance(action, plan.Gather):
            expected.append(f"all_gather/bucket_{action.bucket}")
        elif isinstance(action, plan.Complete):
            expected.append(f"all_gather/owned_{action.bucket}")
        elif isinstance(action, plan.Broadcast):
            expected.append(f"broadcast/owned_{action.bucket}")
    labels = [label for _, _, label in messages if "head" not in label]  # of stage 3's layer
    assert labels == expected


@pytest.mark.parametrize("zero_stage", [0, 2])
def test_what_a_norm_has_reduced_is_found_one_by_one(zero_stage):
    """The norm of the kernel's gradient alone: the step reduces the bias's, and no other."""
    strategy = strategy_for(2, zero_stage, bucket_bytes=4)
    with strategy.scope():
        model = build()
        optimizer = keras.optimizers.SGD(0.1)
        optimizer.build(model.trainable_variables)

    def on_rank(x):
        with tf.GradientTape() as tape:
            loss = tf.reduce_sum(model(x) ** 2)
        grads = tape.gradient(loss, model.trainable_variables)
        tfdist.global_norm(grads[:1], model.trainable_variables[:1])
        optimizer.apply(grads, model.trainable_variables)

    tf.function(lambda x: strategy.run(on_rank, args=(x,))).get_concrete_function(tf.zeros((4, FEATURES)))
    shapes = [record.shape for record in strategy.last_plan.records[0] if "reduce" in record.op and record.label != "global_norm"]
    expected = [FEATURES * CLASSES, CLASSES]
    assert [math.prod(shape) for shape in shapes] == [size + size % 2 * bool(zero_stage) for size in expected]
