"""The line of an error that other workers are told: what happened, and where."""

import re

import keras
import numpy as np
import pytest
import tensorflow as tf

from tests import training
from tfdist.runtime.first_line import first_line, is_of_python

X, Y = np.zeros((24, 5), "float32"), np.zeros(24, "int64")
ROWS = (tf.TensorSpec((None, 5)), tf.TensorSpec((None,), tf.int64))


def told(call, *arguments):
    """Returns what is told of the error that the call raises, and whether it is Python's inside a graph."""
    with pytest.raises(Exception) as raised:
        call(*arguments)
    return first_line(raised.value), is_of_python(raised.value)


def fit(data, layers=()):
    with training.strategy_for(2, zero_stage=1).scope():
        model = keras.Sequential([keras.Input((5,)), *layers, keras.layers.Dense(3)])
        model.compile("sgd", training.loss_function())
    model.fit(data, verbose=0)


def reading(read):
    """A dataset that reads its rows by `read`, of which a graph fails."""
    rows = tf.data.Dataset.range(24).map(lambda number: (tf.ensure_shape(read(number), (5,)), 0))
    return rows.batch(12)


def spoilt():
    yield X[:12], Y[:12]
    raise ValueError("the data are spoilt:\nrow 13")


def test_an_error_of_a_generator():
    line, of_python = told(fit, tf.data.Dataset.from_generator(spoilt, output_signature=ROWS))
    assert line.startswith("ValueError: the data are spoilt: row 13 (") and "test_first_line.py, line 39)" in line
    assert of_python


def test_an_error_of_python_in_a_dataset():
    def no_row(number):
        raise KeyError("no row")

    def spoil(x, y):
        return tf.ensure_shape(tf.numpy_function(no_row, [x], tf.float32), (None, 5)), y

    batches = tf.data.Dataset.from_tensor_slices((X, Y)).batch(12).map(spoil)
    for data in (reading(lambda number: tf.numpy_function(no_row, [number], tf.float32)), batches):
        line, of_python = told(fit, data)
        assert line.startswith("KeyError: 'no row' (") and "test_first_line.py" in line
        assert of_python


def test_a_file_that_is_missing():
    def read(number):
        return tf.io.decode_raw(tf.io.read_file("/no/such/file"), tf.float32)

    assert told(fit, reading(read)) == ("NotFoundError: /no/such/file; No such file or directory (in ReadFile)", False)


def test_a_label_out_of_range():
    labels = np.where(np.arange(24) == 7, 99, Y)
    line, of_python = told(fit, tf.data.Dataset.from_tensor_slices((X, labels)).batch(12))
    # Of tfdist's kernel, and of TensorFlow's.
    assert re.match(r"InvalidArgumentError: .*99 (is not in|which is outside the valid range of) \[0, 3\).*\(?in ", line)
    assert not of_python


def test_an_error_of_a_layer():
    class Wrong(keras.layers.Layer):
        def compute_output_spec(self, x):
            return x

        def call(self, x):
            raise ValueError("this layer cannot be called")

    assert told(Wrong(), X) == ("ValueError: this layer cannot be called (in Wrong.call())", False)


def test_an_error_of_python():
    def fail():
        raise OSError(28, "No space left on device", "/tmp/x.h5")

    line, _ = told(fail)
    assert line.startswith("OSError: [Errno 28] No space left on device: '/tmp/x.h5' (") and "test_first_line.py, line " in line


@pytest.mark.parametrize(
    ("text", "line"),
    [
        ("", "RuntimeError"),
        ("first\nsecond", "RuntimeError: first"),
        ("first:\nsecond\nthird", "RuntimeError: first: second"),
        ("x" * 600, f"RuntimeError: {'x' * 486}..."),
    ],
)
def test_lines_of_other_errors(text, line):
    assert first_line(RuntimeError(text)) == line


def test_of_several_places_the_one_that_failed_by_itself():
    text = "Graph execution error:\n\n2 root error(s) found.\n  (0) CANCELLED:  Cancelled\n\t [[{{node A}}]]\n"
    text += "  (1) INVALID_ARGUMENT: {{function_node f}} Incompatible shapes: [2] vs. [3]\n\t [[{{node B}}]]"
    error = tf.errors.InvalidArgumentError(None, None, text)
    assert first_line(error) == "InvalidArgumentError: Incompatible shapes: [2] vs. [3] (in B)"
