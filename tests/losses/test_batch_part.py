"""What the losses of a part count in the loss of the whole: shares that add up, of any split of the rows."""

import numpy as np
import pytest
import tensorflow as tf

from tfdist.losses.batch_part import BatchPart


class Rows(BatchPart):
    """Some of `num_rows` rows: its sums over the batch are those of `parts`, asked for in one order by all."""

    def __init__(self, rows, num_rows, totals=()):
        self.rows, self.num_rows, self.given, self.asked = rows, num_rows, totals, []

    def fraction(self):
        return tf.constant(self.rows / self.num_rows, tf.float64)

    def totals(self, counts, sums):
        self.asked.append((len(counts), len(sums)))
        return list(map(tf.constant, self.given))


@pytest.mark.parametrize("sizes", [(4, 3), (7, 0), (1, 1, 5)])
def test_shares_of_a_mean_add_up(sizes):
    rows = np.arange(1.0, 8.0, dtype=np.float32)
    shares = []
    for part, own in zip(map(lambda n: Rows(n, 7), sizes), np.split(rows, np.cumsum(sizes)[:-1]), strict=True):
        mean = tf.reduce_mean(tf.constant(own))  # NaN without rows
        shares.append(part.weigh(mean))
        np.testing.assert_allclose(part.mean_of_share(shares[-1]), own.mean() if len(own) else 0, rtol=1e-6)
    np.testing.assert_allclose(tf.add_n(shares), rows.mean(), rtol=1e-6)


def test_without_a_mask_the_divisor_counts_losses():
    part = Rows(3, 7, [14.0])
    assert float(part.divisor(tf.ones([3, 2]), None, None)) == 14 and part.asked == [(1, 0)]


def test_a_mask_may_have_fewer_elements():
    """Of 7 x 2 losses and 7 masked rows, of which 4 are valid, 8 losses count."""
    part = Rows(3, 7, [14.0, 7.0, 4.0])
    assert float(part.divisor(tf.ones([3, 2]), None, tf.constant([True, False, True]))) == 8
    assert part.asked == [(2, 1)]
    assert float(Rows(0, 7, [0.0, 0.0, 0.0]).divisor(tf.ones([0]), None, tf.ones([0], tf.bool))) == 0


def test_weights_take_the_place_of_counts_and_have_a_gradient():
    class Own(Rows):
        def totals(self, counts, sums):
            assert not counts
            return [2 * sums[0]]

    weights, values = tf.constant([1.0, 2.5]), tf.constant([3.0, 4.0])
    with tf.GradientTape() as tape:
        tape.watch([weights, values])
        divisor = Own(2, 4).divisor(values, weights, tf.constant([True, False]))
    assert float(divisor) == 7 and tape.gradient(divisor, weights).numpy().tolist() == [2, 2]
