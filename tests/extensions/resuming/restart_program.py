"""A training program for the launcher: `restart_program.py FOLDER BATCHES`; worker 1 is killed in each attempt but the last.

It trains twice, into one backup folder. In the first `fit` it is killed in the second epoch, behind each of the
BATCHES ("3,5") in an attempt of its own, and once more behind the second `fit`. The last attempt finds both at their ends, and
trains again without a backup and without being killed: what it is compared with.
"""

import json
import os
import pathlib
import signal
import sys

import keras
import numpy as np
import tensorflow as tf

import tfdist
from tests import training

EPOCHS = 3


class Killed(keras.callbacks.Callback):
    """Kills this process without warning in the middle of the second epoch."""

    def __init__(self, batch):
        super().__init__()
        self.moment = (1, batch)

    def on_epoch_begin(self, epoch, logs=None):
        self.epoch = epoch

    def on_train_batch_end(self, batch, logs=None):
        if self.moment == (self.epoch, batch):
            kill()


def kill():
    print("killed", flush=True)
    os.kill(os.getpid(), signal.SIGKILL)


def values(model):
    return [np.array(v.numpy()) for v in [*model.weights, *model.optimizer.variables]]


def train(strategy, callbacks):
    """Returns the curves of both `fit`, and what the model had behind each."""
    x, y = training.vectors()
    keras.utils.set_random_seed(11)
    with strategy.scope():
        model = keras.Sequential([*training.small().layers[:-1], keras.layers.Dropout(0.3), keras.layers.Dense(training.CLASSES)])
        model.build((None, training.FEATURES))
        model.compile(keras.optimizers.Adam(0.01), training.loss_function(), metrics=["accuracy"])
        model.optimizer.build(model.trainable_variables)
    shuffled = tf.data.Dataset.from_tensor_slices((x, y)).shuffle(len(x)).batch(training.BATCH)
    plateau = keras.callbacks.ReduceLROnPlateau(monitor="loss", factor=0.5, patience=1, min_delta=10.0)
    first = model.fit(shuffled, epochs=EPOCHS, verbose=0, callbacks=[*callbacks, plateau])
    curves, found = [(first.epoch, first.history)], values(model)
    second = model.fit(x, y, batch_size=training.BATCH, epochs=1, verbose=0, callbacks=callbacks[:1])
    curves.append((second.epoch, second.history))
    return curves, [*found, *values(model)]


def main(folder, batches):
    strategy = tfdist.MultiWorkerShardedStrategy(zero_stage=3)
    folder, is_victim = pathlib.Path(folder), strategy.cluster.worker_index == 1
    backup = keras.callbacks.BackupAndRestore(folder / "backup", save_freq=2)
    attempt = int(os.environ["TFDIST_ATTEMPT"])
    killed = [Killed(batch) for batch in batches[attempt : attempt + 1] if is_victim]
    curves, found = train(strategy, [backup, *killed])
    if attempt == len(batches) and is_victim:
        kill()
    if attempt == len(batches):
        return
    expected_curves, expected = train(strategy, [])
    if strategy.cluster.is_chief:
        (folder / "curves.json").write_text(json.dumps({"curves": curves, "expected": expected_curves}))
        np.savez(folder / "found.npz", *found)
        np.savez(folder / "expected.npz", *expected)


if __name__ == "__main__":
    main(sys.argv[1], [int(batch) for batch in sys.argv[2].split(",")])
