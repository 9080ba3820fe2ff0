"""Graphs of different sizes, as molecules: merged in the model they are one device's, merged in the dataset they are refused.

After keras.io's message passing for molecules: atoms get messages from their neighbours, and are read out for each molecule.
"""

import warnings

import keras
import numpy as np
import pytest
import tensorflow as tf
from grids import exhaustive
from training import strategy_for

from tests.parity.comparison import assert_same_tree, state
from tests.programs.comparing import on_one_device, run

MOLECULES, ATOM, BOND, UNITS, BATCH = 13, 5, 3, 5, 6
DRAW = np.random.default_rng(0)


def molecules():
    """Ragged tensors (molecules, atoms, 5), (molecules, bonds, 3) and (molecules, bonds, 2): the atoms that a bond joins."""
    atoms, bonds = DRAW.integers(1, 6, MOLECULES), DRAW.integers(0, 7, MOLECULES)
    pairs = [DRAW.integers(0, n, (b, 2)) for n, b in zip(atoms, bonds, strict=True)]
    of_rows = [tf.RaggedTensor.from_row_lengths(DRAW.normal(size=(sum(n), k)), n) for n, k in ((atoms, ATOM), (bonds, BOND))]
    return *(tf.cast(x, tf.float32) for x in of_rows), tf.RaggedTensor.from_row_lengths(np.concatenate(pairs), bonds)


DATA = molecules()
TARGETS = DRAW.integers(0, 2, MOLECULES).astype("float32")


def merged(atoms, bonds, pairs):
    """Returns one graph of all: (atoms, 5), (bonds, 3), (bonds, 2), and the number of each atom's molecule."""
    joined = pairs.values + tf.gather(atoms.row_starts(), pairs.value_rowids())[:, tf.newaxis]
    return atoms.values, bonds.values, joined, tf.cast(atoms.value_rowids(), tf.int32)


class Messages(keras.layers.Layer):
    def build(self, shapes):
        self.kernel = self.add_weight(shape=(BOND, ATOM * UNITS), initializer=keras.initializers.RandomNormal(seed=1))

    def call(self, graph):
        atoms, bonds, joined = graph
        along = tf.reshape(tf.matmul(bonds, self.kernel), (-1, UNITS, ATOM))
        sent = tf.squeeze(tf.matmul(along, tf.gather(atoms, joined[:, 1])[:, :, tf.newaxis]), -1)
        return atoms + tf.math.unsorted_segment_sum(sent, joined[:, 0], tf.shape(atoms)[0])


class MeanOfAtoms(keras.layers.Layer):
    def call(self, graph):
        atoms, molecule = graph
        return tf.math.unsorted_segment_mean(atoms, molecule, tf.reduce_max(molecule) + 1)


class PaddedSum(keras.layers.Layer):
    """As keras.io's: a place for as many molecules as a batch may have, of which those without atoms are left out."""

    def call(self, graph):
        parts = tf.dynamic_partition(*graph, BATCH)
        longest = tf.reduce_max([tf.shape(part)[0] for part in parts])
        padded = tf.stack([tf.pad(part, [(0, longest - tf.shape(part)[0]), (0, 0)]) for part in parts])
        kept = tf.squeeze(tf.where(tf.reduce_sum(padded, (1, 2)) != 0), -1)
        return tf.reduce_sum(tf.gather(padded, kept), 1)


class OfGraphs(keras.Model):
    def __init__(self, read_out):
        super().__init__()
        self.messages, self.read_out = Messages(), read_out()
        self.head = keras.layers.Dense(1, "sigmoid", kernel_initializer=keras.initializers.GlorotUniform(seed=5))

    def call(self, graph):
        atoms, bonds, joined, molecule = merged(*graph) if len(graph) == 3 else graph
        for _ in range(2):
            atoms = tf.tanh(self.messages([atoms, bonds, joined]))
        return self.head(self.read_out([atoms, molecule]))


def fitted(strategy, read_out, data):
    with strategy.scope():
        model = OfGraphs(read_out)
        model.compile(keras.optimizers.Adam(0.01), "binary_crossentropy", metrics=["accuracy"])
    with warnings.catch_warnings():
        warnings.filterwarnings("error", message="The (loss|layer) ")
        history = model.fit(data, epochs=2, verbose=0).history
        history.update(model.evaluate(data, return_dict=True, verbose=0))
    return {**history, **state(model), "predicted": model.predict(data, verbose=0)}


def batches():
    return tf.data.Dataset.from_tensor_slices((DATA, TARGETS)).batch(BATCH)


def of_means(strategy):
    return fitted(strategy, MeanOfAtoms, batches())


def of_padded_sums(strategy):
    return fitted(strategy, PaddedSum, batches())


@pytest.mark.parametrize("program", [of_means, of_padded_sums])
@pytest.mark.parametrize(("stage", "devices"), [(0, 2), exhaustive(1, 2), (3, 3)])
def test_merged_in_the_model_they_are_one_device(program, stage, devices):
    """The last batch has one molecule."""
    assert_same_tree(run(program, strategy_for(devices, stage)), on_one_device(program), program.__name__, 1e-5)


def test_merged_in_the_dataset_they_are_refused_with_that_fix():
    data = batches().map(lambda graph, targets: (merged(*graph), targets))
    with pytest.raises(tf.errors.InvalidArgumentError, match=r"give the model ragged tensors, and merge the examples there"):
        fitted(strategy_for(2, 0), MeanOfAtoms, data)
