"""The share of each rank: its value, its gradient, its messages, and where Keras is left alone."""

import keras
import numpy as np
import pytest
import tensorflow as tf
from grids import exhaustive
from training import CLASSES, FEATURES, one_device, small, strategy_for, vectors

from tfdist.losses.global_losses import keras_loss

pytestmark = pytest.mark.timeout(120)

SPLITS = pytest.mark.parametrize("rows", [(5, 3), (4, 0), (0, 4), (0, 0), (2, 0, 5), (0, 1, 0, 6)], ids=str)
MEANS = pytest.mark.parametrize("reduction", ["sum_over_batch_size", "mean", "mean_with_sample_weight"])


def on_ranks(strategy, function, *arrays, rows):
    """Returns what `function` gives on each rank, called with the rank's rows: of static shape, other on every rank."""
    ends = np.cumsum(rows)

    def part(array):
        return strategy.experimental_distribute_values_from_function(
            lambda context: tf.constant(np.split(array, ends)[context.replica_id_in_sync_group])
        )

    step = tf.function(lambda *parts: strategy.run(function, args=parts))
    results = step(*map(part, arrays))
    return tf.nest.map_structure(lambda x: [one.numpy() for one in strategy.experimental_local_results(x)], results)


def examples(rows):
    rng = np.random.default_rng(11)
    count = sum(rows)
    x = rng.normal(size=(count, FEATURES)).astype("float32")
    weights = rng.uniform(0.0, 3.0, size=count).astype("float32")
    return x, rng.integers(0, CLASSES, size=count), weights


@SPLITS
@MEANS
def test_shares_and_gradients_add_up(rows, reduction):
    """What a training loop of one's own may rely on; with static shapes, and ranks without examples."""
    loss_of = keras.losses.SparseCategoricalCrossentropy(from_logits=True, reduction=reduction)
    kernel = tf.constant(np.random.default_rng(2).normal(size=(FEATURES, CLASSES)).astype("float32"))

    def share(x, labels, weights):
        with tf.GradientTape() as tape:
            tape.watch(kernel)
            loss = loss_of(labels, x @ kernel, sample_weight=weights)
        return loss, tape.gradient(loss, kernel)

    expected = share(*map(tf.constant, examples(rows)))
    if sum(rows) == 0:  # Keras returns no scalar then
        expected = (tf.zeros([]), tf.zeros_like(kernel))
    actual = on_ranks(strategy_for(len(rows), 2), share, *examples(rows), rows=rows)
    for parts, whole in zip(actual, expected, strict=True):
        assert all(part.shape == whole.shape for part in parts)
        np.testing.assert_allclose(sum(parts), whole, rtol=1e-5, atol=1e-6)
        for part, count in zip(parts, rows, strict=True):
            assert count > 0 or not part.any()


@MEANS
@pytest.mark.parametrize("inner", [(), (3,), (3, 1)], ids=str)
def test_masks_that_are_broadcast(reduction, inner):
    """The mask of `(batch,)`, `(batch, 3)` or `(batch, 3, 1)` over values of `(batch,)` or `(batch, 3)`."""
    rows = (5, 1)
    rng = np.random.default_rng(3)
    values = rng.normal(size=(6, *inner[:1])).astype("float32")
    mask = rng.uniform(size=(6, *inner)) < 0.5
    mask[:1] = True
    mask[5:] = False
    weights = rng.uniform(size=(6, *inner[:1])).astype("float32")

    def share(values, mask, weights):
        return [
            keras_loss.reduce_weighted_values(values, None, mask, reduction),
            keras_loss.reduce_weighted_values(values, weights, mask, reduction),
            keras_loss.reduce_weighted_values(values, weights, None, reduction),
        ]

    expected = share(*map(tf.constant, (values, mask, weights)))
    for parts, whole in zip(on_ranks(strategy_for(2, 2), share, values, mask, weights, rows=rows), expected, strict=True):
        np.testing.assert_allclose(sum(parts), whole, rtol=1e-5)


def test_a_mask_of_fewer_elements_than_values():
    """Keras scales by total/valid of the mask and divides by the number of values, which are not the same here."""
    rows = (3, 1)
    values = np.arange(1.0, 21.0, dtype="float32").reshape(4, 5)
    mask = np.array([[True], [False], [True], [True]])

    def share(values, mask):
        return keras_loss.reduce_weighted_values(values, None, mask)

    expected = share(*map(tf.constant, (values, mask)))
    np.testing.assert_allclose(expected, values[[0, 2, 3]].mean(), rtol=1e-6)
    np.testing.assert_allclose(sum(on_ranks(strategy_for(2, 2), share, values, mask, rows=rows)), expected, rtol=1e-6)


def test_weights_that_a_model_computes_have_their_gradient():
    """`mean_with_sample_weight` divides by the weights' sum over all ranks, and every rank's weights move it."""
    rows = (4, 1, 2)
    loss_of = keras.losses.MeanSquaredError(reduction="mean_with_sample_weight")
    x, _, weights = examples(rows)
    power = tf.constant(0.7)

    def share(x, weights):
        with tf.GradientTape() as tape:
            tape.watch(power)
            loss = loss_of(tf.zeros_like(x), x, sample_weight=weights**power)
        return tape.gradient(loss, power)

    expected = share(tf.constant(x), tf.constant(weights))
    assert abs(expected) > 1e-3
    np.testing.assert_allclose(sum(on_ranks(strategy_for(3, 2), share, x, weights, rows=rows)), expected, rtol=1e-5)


@pytest.mark.parametrize("dtype", ["float16", "bfloat16"])
def test_half_precision_counts_in_float32(dtype):
    """80000 values: their number is beyond float16, and bfloat16 stops counting at 256."""
    values = np.ones((8, 10000), "float32")
    loss_of = keras.losses.Loss(dtype=dtype)
    loss_of.call = lambda truth, predicted: predicted * tf.cast(1.5, dtype)
    parts = on_ranks(strategy_for(2, 2), lambda x: loss_of(x, x), values, rows=(6, 2))
    assert all(part.dtype == dtype for part in parts)
    np.testing.assert_allclose([float(part) for part in parts], [1.5 * 6 / 8, 1.5 * 2 / 8], rtol=1e-2)


def test_what_is_logged_is_the_global_loss_on_every_rank():
    def logged(values):
        share = keras_loss.reduce_weighted_values(values)
        return keras_loss.unscale_loss_for_distribution(share), keras_loss.unscale_loss_for_distribution(values)

    values = np.array([1.0, 2.0, 4.0, 8.0, 16.0], "float32")
    for parts in on_ranks(strategy_for(3, 2), logged, values, rows=(4, 0, 1)):
        np.testing.assert_allclose(parts, [values.mean()] * 3, rtol=1e-6)


def test_what_is_logged_has_no_gradient():
    def slope(x):
        with tf.GradientTape() as tape:
            tape.watch(x)
            logged = keras_loss.unscale_loss_for_distribution(tf.reduce_sum(x))
        return tape.gradient(logged, x, unconnected_gradients="zero")

    assert not np.any(on_ranks(strategy_for(2, 2), slope, np.ones(4, "float32"), rows=(2, 2)))


# The messages of a step


def compiled(strategy, build=small, loss="mse", **arguments):
    with strategy.scope():
        model = build()
        model.compile(keras.optimizers.SGD(0.1), loss=loss, **arguments)
    return model


def small_messages(strategy):
    """Returns (label, elements) of rank 0's messages for losses, having checked that every rank sends the same."""
    messages = [
        [(record.label, record.shape) for record in records if record.label.startswith("loss/")]
        for records in strategy.last_plan.records
    ]
    assert all(theirs == messages[0] for theirs in messages)
    return messages[0]


DIVISOR, ROWS = ("loss/divisor", (1,)), ("loss/rows", ())
# In a step of Keras's trainer the first message counts the rows, too.
DIVISOR_AND_ROWS, MASKED_AND_ROWS = ("loss/divisor", (2,)), ("loss/divisor", (4,))


@pytest.mark.parametrize(
    ("devices", "zero_stage"), [(2, 0), exhaustive(3, 0), exhaustive(2, 2), (3, 2), (2, 3), exhaustive(3, 3)]
)
def test_messages_of_fit_and_evaluate(devices, zero_stage):
    strategy = strategy_for(devices, zero_stage)
    model = compiled(strategy, metrics=["mae"])
    x, y = vectors(24)[0], np.eye(CLASSES)[vectors(24)[1]]
    model.fit(x, y, batch_size=12, verbose=0)
    assert small_messages(strategy) == [DIVISOR_AND_ROWS]
    trained = strategy.last_plan.counts()
    model.evaluate(x, y, batch_size=12, verbose=0)
    assert small_messages(strategy) == [DIVISOR_AND_ROWS]
    assert strategy.last_plan.counts()["all_reduce"] == 1
    # Beside one all-reduce of the gradients at stage 0.
    assert trained["all_reduce"] == (2 if zero_stage == 0 else 1)


def test_messages_of_other_losses():
    x = vectors(12)[0]
    targets = [x[:, :CLASSES], x[:, :CLASSES]]

    def two_outputs():
        inputs = keras.Input((FEATURES,))
        return keras.Model(inputs, [keras.layers.Dense(CLASSES)(inputs) for _ in range(2)])

    def masked():
        return keras.Sequential([keras.Input((FEATURES, 1)), keras.layers.Masking(), keras.layers.Dense(1)])

    strategy = strategy_for(2, 2)
    compiled(strategy, two_outputs, ["mse", "mae"]).fit(x, targets, batch_size=12, verbose=0)
    assert small_messages(strategy) == [DIVISOR_AND_ROWS, DIVISOR]
    compiled(strategy, masked).fit(x[..., None], x[..., None], batch_size=12, verbose=0)
    assert small_messages(strategy) == [MASKED_AND_ROWS]
    compiled(strategy, loss=keras.losses.MeanSquaredError(reduction="sum")).fit(x, targets[0], batch_size=12, verbose=0)
    assert small_messages(strategy) == [ROWS]
    compiled(strategy).predict(x, verbose=0)
    assert small_messages(strategy) == []


def test_sums_in_a_loop_of_ones_own_send_nothing():
    strategy = strategy_for(2, 2)
    loss_of = keras.losses.MeanSquaredError(reduction="sum")
    on_ranks(strategy, lambda x: loss_of(x, 2 * x), np.ones((4, 3), "float32"), rows=(2, 2))
    assert strategy.last_plan.counts() == {}


# Inside the function of `strategy.run`


def test_losses_in_branches_and_nested_functions():
    loss_of = keras.losses.MeanSquaredError()
    x = np.arange(12.0, dtype="float32").reshape(4, 3)
    expected = float(loss_of(np.zeros_like(x), x))
    nested = tf.function(lambda x: loss_of(tf.zeros_like(x), x))

    def branch(x):
        return tf.cond(tf.constant(True), lambda: loss_of(tf.zeros_like(x), x), lambda: tf.zeros([]))

    for share in (nested, branch):
        parts = on_ranks(strategy_for(2, 2), share, x, rows=(3, 1))
        np.testing.assert_allclose(sum(parts), expected, rtol=1e-6)


def test_a_loss_in_a_loop_is_an_error():
    """No silent mean of means."""
    loss_of = keras.losses.MeanSquaredError()

    def share(x):
        return tf.map_fn(lambda row: loss_of(tf.zeros_like(row[None]), row[None]), x)

    with pytest.raises(RuntimeError, match="loop.*inside the function"):
        on_ranks(strategy_for(2, 2), share, np.ones((4, 3), "float32"), rows=(2, 2))


# Where Keras is left alone


def shares_of(strategy):
    def share(x):
        return keras.losses.MeanSquaredError()(tf.zeros_like(x), x), keras_loss.unscale_loss_for_distribution(tf.constant(3.0))

    x = np.arange(12.0, dtype="float32").reshape(4, 3)
    return on_ranks(strategy, share, x, rows=(3, 1))


def test_other_strategies(cpus, monkeypatch):
    ours = shares_of(tf.distribute.MirroredStrategy(cpus[:2]))
    for name in ("reduce_weighted_values", "scale_loss_for_distribution", "unscale_loss_for_distribution"):
        monkeypatch.setattr(keras_loss, name, getattr(keras_loss, name)._tfdist_original)
    np.testing.assert_array_equal(ours, shares_of(tf.distribute.MirroredStrategy(cpus[:2])))


def test_one_rank(monkeypatch):
    strategy = strategy_for(1, 2)
    parts = [np.ones((4, 3), "float32")]
    loss, logged = tf.function(
        lambda x: strategy.run(
            lambda x: (keras.losses.MeanSquaredError()(0 * x, x), keras_loss.unscale_loss_for_distribution(3.0)), args=(x,)
        )
    )(*parts)
    assert (float(loss), float(logged)) == (1.0, 3.0)
    assert strategy.last_plan.counts() == {}


def test_eager_and_cross_replica():
    x = np.ones((4, 3), "float32")
    loss_of = keras.losses.MeanSquaredError()
    assert float(loss_of(0 * x, x)) == 1.0
    with strategy_for(2, 2).scope():
        # Keras divides by the number of ranks.
        assert float(loss_of(0 * x, x)) == 1.0
        assert float(tf.function(lambda: loss_of(0 * x, x))()) == 1.0
        assert float(keras_loss.unscale_loss_for_distribution(tf.constant(0.5))) == 0.5


class LossInside(keras.layers.Layer):
    """Computes a loss in `call`, which Keras traces symbolically while it builds the model."""

    def call(self, x):
        self.add_loss(keras.losses.MeanSquaredError()(tf.zeros_like(x), x))
        return x


def test_symbolic_build_inside_the_step():
    strategy = strategy_for(2, 2)
    with strategy.scope():
        model = keras.Sequential([keras.layers.Dense(2), LossInside()])

    def share(x):
        model(x)
        return sum(model.losses)

    x = np.ones((4, 3), "float32")
    parts = on_ranks(strategy, share, x, rows=(3, 1))
    assert small_messages(strategy) == [DIVISOR]
    np.testing.assert_allclose(sum(parts), tf.reduce_mean(model(x) ** 2), rtol=1e-6)


def test_an_even_batch_is_as_it_was():
    """`small` on batches that divide: the shares are Keras's scaled means."""
    strategy, plain = strategy_for(2, 2), one_device()
    results = []
    for one in (strategy, plain):
        keras.utils.set_random_seed(1)
        model = compiled(one, small)
        x = vectors(24)[0]
        results.append(model.fit(x, x[:, :CLASSES], batch_size=12, verbose=0, shuffle=False).history["loss"])
    np.testing.assert_allclose(*results, rtol=1e-6)
