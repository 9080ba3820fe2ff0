"""What stands around a pipeline in `fit`: callbacks, schedules, weights of samples and losses, frozen stages, saved models."""

import pathlib
import tempfile

import keras
import numpy as np
import pytest
import tensorflow as tf
from grids import exhaustive
from ranks import strategy_on
from training import one_device

import tfdist
from tests.parity.comparison import BatchLogs, assert_same_tree, state
from tests.programs.comparing import run

pytestmark = [pytest.mark.as_traced, pytest.mark.usefixtures("float64")]

layers, ops = keras.layers, keras.ops
_rng = np.random.default_rng(0)
ROWS = 44
X, Y, WEIGHTS = _rng.normal(size=(ROWS, 6)), _rng.integers(0, 3, ROWS), _rng.random(ROWS) + 0.2
TOKENS = _rng.integers(0, 9, (ROWS, 5))


def graph():
    features = keras.Input((6,))
    x = layers.Dense(8, "tanh", name="a")(features)
    x = layers.Dense(7, "tanh", name="b")(x)
    return keras.Model(features, layers.Dense(3, name="d")(layers.Dense(8, "tanh", name="c")(x)))


def crossentropy():
    return keras.losses.SparseCategoricalCrossentropy(from_logits=True)


def compiled(strategy, wraps, build=graph, optimizer=lambda: keras.optimizers.SGD(0.1, momentum=0.9), stages=None, **settings):
    """`wraps` are the pipeline's settings; None: the plain model."""
    with strategy.scope():
        model = build()
        if wraps is not None:
            model = tfdist.PipelineModel(model, num_microbatches=2, stages=stages, **wraps)
        model.compile(optimizer(), **{"loss": crossentropy(), **settings})
    return model


def fit(model, x=X, y=Y, **arguments):
    return model.fit(x, y, **{"batch_size": 8, "shuffle": False, "verbose": 0, **arguments}).history


def schedules_of_learning_rates(strategy, wraps):
    schedule = lambda: keras.optimizers.schedules.CosineDecay(0.1, 12, warmup_target=0.3, warmup_steps=3)  # noqa: E731
    model = compiled(strategy, wraps, optimizer=lambda: keras.optimizers.AdamW(schedule()))
    callback = keras.callbacks.LearningRateScheduler(lambda epoch: 0.05 / (1 + epoch))
    again = compiled(strategy, wraps, optimizer=lambda: keras.optimizers.Adam(0.1))
    history = fit(again, epochs=3, callbacks=[callback])
    return fit(model, epochs=2), state(model), history["learning_rate"], history["loss"], state(again)


def stops_early(strategy, wraps):
    """The best weights are put back; the learning rate falls on the way."""
    model = compiled(strategy, wraps, optimizer=lambda: keras.optimizers.SGD(3.0), metrics=["accuracy"])
    stop = keras.callbacks.EarlyStopping(monitor="val_loss", patience=2, restore_best_weights=True)
    plateau = keras.callbacks.ReduceLROnPlateau(monitor="val_loss", factor=0.3, patience=1)
    arguments = {"validation_data": (X[:13], Y[:13], WEIGHTS[:13]), "epochs": 9, "callbacks": [stop, plateau]}
    history = fit(model, sample_weight=WEIGHTS, **arguments)
    return history["val_loss"], history["val_accuracy"], history["learning_rate"], stop.stopped_epoch, state(model)


def checkpoints(strategy, wraps):
    """The best weights, and the last model, are saved; both go on elsewhere, the model on one device."""
    folder = pathlib.Path(tempfile.mkdtemp())
    model = compiled(strategy, wraps, optimizer=lambda: keras.optimizers.Adam(0.3))
    best = keras.callbacks.ModelCheckpoint(
        folder / "best.weights.h5", save_weights_only=True, save_best_only=True, monitor="loss"
    )
    last = keras.callbacks.ModelCheckpoint(folder / "last.keras")
    found = [fit(model, epochs=3, callbacks=[best, last])]
    alone = keras.models.load_model(folder / "last.keras")
    found += [alone.predict(X[:5], verbose=0), fit(alone)]
    model.load_weights(folder / "best.weights.h5")
    return found, fit(model), state(model)


def goes_on(strategy, wraps):
    """The first fit ends in its second epoch, the next goes on from the backup."""
    folder = tempfile.mkdtemp()

    def ends(epoch, logs):
        if epoch == 1:
            raise KeyboardInterrupt

    found = []
    for ending in ([keras.callbacks.LambdaCallback(on_epoch_begin=ends)], []):
        model = compiled(strategy, wraps, optimizer=lambda: keras.optimizers.Adam(0.05))
        try:
            found.append(fit(model, epochs=3, callbacks=[keras.callbacks.BackupAndRestore(folder), *ending])["loss"])
        except KeyboardInterrupt:
            found.append(model.get_weights())
    return found, state(model)


def boards_and_logs(strategy, wraps):
    """What callbacks write, and what they see of batches."""
    folder = pathlib.Path(tempfile.mkdtemp())
    model = compiled(strategy, wraps, metrics=["accuracy"])
    logs = BatchLogs()
    board = keras.callbacks.TensorBoard(folder / "board", histogram_freq=1, update_freq=2)
    callbacks = [board, keras.callbacks.CSVLogger(folder / "log.csv"), keras.callbacks.TerminateOnNaN(), logs]
    fit(model, epochs=2, validation_split=0.25, callbacks=callbacks)
    rows = [[float(cell) for cell in line.split(",")] for line in (folder / "log.csv").read_text().splitlines()[1:]]
    assert list((folder / "board").rglob("events*"))
    return np.array(rows), logs.train, logs.test, state(model)


def averages(strategy, wraps):
    optimizer = lambda: keras.optimizers.AdamW(0.1, use_ema=True, ema_momentum=0.8, ema_overwrite_frequency=3)  # noqa: E731
    model = compiled(strategy, wraps, optimizer=optimizer)
    other = compiled(strategy, wraps, optimizer=lambda: keras.optimizers.SGD(0.1, use_ema=True, ema_momentum=0.8))
    swapping = keras.callbacks.SwapEMAWeights(swap_on_epoch=True)
    found = fit(other, epochs=2, validation_data=(X[:9], Y[:9]), callbacks=[swapping])
    return fit(model, epochs=2), state(model), found, state(other)


def tied():
    tokens = keras.Input((5,), dtype="int32")
    table = layers.ReversibleEmbedding(9, 6, name="table", embeddings_regularizer="l2")
    x = layers.Dense(6, "tanh", name="middle")(table(tokens))
    return keras.Model(tokens, table(layers.LayerNormalization()(x), reverse=True))


def frozen_tied_table(strategy, wraps):
    """A weight of two stages: trained, frozen, trained again."""
    model, found = compiled(strategy, wraps, tied), []
    for trains in (True, False, True):
        model.get_layer("table").trainable = trains
        with strategy.scope():
            model.compile(keras.optimizers.Adam(0.05, clipnorm=0.5), crossentropy())
        found.append(fit(model, TOKENS, TOKENS[:, ::-1]))
    return found, state(model)


def frozen_first_stage(strategy, wraps):
    """Fine-tuning: the first stage has nothing to train, then its statistics stand still, too, then it trains."""

    def build():
        features = keras.Input((6,))
        x = layers.BatchNormalization(name="norm")(layers.Dense(8, "tanh", name="a")(features))
        return keras.Model(features, layers.Dense(3, name="d")(layers.Dense(7, "tanh", name="c")(x)))

    model, found = compiled(strategy, wraps, build, stages=["c"]), []
    model.get_layer("norm").trainable = False
    for trains in (False, True):
        model.get_layer("a").trainable = trains
        with strategy.scope():
            model.compile(keras.optimizers.AdamW(0.05, global_clipnorm=0.3), crossentropy(), metrics=["accuracy"])
        found.append(fit(model, sample_weight=WEIGHTS))
    return found, state(model)


def frozen_last_stage(strategy, wraps):
    model = compiled(strategy, wraps, stages=["c"])
    model.get_layer("c").trainable = model.get_layer("d").trainable = False
    with strategy.scope():
        model.compile(keras.optimizers.Adam(0.05), crossentropy())
    return fit(model), state(model)


def several_of_all(strategy, wraps):
    """Inputs and outputs by name, weights of losses and of samples for each, metrics of each."""

    def build():
        a, b = keras.Input((6,), name="a"), keras.Input((2,), name="b")
        x = layers.Concatenate()([layers.Dense(7, "tanh")(a), b])
        x = layers.Dense(8, "tanh")(x)
        return keras.Model({"a": a, "b": b}, {"kind": layers.Dense(3, name="kind")(x), "size": layers.Dense(1, name="size")(x)})

    model = compiled(
        strategy,
        wraps,
        build,
        loss={"kind": crossentropy(), "size": keras.losses.Huber()},
        loss_weights={"kind": 0.7, "size": 2.0},
        weighted_metrics={"kind": ["accuracy"], "size": ["mae"]},
    )
    x, y = {"a": X, "b": X[:, :2]}, {"kind": Y, "size": X[:, :1] ** 2}
    weights = {"kind": WEIGHTS, "size": WEIGHTS[::-1] ** 2}
    found = fit(model, x, y, sample_weight=weights, epochs=2)
    evaluated = model.evaluate(x, y, sample_weight=weights, batch_size=9, verbose=0, return_dict=True)
    few = {name: value[:7] for name, value in x.items()}
    logs = model.train_on_batch(few, {name: value[:7] for name, value in y.items()}, return_dict=True)
    return found, evaluated, model.predict(few, batch_size=3, verbose=0), {k: float(v) for k, v in logs.items()}, state(model)


def compiled_again(strategy, wraps):
    """Other losses, optimizers and metrics of the same model, and epochs that go on."""
    model = compiled(strategy, wraps, metrics=["accuracy"])
    found = [fit(model)]
    for optimizer, loss in ((keras.optimizers.Lion(0.01), "mse"), (keras.optimizers.RMSprop(0.01), crossentropy())):
        with strategy.scope():
            model.compile(optimizer, loss, metrics=["mae"] if loss == "mse" else [])
        y = np.eye(3)[Y] if loss == "mse" else Y
        found.append((fit(model, y=y, epochs=3, initial_epoch=1), model.evaluate(X, y, batch_size=9, verbose=0)))
    return found, state(model)


def generated(strategy, wraps):
    """Data of a generator and of a `PyDataset`, with weights; and a dataset with class weights."""

    class Data(keras.utils.PyDataset):
        def __len__(self):
            return 4

        def __getitem__(self, k):
            return X[8 * k : 8 * k + 7], Y[8 * k : 8 * k + 7], WEIGHTS[8 * k : 8 * k + 7]

    model = compiled(strategy, wraps, weighted_metrics=["accuracy"])
    found = [model.fit(Data(), epochs=2, shuffle=False, verbose=0).history]
    dataset = tf.data.Dataset.from_tensor_slices((X, Y)).batch(9)
    found.append(model.fit(dataset, class_weight={0: 2.0, 1: 0.5, 2: 1.0}, validation_data=dataset, verbose=0).history)
    batches = (batch for batch in [(X[:8], Y[:8]), (X[8:16], Y[8:16])])
    # At the end of data of unknown length one device may count a step that it has not taken.
    found.append(model.fit(batches, steps_per_epoch=2, verbose=0).history)
    return found, state(model)


def prepared(strategy, wraps):
    """Layers that have seen the data before: normalization, a vocabulary; and one with a constraint and a mask."""

    def build():
        features, words = keras.Input((6,)), keras.Input((5,), dtype="int64")
        norm, lookup = layers.Normalization(), layers.IntegerLookup()
        norm.adapt(X)
        lookup.adapt(TOKENS)
        x = layers.Embedding(12, 6, mask_zero=True, embeddings_constraint="unit_norm")(lookup(words))
        x = layers.Concatenate()([layers.GlobalAveragePooling1D()(x), norm(features)])
        return keras.Model([features, words], layers.Dense(3)(layers.Dense(7, "relu")(x)))

    model = compiled(strategy, wraps, build)
    return fit(model, [X, TOKENS]), state(model), model.evaluate([X, TOKENS], Y, batch_size=9, verbose=0)


def half_precision(strategy, wraps):
    """The loss scale falls where two rows of two batches overflow, in one microbatch of one data rank; no weight moves there."""

    def build():
        policy = keras.DTypePolicy("mixed_float16")
        features = keras.Input((6,))
        x = layers.Dense(8, "tanh", dtype=policy)(features)
        return keras.Model(features, layers.Dense(3, dtype=policy)(layers.Dense(7, dtype=policy)(x)))

    def optimizer():
        inner = keras.optimizers.SGD(0.05, global_clipnorm=0.5)
        return keras.optimizers.LossScaleOptimizer(inner, initial_scale=2.0**12, dynamic_growth_steps=3)

    model = compiled(strategy, wraps, build, optimizer)
    scales, moves, before = [], [], [model.get_weights()]

    def note(batch, logs):
        scales.append(float(model.optimizer.dynamic_scale))
        before.append(model.get_weights())
        moves.append(any((one != other).any() for one, other in zip(*before[-2:], strict=True)))

    weights = np.where(np.isin(np.arange(ROWS), (5, 18)), 1e5, WEIGHTS)
    fit(model, sample_weight=weights, epochs=2, callbacks=[keras.callbacks.LambdaCallback(on_train_batch_end=note)])
    assert moves[:6] == [False, True, False, True, True, True] and scales[5] > scales[4], (moves, scales)
    return scales, moves


def accumulates(strategy, wraps):
    """Optimizers that keep gradients, and those that look at whole ones."""
    found = []
    for optimizer in (
        lambda: keras.optimizers.AdamW(0.05, gradient_accumulation_steps=2, global_clipnorm=0.2),
        lambda: keras.optimizers.Lamb(0.05, clipnorm=0.1),
        lambda: keras.optimizers.Adafactor(0.05),
    ):
        model = compiled(strategy, wraps, tied, optimizer)
        found.append((fit(model, TOKENS, TOKENS[:, ::-1]), model.get_weights()))
    return found


PROGRAMS = [
    exhaustive(accumulates),
    exhaustive(schedules_of_learning_rates),
    exhaustive(stops_early),
    exhaustive(checkpoints),
    exhaustive(goes_on),
    exhaustive(boards_and_logs),
    exhaustive(averages),
    exhaustive(frozen_tied_table),
    exhaustive(frozen_first_stage),
    frozen_last_stage,
    exhaustive(several_of_all),
    exhaustive(compiled_again),
    exhaustive(generated),
    exhaustive(prepared),
    exhaustive(half_precision),
]

# (data ranks, ZeRO stage, settings of the pipeline)
WAYS = [
    (1, 0, {}),
    exhaustive(2, 3, {"reshard_after_microbatch": True}),
    exhaustive(2, 3, {}),
    exhaustive(2, 2, {"recompute": True}),
]


@pytest.mark.parametrize(("data", "zero_stage", "wraps"), WAYS)
@pytest.mark.parametrize("program", PROGRAMS)
def test_it_is_one_device(program, data, zero_stage, wraps):
    strategy = strategy_on(2 * data, pipeline_parallel_size=2, zero_stage=zero_stage)
    found = run(lambda strategy: program(strategy, wraps), strategy)
    assert_same_tree(found, run(lambda strategy: program(strategy, None), one_device()), program.__name__)
