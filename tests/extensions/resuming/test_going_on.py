"""A `fit` that fails and is started again ends as if nothing had happened: every kind of data, of schedule, of failure.

The restarts are in this process; test_restart.py ends processes.
"""

import time
import warnings

import keras
import numpy as np
import pytest
import tensorflow as tf
from grids import exhaustive

import tfdist
from tests.checkpoint.failing_fits import (
    BATCH,
    EPOCHS,
    ROWS,
    Fail,
    Failed,
    X,
    Y,
    arrays,
    assert_goes_on,
    assert_same,
    dataset,
    processes,
    program,
    rows,
    train,
)
from tests.devices import names

pytestmark = [pytest.mark.as_traced, pytest.mark.timeout(300)]


@pytest.fixture
def process(monkeypatch):
    with processes(monkeypatch) as begin:
        yield begin


# Data, as arguments of `fit`


def of_unknown_length(data):
    return data.shuffle(ROWS).batch(BATCH).filter(lambda x, y: True)


def parts():
    def own(context):
        return rows().shuffle(ROWS).batch(BATCH // context.num_replicas_in_sync)

    return {"x": program().model._distribute_strategy.distribute_datasets_from_function(own)}


def distributed():
    return {"x": program().model._distribute_strategy.experimental_distribute_dataset(rows().shuffle(ROWS).batch(BATCH))}


class Batches(keras.utils.PyDataset):
    """Batches of rows that are shuffled anew when an epoch ends, with noise."""

    def __init__(self, noise=1, **arguments):
        super().__init__(**arguments)
        self.noise = noise
        self.order, self.rng = np.arange(ROWS), np.random.default_rng(5)

    def __len__(self):
        return ROWS // BATCH

    def __getitem__(self, index):
        chosen = self.order[index * BATCH :][:BATCH]
        return X[chosen] + self.noise * np.random.normal(size=(BATCH, 1)).astype("float32"), Y[chosen]

    def on_epoch_end(self):
        self.rng.shuffle(self.order)


def generator():
    def batches():
        rng = np.random.default_rng(3)
        while True:
            chosen = rng.permutation(ROWS)[:BATCH]
            yield X[chosen], Y[chosen]

    return {"x": batches(), "steps_per_epoch": 5}


def from_generator():
    def batches():
        for _ in range(5):
            chosen = np.random.permutation(ROWS)[:BATCH]
            yield X[chosen], Y[chosen]

    spec = (tf.TensorSpec((None, 6), tf.float32), tf.TensorSpec((None,), tf.int64))
    return {"x": tf.data.Dataset.from_generator(batches, output_signature=spec)}


def with_keras_augmentation():
    layer = keras.layers.GaussianNoise(0.1, seed=3)
    return {"x": rows().batch(BATCH).map(lambda x, y: (layer(x, training=True), y))}


def with_validation_of_a_generator():
    return {**arrays()(), "validation_data": generator()["x"], "validation_steps": 2}


def with_validation():
    return {**arrays()(), "validation_data": rows().shuffle(ROWS).batch(BATCH), "validation_steps": 2}


DATA = {
    "arrays": arrays(),
    "arrays, shuffled batches": arrays(shuffle="batch"),
    "arrays with weights": arrays(sample_weight=np.linspace(0.5, 1.5, ROWS).astype("float32"), validation_split=0.2),
    "arrays with class weights": arrays(class_weight={0: 1.0, 1: 2.0, 2: 0.5}),
    "arrays, a partial batch": arrays(batch_size=3),
    "shuffled rows": dataset(lambda data: data.shuffle(ROWS).batch(BATCH)),
    "shuffled rows, a partial batch": dataset(lambda data: data.shuffle(8).batch(3)),
    "shuffled before repeat": dataset(lambda data: data.shuffle(ROWS).batch(BATCH).repeat(), steps_per_epoch=4),
    "repeated in the epoch": dataset(lambda data: data.shuffle(ROWS).repeat(2).batch(8)),
    "shuffled twice": dataset(lambda data: data.shuffle(ROWS).batch(BATCH).shuffle(3)),
    "cached, then shuffled": dataset(lambda data: data.cache().shuffle(ROWS).batch(BATCH)),
    "shuffled, then cached": dataset(lambda data: data.shuffle(ROWS).cache().batch(BATCH)),
    "the same order": dataset(lambda data: data.shuffle(ROWS, reshuffle_each_iteration=False).batch(BATCH)),
    "random in a map": dataset(lambda data: data.batch(BATCH).map(lambda x, y: (x + tf.random.normal([BATCH, 6]), y))),
    "interleaved": dataset(
        lambda data: tf.data.Dataset.range(5).shuffle(5).interleave(lambda i: data.skip(4 * i).take(4), 2).batch(BATCH)
    ),
    "concatenated": dataset(lambda data: data.take(8).shuffle(8).concatenate(data.skip(8).shuffle(12)).batch(BATCH)),
    "of unknown length": dataset(of_unknown_length),
    "augmented by Keras": with_keras_augmentation,
    "distributed": distributed,
    "of a function": parts,
    "PyDataset": lambda: {"x": Batches()},
    "PyDataset in order": lambda: {"x": Batches(), "shuffle": False},
    "PyDataset, threads": lambda: {"x": Batches(noise=0, workers=2)},
    "generator": generator,
    "from_generator": from_generator,
    "validation": with_validation,
    "validation of a generator": with_validation_of_a_generator,
}
IN_EVERY_RUN = ["shuffled rows", "of unknown length", "PyDataset"]


# Failures, schedules and callbacks


@pytest.mark.parametrize(
    ("fails", "save_freq"),
    [
        exhaustive([(1, "begin"), (2, 0)], 1),
        ([(1, 4), (1, "validation")], 5),
        exhaustive([(0, 0), (0, 1), (0, 4), (1, "end")], 1),
        exhaustive([(0, "validation"), (2, "validation"), (2, "validation")], 5),
        exhaustive([(1, "end"), (2, "end"), (2, "over")], 3),
        exhaustive([(1, 2), (2, "over")], "epoch"),
        exhaustive([(2, 4), (2, "over")], 7),
    ],
    ids=str,
)
def test_the_moment_of_the_failure(fails, save_freq, tmp_path):
    assert_goes_on(program(), DATA["validation"], tmp_path / "backup", fails, save_freq)


def schedulers():
    return [
        keras.callbacks.LearningRateScheduler(lambda epoch, rate: rate * 0.7),
        keras.callbacks.ReduceLROnPlateau(monitor="loss", factor=0.5, patience=1, min_delta=10.0),
        keras.callbacks.EarlyStopping(monitor="loss", patience=1, min_delta=10.0, restore_best_weights=True),
    ]


@pytest.mark.parametrize("save_freq", [2, exhaustive("epoch")])
def test_callbacks_that_know_the_epochs_before(save_freq, tmp_path):
    """The rate is lowered in each epoch and on a plateau, training ends early, and the best weights are the first epoch's."""
    fails = [(1, 0), (1, 3)]
    assert_goes_on(program(), DATA["arrays"], tmp_path / "backup", fails, save_freq, schedulers, first=1)


class Evaluates(keras.callbacks.Callback):
    """Evaluates data that are not those of the validation, when an epoch begins."""

    def on_epoch_begin(self, epoch, logs=None):
        self.model.evaluate(X, Y, batch_size=10, verbose=0)


def test_a_callback_that_evaluates(tmp_path):
    """What it read was taken for the validation's data, which began anew."""
    assert_goes_on(program(), DATA["validation"], tmp_path / "backup", [(1, 2)], callbacks=lambda: [Evaluates()], first=1)


class Noting(keras.callbacks.BackupAndRestore):
    """A class of the user's."""

    saved = ()

    def _save_model(self):
        super()._save_model()
        self.saved = *self.saved, self._current_epoch


def test_a_class_of_the_users(tmp_path):
    """Its methods are called before those of a backup under a strategy, and it is what it was when `fit` is over."""
    made, backup = program(), Noting(tmp_path / "backup", save_freq=2)
    assert train(made, DATA["arrays"], [backup], (1, 3)) is None
    assert backup.saved == (0, 0, 1, 1)
    assert train(made, DATA["arrays"], [backup]).epoch == [1, 2]
    assert backup.saved[4:] and set(backup.saved[4:]) <= {1, 2} and type(backup) is Noting


@pytest.mark.parametrize("append", [False, exhaustive(True)])
def test_the_log_has_a_row_of_each_epoch(append, process, tmp_path):
    """Also where an epoch is over, and its backup is of a step of it; and when all are."""
    made, log = program(), tmp_path / "log.csv"

    def logger():
        return [keras.callbacks.CSVLogger(log, append=append)]

    train(made, DATA["arrays"], logger())
    before = log.read_text().splitlines()
    process("a")
    for fails in [(1, 0), (1, "begin"), (1, "end"), None, None]:
        train(made, DATA["arrays"], [*logger(), keras.callbacks.BackupAndRestore(tmp_path / "backup", save_freq=5)], fails)
        process("a")
    rows = before[1:]
    assert log.read_text().splitlines() == [before[0], *(rows if append else []), *rows]


@pytest.mark.parametrize(
    "arguments",
    [
        {"zero_stage": 3, "steps_per_execution": 2},
        exhaustive({"zero_stage": 1, "steps_per_execution": 4}),
        exhaustive({"zero_stage": 2, "steps_per_execution": 3}),
        exhaustive({"zero_stage": 0, "run_eagerly": True}),
    ],
    ids=str,
)
def test_programs(arguments, tmp_path):
    step = arguments.get("steps_per_execution", 2) - 1
    data = DATA["shuffled rows, a partial batch"]
    assert_goes_on(program(**arguments), data, tmp_path / "backup", [(1, step), (2, 2 * step + 1)])


class Subclassed(keras.Model):
    """What Keras builds in the first step, of a model whose step is its own or eager."""

    def __init__(self):
        super().__init__()
        self.tower = [keras.layers.Dense(5), keras.layers.Dropout(0.3), keras.layers.Dense(3)]

    def call(self, x, training=False):
        for layer in self.tower:
            x = layer(x, training=training) if isinstance(layer, keras.layers.Dropout) else layer(x)
        return x


class OwnStep(Subclassed):
    def train_step(self, data):
        return {**super().train_step(data), "extra": tf.reduce_sum(tf.cast(data[1], tf.float32))}


def fresh(build, run_eagerly, callbacks):
    """Trains a model that is made anew, as in a new process; returns its history, None if it failed, and its values."""
    keras.utils.set_random_seed(4)
    with tfdist.ShardedStrategy(names(2), zero_stage=3).scope():
        model = build()
        loss = keras.losses.SparseCategoricalCrossentropy(from_logits=True)
        model.compile(keras.optimizers.Adam(0.01), loss, metrics=["accuracy"], run_eagerly=run_eagerly)
    try:
        data = rows().shuffle(ROWS).batch(10)
        history = model.fit(data, epochs=2, verbose=0, callbacks=callbacks).history
    except Failed:
        history = None
    return history, [variable.numpy() for variable in [*model.variables, *model.optimizer.variables]]


@pytest.mark.parametrize(
    ("build", "run_eagerly"), [(OwnStep, False), exhaustive(Subclassed, True), exhaustive(Subclassed, False)], ids=str
)
def test_a_model_that_its_first_step_builds(build, run_eagerly, tmp_path):
    """Its weights are built before, and its metrics are filled before their first step."""
    folder = tmp_path / "backup"
    expected, values = fresh(build, run_eagerly, [])
    assert fresh(build, run_eagerly, [keras.callbacks.BackupAndRestore(folder, save_freq=1), Fail(1, 1)])[0] is None
    history, found = fresh(build, run_eagerly, [keras.callbacks.BackupAndRestore(folder, save_freq=1)])
    assert history == {name: values[1:] for name, values in expected.items()}
    assert_same(found, values)


class NeedsValues(Subclassed):
    """Cannot be called on symbols."""

    def call(self, x, training=False):
        return float(np.isfinite(x.numpy()).all()) * super().call(x, training)


def test_variables_that_the_first_step_makes_are_refused(tmp_path):
    with pytest.raises(ValueError, match="needs a model that is built before `fit`: its first step has made variables"):
        fresh(NeedsValues, True, [keras.callbacks.BackupAndRestore(tmp_path / "backup", save_freq=1)])


# What cannot be found again


@pytest.mark.parametrize("name", ["seed", exhaustive("order")])
def test_where_no_place_is_found_backups_are_of_epochs(name, tmp_path):
    """And so is what training goes on from, with one warning."""
    made = program()

    def data():
        if name == "order":
            return rows().map(lambda x, y: (x, y), num_parallel_calls=2, deterministic=False).batch(BATCH)
        tf.random.set_seed(None)
        return rows().shuffle(ROWS).batch(BATCH)

    backup = keras.callbacks.BackupAndRestore(tmp_path / "backup", save_freq=1)
    made.restart()
    with (
        pytest.raises(Failed),
        pytest.warns(UserWarning, match="saves at the end of each epoch only: .* in these data: ") as told,
    ):
        made.model.fit(data(), epochs=EPOCHS, verbose=0, callbacks=[backup, Fail(1, 3)])
    assert len([each for each in told if "BackupAndRestore" in str(each.message)]) == 1
    made.restart()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        assert made.model.fit(data(), epochs=EPOCHS, verbose=0, callbacks=[backup]).epoch == [1, 2]
    assert int(made.model.optimizer.iterations) == 5 * EPOCHS


def test_a_generator_is_told_of(tmp_path):
    made = program()
    backup = keras.callbacks.BackupAndRestore(tmp_path / "backup", save_freq=1)
    assert train(made, generator, [backup], (1, 3)) is None
    made.restart()
    with pytest.warns(UserWarning, match="a Python generator, of which the place cannot be known"):
        made.model.fit(**generator(), epochs=2, verbose=0, callbacks=[backup])


def test_other_data_are_refused_in_the_middle_of_an_epoch(tmp_path):
    made = program()
    backup = keras.callbacks.BackupAndRestore(tmp_path / "backup", save_freq=2)
    assert train(made, DATA["shuffled rows"], [backup], (1, 2)) is None
    made.restart()
    with pytest.raises(ValueError, match=r"that epoch: ShuffleDataset\(.*\) here, BatchDataset\(.*\) there in the backup"):
        made.model.fit(rows().batch(BATCH).shuffle(3), epochs=2, verbose=0, callbacks=[backup])


def test_a_remote_folder_has_ends_of_epochs():
    """Keras's two files, as `BackupAndRestore` writes them there."""
    made, folder = program(), f"ram://going_on/{time.time()}"
    backup = keras.callbacks.BackupAndRestore(folder, save_freq=1)
    made.restart()
    with pytest.raises(Failed), pytest.warns(UserWarning, match="is a remote folder, in which only weights and epoch are kept"):
        made.model.fit(X, Y, batch_size=BATCH, epochs=EPOCHS, verbose=0, callbacks=[backup, Fail(1, 3)])
    assert train(made, DATA["arrays"], [backup]).epoch == [1, 2]
    assert int(made.model.optimizer.iterations) == 5 * EPOCHS


@pytest.mark.parametrize("name", [name if name in IN_EVERY_RUN else exhaustive(name) for name in DATA])
def test_the_place_in_the_data(name, tmp_path):
    assert_goes_on(program(), DATA[name], tmp_path / "backup", [(1, 2), (2, 3)], first=2)


@pytest.mark.parametrize("name", ["PyDataset", exhaustive("PyDataset in order"), exhaustive("PyDataset, threads")])
def test_a_py_dataset_goes_on_at_the_beginning_of_an_epoch(name, tmp_path):
    """The second epoch drew again what the first one had drawn."""
    assert_goes_on(program(), DATA[name], tmp_path / "backup", [(1, 2), (2, 1)], "epoch", first=2)
