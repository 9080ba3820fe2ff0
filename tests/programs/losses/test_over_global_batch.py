"""`tfdist.losses.OverGlobalBatch`: losses that are no mean over rows, in `fit`, in custom steps and training loops."""

import warnings

import keras
import numpy as np
import pytest
import tensorflow as tf
from grids import exhaustive
from training import CLASSES, FEATURES, strategy_for, vectors

import tfdist
from tests.parity.comparison import BatchLogs, state
from tests.programs.comparing import SHARDED, assert_as_on_one_device

pytestmark = [pytest.mark.as_traced, pytest.mark.timeout(180), pytest.mark.usefixtures("float64")]

ops = keras.ops
OverGlobalBatch = tfdist.losses.OverGlobalBatch
ROWS, BATCH = 37, 12  # the last batch has 1 row
X, Y = vectors(ROWS)
ONE_HOT = np.eye(CLASSES)[Y]
WEIGHTS = np.linspace(0.2, 2.0, ROWS)


def root_of_the_mean(y_true, y_pred):
    return ops.sqrt(ops.mean(ops.square(y_true - y_pred)) + 0.1)


def masked_ratio(y_true, y_pred):
    kept = ops.cast(y_true[:, :1] + y_true[:, 1:2] > 0, y_pred.dtype)
    return ops.sum(kept * ops.square(y_true - y_pred)) / (ops.sum(kept) + 1e-3)


def contrast(one, other):
    """Each row of `one` belongs to that of `other`, of all in the batch (InfoNCE); a value for each row."""
    logits = ops.matmul(ops.normalize(one), ops.transpose(ops.normalize(other))) / 0.5
    return ops.sparse_categorical_crossentropy(ops.arange(ops.shape(logits)[0]), logits, from_logits=True)


def softmax_model():
    hidden = keras.layers.Dense(9, activation="tanh", activity_regularizer=keras.regularizers.L2(0.01))
    return keras.Sequential([keras.Input((FEATURES,)), hidden, keras.layers.Dense(CLASSES, "softmax")])


def fitted(loss, targets=ONE_HOT, weighted=False, build=softmax_model, **settings):
    def program(strategy):
        with strategy.scope():
            model = build()
            model.compile(keras.optimizers.Adam(0.01), loss(), metrics=["mae"] if targets is ONE_HOT else None, **settings)
        logs = BatchLogs()
        arrays = {"batch_size": BATCH, "verbose": 0, "sample_weight": WEIGHTS if weighted else None, "callbacks": [logs]}
        with warnings.catch_warnings():
            warnings.simplefilter("error", UserWarning)
            history = model.fit(X, targets, epochs=2, shuffle=False, **arrays).history
        evaluated = model.evaluate(X, targets, return_dict=True, **arrays)
        return {"history": history, "evaluated": evaluated, "train": logs.train, "test": logs.test, **state(model)}

    return program


def masked_sequences():
    """A loss of steps in time, some masked: the mask is gathered as well."""
    return keras.Sequential(
        [keras.Input((5, 3)), keras.layers.Masking(0.3), keras.layers.GRU(4, return_sequences=True), keras.layers.Dense(1)]
    )


def sequences(loss):
    x = np.round(X.reshape(ROWS, 5, 3)[:, :, :1] * 2).repeat(3, axis=2) * 0.3
    x[:, 1:][np.abs(x[:, 1:] - 0.3) > 1] = 0.3  # masked
    y = X[:, :5, None]

    def program(strategy):
        with strategy.scope():
            model = masked_sequences()
            model.compile(keras.optimizers.SGD(0.1), loss())
        history = model.fit(
            x, y, batch_size=BATCH, epochs=2, shuffle=False, verbose=0, sample_weight=np.tile(WEIGHTS[:, None], 5)
        ).history
        return {"history": history, **state(model)}

    return program


def two_outputs(strategy):
    """A dictionary of losses with weights, of which one is over the batch."""
    with strategy.scope():
        inputs = keras.Input((FEATURES,))
        hidden = keras.layers.Dense(9, activation="tanh")(inputs)
        outputs = {"kind": keras.layers.Dense(CLASSES, "softmax")(hidden), "number": keras.layers.Dense(1)(hidden)}
        model = keras.Model(inputs, outputs)
        losses = {"kind": OverGlobalBatch("dice"), "number": "mse"}
        model.compile("adam", losses, loss_weights={"kind": 2.0, "number": 0.5}, metrics={"kind": "accuracy"})
    targets = {"kind": ONE_HOT, "number": X[:, :1]}
    history = model.fit(X, targets, batch_size=BATCH, epochs=2, shuffle=False, verbose=0).history
    return {"history": history, **state(model)}


FITTED = {
    "dice": fitted(lambda: OverGlobalBatch(keras.losses.Dice())),
    "root": fitted(lambda: OverGlobalBatch(root_of_the_mean)),
    "weighted root": fitted(lambda: OverGlobalBatch(root_of_the_mean), weighted=True),
    "masked ratio": fitted(lambda: OverGlobalBatch(masked_ratio), steps_per_execution=2),
    "tversky": fitted(lambda: OverGlobalBatch(keras.losses.Tversky(0.3, 0.7)), run_eagerly=True),
    "circle": fitted(lambda: OverGlobalBatch(keras.losses.Circle(gamma=4.0)), targets=Y),
    "a sum": fitted(lambda: OverGlobalBatch(keras.losses.MeanSquaredError(reduction="sum")), weighted=True),
    "crossentropy": fitted(lambda: OverGlobalBatch(keras.losses.CategoricalCrossentropy()), weighted=True),
    "weights' mean": sequences(lambda: OverGlobalBatch(keras.losses.MeanSquaredError(reduction="mean_with_sample_weight"))),
    "masks": sequences(lambda: OverGlobalBatch("mse")),
    "two outputs": two_outputs,
}


@pytest.mark.parametrize("zero_stage", SHARDED)
@pytest.mark.parametrize("devices", [2, exhaustive(4)])
@pytest.mark.parametrize("name", [name if name == "weighted root" else exhaustive(name) for name in FITTED])
def test_in_fit(name, zero_stage, devices):
    assert_as_on_one_device(FITTED[name], zero_stage, devices)


class TwoTowers(keras.Model):
    """CLIP: both arguments of the loss are computed, and the temperature is learnt; in a step of one's own."""

    def __init__(self):
        super().__init__()
        self.towers = [keras.layers.Dense(4, activation="tanh", kernel_regularizer="l2") for _ in range(2)]
        for tower in self.towers:
            tower.build((None, FEATURES))
        self.temperature = self.add_weight(shape=(), initializer="ones", name="temperature")
        self.built = True
        self.contrast = OverGlobalBatch(contrast)
        self.tracker = keras.metrics.Mean(name="tracked")

    def loss_of(self, data):
        x = keras.utils.unpack_x_y_sample_weight(data)[0]
        one, other = (tower(x * factor) for tower, factor in zip(self.towers, (1.0, 0.8), strict=True))
        one = one * self.temperature
        both = self.contrast(one, other) + self.contrast(other, one)
        return both / 2 + ops.mean(ops.square(one)) + sum(self.losses), one

    def train_step(self, data):
        with tf.GradientTape() as tape:
            loss, _ = self.loss_of(data)
        self.optimizer.apply(tape.gradient(loss, self.trainable_variables), self.trainable_variables)
        self.tracker.update_state(loss)
        return {"loss": loss, "tracked": self.tracker.result()}

    def test_step(self, data):
        return {"loss": self.loss_of(data)[0]}


def stepping(**settings):
    def program(strategy):
        with strategy.scope():
            model = TwoTowers()
            model.compile(keras.optimizers.Adam(0.02, global_clipnorm=0.5), **settings)
        with warnings.catch_warnings():
            warnings.simplefilter("error", UserWarning)
            history = model.fit(X, batch_size=BATCH, epochs=2, shuffle=False, verbose=0).history
        batch = model.train_on_batch(X[:5], return_dict=True)
        return {"history": history, "evaluated": model.evaluate(X, batch_size=BATCH, verbose=0), "batch": batch, **state(model)}

    return program


STEPPING = {"traced": stepping(), "eager": stepping(run_eagerly=True), "several": stepping(steps_per_execution=3)}


@pytest.mark.exhaustive  # `test_over_workers` has one
@pytest.mark.parametrize("zero_stage", range(4))
@pytest.mark.parametrize("devices", [2, 3])
@pytest.mark.parametrize("name", STEPPING)
def test_in_a_step_of_ones_own(name, devices, zero_stage):
    assert_as_on_one_device(STEPPING[name], zero_stage, devices)


def loop(strategy):
    """A loop around `strategy.run`; then the loss outside of it."""
    with strategy.scope():
        model = softmax_model()
        optimizer = keras.optimizers.SGD(0.1, momentum=0.9)
        loss_of = OverGlobalBatch(masked_ratio)

    def step_on_rank(x, y):
        with tf.GradientTape() as tape:
            loss = loss_of(y, model(x, training=True))
        optimizer.apply(tape.gradient(loss, model.trainable_variables), model.trainable_variables)
        return loss

    @tf.function
    def step(x, y):
        return strategy.reduce("SUM", strategy.run(step_on_rank, args=(x, y)), axis=None)

    dataset = tf.data.Dataset.from_tensor_slices((X, ONE_HOT)).batch(BATCH)
    losses = [float(step(*batch)) for batch in strategy.experimental_distribute_dataset(dataset)]
    with strategy.scope():
        losses.append(float(loss_of(ONE_HOT, model(X))))
    return {"losses": losses, "weights": model.get_weights()}


@pytest.mark.parametrize("zero_stage", [0, *map(exhaustive, (1, 2, 3))])
def test_in_a_loop(zero_stage):
    assert_as_on_one_device(loop, zero_stage)


def test_it_is_saved_with_the_model(tmp_path):
    with strategy_for(2, 0).scope():
        model = softmax_model()
        model.compile("sgd", OverGlobalBatch(keras.losses.Dice(axis=-1), name="overlap"))
        model.save(tmp_path / "model.keras")
        loaded = keras.models.load_model(tmp_path / "model.keras")
    assert isinstance(loaded.loss, OverGlobalBatch) and loaded.loss.name == "overlap" and loaded.loss.loss.axis == -1
    by_name = OverGlobalBatch.from_config(OverGlobalBatch("mse").get_config())
    assert by_name.name == OverGlobalBatch("mse").name


def test_what_is_refused():
    with pytest.raises(ValueError, match="`loss` must be a Keras loss"):
        OverGlobalBatch(3)
    with pytest.raises(ValueError, match="`loss` must be a Keras loss"):
        OverGlobalBatch(keras.losses.Dice)
    with pytest.raises(ValueError, match="must return one number"):
        OverGlobalBatch(keras.losses.MeanSquaredError(reduction=None))
