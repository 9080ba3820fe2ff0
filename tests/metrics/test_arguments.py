"""What a metric is given: dense tensors in any structure, each with the mask that Keras put on it."""

import tensorflow as tf
from ranks import run, strategy_on

from tfdist.collectives import current_program
from tfdist.metrics.arguments import GatheredBatch, dense, mapped, others, why_not


def masked(values, mask):
    values._keras_mask = mask
    return values


def test_masks_come_after_what_they_are_of():
    x, mask, y = tf.ones([3, 2]), tf.constant([True, False, True]), tf.zeros([3])
    given = ((masked(x, mask), None), {"sample_weight": y, "name": "n"})
    assert [id(one) for one in dense(given)] == [id(x), id(y), id(mask)]
    args, kwargs = mapped(lambda one: tf.concat([one, one], 0), given)
    assert args[0].shape == [6, 2] and args[1] is None and kwargs["name"] == "n" and kwargs["sample_weight"].shape == [6]
    assert args[0]._keras_mask.numpy().tolist() == [True, False, True] * 2
    assert x._keras_mask is mask and not hasattr(kwargs["sample_weight"], "_keras_mask")


def test_what_cannot_be_gathered():
    ragged, words = tf.ragged.constant([[1.0], [2.0, 3.0]]), tf.constant(["a"])
    assert why_not(([tf.ones([3])], {})) == ""
    assert "RaggedTensor" in why_not(([tf.ones([3]), ragged], {}))
    assert "dtype string" in why_not(([words], {}))
    assert "dtype string" in why_not(([masked(tf.ones([1]), words)], {}))
    assert others([tf.ones([3]), ragged]) == [ragged] and dense([ragged]) == []


def test_several_metrics_gather_the_same_rows_once():
    """Each gets another object, on which Keras sets its own mask."""
    strategy = strategy_on(2)

    def on_rank(rows):
        gathered, mask = current_program("test").part(GatheredBatch), rows > 1
        first = gathered.of([masked(rows, mask)])[0]
        second = gathered.of({"x": rows})["x"]
        assert first is not second and first._keras_mask is not second._keras_mask
        return first, second, tf.cast(first._keras_mask, tf.int32)

    for rank in run(strategy, on_rank, [tf.constant([1.0, 2.0, 3.0]), tf.constant([4.0, 1.0, 0.0])]):
        assert [x.tolist() for x in rank] == [[1, 2, 3, 4, 1, 0]] * 2 + [[0, 1, 1, 1, 0, 0]]
    labels = [record.label for record in strategy.last_plan.records[0]]
    assert labels.count("metrics/rows") == 2, "the rows and their mask"
