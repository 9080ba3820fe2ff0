"""Send and receive: there, and the gradients back."""

import numpy as np
import pytest
import tensorflow as tf
from ranks import integers, rank_id, run, strategy_on, transposed

from tfdist.collectives import receive, send
from tfdist.collectives.transports.kernel_settings import byte_dtype

pytestmark = pytest.mark.timeout(120)

DTYPES = (tf.bfloat16, tf.float16, tf.float32, tf.float64, tf.int32, tf.int64)


@pytest.mark.parametrize("dtype", [tf.float32, tf.bfloat16], ids=lambda dtype: dtype.name)
@pytest.mark.parametrize("n", [2, 3, 4])
def test_a_chain_of_stages_trains_as_one(n, dtype):
    """Stage i computes h = tanh(w_i h) and sends it on; gradients come back the same way. Every loss is halved."""
    rng = np.random.default_rng(n)
    values = [rng.normal(size=(5,)).astype(dtype.as_numpy_dtype) for _ in range(n)]
    strategy = strategy_on(n)

    def stage(weight):
        index = rank_id()
        anchor = tf.zeros([])
        with tf.GradientTape() as tape:
            tape.watch([weight, anchor])
            if index == 0:
                hidden = tf.ones([5], dtype)
            else:
                hidden = receive([5], dtype, index - 1, anchor=anchor, label=f"to_{index}")
            hidden = tf.tanh(weight * hidden)
            if index < n - 1:
                loss = send(hidden, index + 1, label=f"to_{index + 1}")
            else:
                loss = tf.reduce_sum(hidden**2)
            loss = loss / 2
        return loss, *tape.gradient(loss, [weight, anchor], unconnected_gradients="zero")

    results = run(strategy, stage, values)
    weights = [tf.constant(value) for value in values]
    with tf.GradientTape() as tape:
        tape.watch(weights)
        hidden = tf.ones([5], dtype)
        for weight in weights:
            hidden = tf.tanh(weight * hidden)
        loss = tf.reduce_sum(hidden**2) / 2
    exact = dict(rtol=1e-6) if dtype == tf.float32 else dict(rtol=2e-2, atol=1e-2)
    for (_, gradient, anchor), expected in zip(results, tape.gradient(loss, weights), strict=True):
        assert np.any(expected.numpy() != 0)
        np.testing.assert_allclose(gradient.astype("float32"), expected.numpy().astype("float32"), **exact)
        assert anchor == 0
    assert [receipt for receipt, _, _ in results[:-1]] == [0] * (n - 1)
    np.testing.assert_allclose(results[-1][0].astype("float32"), float(loss), **exact)
    assert strategy.last_plan.counts(0) == {"send": 2}
    assert strategy.last_plan.counts(n - 1) == {"send": 2}
    assert {record.dtype for record in strategy.last_plan.records[0]} == {byte_dtype(dtype).name}


def test_send_carries_every_dtype_there_and_back():
    rng = np.random.default_rng(1)
    values = {dtype.name: [integers(rng, (3, 2), dtype) for _ in range(2)] for dtype in DTYPES}

    def rank(x):
        arrived = {}
        for name, value in x.items():
            if rank_id() == 0:
                send(value, 1, label=f"{name}/there")
                arrived[name] = receive([3, 2], value.dtype, 1, label=f"{name}/back")
            else:
                arrived[name] = receive([3, 2], value.dtype, 0, label=f"{name}/there")
                send(value, 0, label=f"{name}/back")
        return arrived

    results = run(strategy_on(2), rank, transposed(values))
    for name, (zero, one) in values.items():
        np.testing.assert_array_equal(results[0][name], one)
        np.testing.assert_array_equal(results[1][name], zero)


def test_messages_to_different_members():
    """Rank 0 sends to 2, then to 1; the pairs are groups of their own."""

    def rank(x):
        if rank_id() == 0:
            send(x, 2)
            send(10 * x, 1)
            return x
        return receive([2], tf.float32, 0)

    results = run(strategy_on(3), rank, [np.full((2,), 7, np.float32)] * 3)
    assert [result[0] for result in results] == [7, 70, 7]
