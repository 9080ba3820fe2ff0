"""The states of a stateful recurrent layer, which goes on where each row of the last batch ended: a rank's are of its own rows.

    keras.Input(batch_shape=(8, None, 3)), 2 data ranks        states (8, units) as made
    the first step: a rank has 4 rows                          states (4, units), each rank those of its rows

A model whose batch size follows from its data has states of a rank's size from the beginning. Outside replicas the states read as
those of the first rank, and can be reset; they are not saved.

`_expected_batch_size` and `_shape` are private to Keras: test_private_names_of_layers.py fails when they change.
"""

from typing import Any

import keras
import tensorflow as tf

from tfdist import errors
from tfdist.collectives import RankProgram, rank_program
from tfdist.placements.facts import Facts
from tfdist.placements.kinds import Shard
from tfdist.sharding import config_of
from tfdist.sharding.separate_thread import in_separate_thread, made_by, move


def deal_out(layer: keras.layers.RNN, sequences: Any) -> Any:
    """Gives each rank the states of its own rows, if those of `layer` are still of all rows of the global batch.

    Returns `sequences`, with a check of their rows where these are not known before the step runs.

    Raises:
        ValueError: `sequences` (batch, ...) have neither as many rows as the states, nor this rank's part of as many.
    """
    if not layer.stateful or layer.states is None:
        return sequences
    program, rows, expected = rank_program(), sequences.shape[0], layer._expected_batch_size
    if expected is None or rows == expected:
        _note_rows(layer, program)
        return sequences
    if program is None:
        if rows is not None and config_of(made_by(tf.nest.flatten(layer.states)[0])) is not None:
            raise _wrong_size(layer, rows)
        return sequences
    size = program.mesh.data_parallel_size
    if rows is None:
        _note_rows(layer, program)
        message = f"{_wrong_size(layer, 'not known before the step runs')} The batch of this rank has another size:"
        with tf.control_dependencies([tf.debugging.assert_equal(tf.shape(sequences)[0], expected, message)]):
            return tf.identity(sequences)
    if rows * size != expected:
        raise _wrong_size(layer, rows)
    strategy = tf.distribute.get_strategy()
    in_separate_thread(lambda: _cut(layer, program, strategy, rows))
    _note_rows(layer, program)
    return sequences


def _note_rows(layer: keras.layers.RNN, program: RankProgram | None) -> None:
    """Notes that the states of `layer` have a rank's own rows, in the graph that is traced here."""
    here = None if program is None or program.is_eager else program.here()
    for state in tf.nest.flatten(layer.states) if here is not None else ():
        if isinstance(state._value, tf.distribute.DistributedValues):
            here.part(Facts).declare(here.graph.capture(state._value.values[program.local_index].handle), Shard())


def _cut(layer: keras.layers.RNN, program: RankProgram, strategy: tf.distribute.Strategy, rows: int) -> None:
    states = tf.nest.flatten(layer.states)
    move(states, strategy)
    for state in states:
        whole = state._value.numpy()
        first_rows = tf.constant(whole[:rows])
        state._shape = (rows, *state._shape[1:])
        with strategy.scope():
            state._initialize_with_initializer(lambda *_, value=first_rows, **__: value)
        for rank, part in zip(program.communicator.local_ranks, state._value.values, strict=True):
            first = program.mesh.coordinate(rank).data * rows
            part.assign(whole[first : first + rows])
    layer._expected_batch_size = rows


def _wrong_size(layer: keras.layers.RNN, rows: Any) -> ValueError:
    return errors.value_error(
        "Under a tfdist strategy a stateful RNN keeps the states of one device's rows: every batch must have as many for each.",
        layer=layer.name,
        rows_of_states=layer._expected_batch_size,
        rows=rows,
        fix="Use global batches of one size that the number of devices divides (`drop_remainder=True`), and call the model "
        "outside `fit`, `evaluate` and `predict` with one device's rows.",
    )
