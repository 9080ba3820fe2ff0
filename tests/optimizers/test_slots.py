"""An optimizer's slots of one parameter, found in its lists; and tensors of several dtypes that travel in one message."""

import keras
import tensorflow as tf
from ranks import rank_id, run, strategy_on

from tfdist.collectives import current_program
from tfdist.optimizers.slots import broadcast_together, slots_of, slots_replaced


def built(make, shapes=((5, 3), (3,))):
    optimizer = make()
    optimizer.build([keras.Variable(tf.ones(shape)) for shape in shapes])
    return optimizer, optimizer._trainable_variables


def test_slots_of_each_parameter():
    for make, count in ((keras.optimizers.SGD, 0), (keras.optimizers.Adam, 2), (lambda: keras.optimizers.Adam(amsgrad=True), 3)):
        optimizer, weights = built(make)
        for weight in weights:
            slots = slots_of(optimizer, weight)
            assert [slot.shape for slot in slots] == [weight.shape] * count and all(isinstance(x, tf.Variable) for x in slots)


def test_averages_and_accumulators_are_no_slots_of_the_update():
    optimizer, weights = built(lambda: keras.optimizers.SGD(momentum=0.9, use_ema=True, gradient_accumulation_steps=2))
    assert [slot is optimizer.momentums[1].value for slot in slots_of(optimizer, weights[1])] == [True]


def test_as_many_parameters_as_other_numbers():
    """A list of numbers, as long as that of the parameters by chance, holds no slots."""
    optimizer, weights = built(keras.optimizers.Adam)
    optimizer.betas = [0.9, 0.99]
    assert len(slots_of(optimizer, weights[0])) == 2


def test_replaced_slots_are_put_back():
    optimizer, weights = built(lambda: keras.optimizers.SGD(momentum=0.9))
    before, stand_in = [slot._value for slot in optimizer.momentums], tf.Variable([7.0])
    with slots_replaced(optimizer, weights[1], [stand_in]):
        assert optimizer.momentums[1]._value is stand_in and optimizer.momentums[0]._value is before[0]
    assert [slot._value for slot in optimizer.momentums] == before


def test_tensors_of_several_dtypes_in_one_message():
    """Large integers of float64 and numbers of half precision are the sender's bit by bit."""
    strategy = strategy_on(3)

    def on_rank():
        number = rank_id() + 1
        tensors = [tf.fill([3], tf.constant(2.0**40 + number, tf.float64)), tf.fill([], tf.constant(number / 8, tf.float16))]
        found = broadcast_together(tensors, (0, 1, 2), 1, "slots", current_program("test"))
        assert [x.dtype for x in found] == [tf.float64, tf.float16]
        return found

    for wide, half in run(strategy, on_rank):
        assert wide.tolist() == [2.0**40 + 2] * 3 and float(half) == 0.25
    assert strategy.last_plan.counts() == {"broadcast": 1}
