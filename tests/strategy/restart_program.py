"""A training program for the launcher: `restart_program.py FOLDER VICTIM`; worker VICTIM is killed in the first attempt."""

import json
import os
import pathlib
import signal
import sys

import keras
import numpy as np

import tfdist
from tests import training

EPOCHS, VICTIM_EPOCH, VICTIM_BATCH = 4, 2, 3


class KilledOnce(keras.callbacks.Callback):
    """Kills this process without warning in the middle of an epoch of the first attempt."""

    def on_epoch_begin(self, epoch, logs=None):
        self.epoch = epoch

    def on_train_batch_end(self, batch, logs=None):
        if os.environ["TFDIST_ATTEMPT"] == "0" and (self.epoch, batch) == (VICTIM_EPOCH, VICTIM_BATCH):
            print("killed", flush=True)
            os.kill(os.getpid(), signal.SIGKILL)


def train(strategy, callbacks=()):
    """Trains for `EPOCHS`; returns the model and the losses by epoch of this process."""
    x, y = training.vectors()
    keras.utils.set_random_seed(11)
    with strategy.scope():
        model = training.small()
        model.compile(keras.optimizers.Adam(0.01), training.loss_function())
        model.optimizer.build(model.trainable_variables)
    history = model.fit(x, y, batch_size=12, epochs=EPOCHS, shuffle=False, verbose=0, callbacks=list(callbacks))
    return model, dict(zip(history.epoch, history.history["loss"], strict=True))


def main(folder, victim):
    strategy = tfdist.MultiWorkerShardedStrategy(zero_stage=3)
    folder = pathlib.Path(folder)
    own = [KilledOnce()] if strategy.cluster.worker_index == victim else []
    model, losses = train(strategy, [keras.callbacks.BackupAndRestore(folder / "backup"), *own])
    weights = model.get_weights()
    slots = [variable.numpy() for variable in model.optimizer.variables]
    if strategy.cluster.is_chief:
        np.savez(folder / "weights.npz", *weights, *slots)
        (folder / "losses.json").write_text(json.dumps(losses))


if __name__ == "__main__":
    main(sys.argv[1], int(sys.argv[2]))
