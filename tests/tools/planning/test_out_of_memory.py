"""A step that runs out of a device's memory: the error stays TensorFlow's, and says what filled it and what would help."""

import functools

import keras
import numpy as np
import pytest
import tensorflow as tf
from ranks import strategy_on
from test_traced_model import blocks

import tfdist
from tfdist.runtime import out_of_memory as notes
from tfdist.tools.planning import out_of_memory

TOLD = (
    "OOM when allocating tensor with shape[256,640] and type float on /job:localhost/replica:0/task:0/device:CPU:1 by allocator "
    "CPU_1_bfc"
)
ROWS = np.zeros([8, 160], "float32"), np.zeros([8], "int32")


def fail():
    raise MemoryError(TOLD)


def failing_loss(y, x):
    with tf.control_dependencies([tf.py_function(fail, [], [])]):
        return keras.losses.sparse_categorical_crossentropy(y, x, from_logits=True)


def model_of(strategy, **settings):
    with strategy.scope():
        model = blocks()()
        model.compile("adam", failing_loss, **settings)
    model.optimizer.build(model.trainable_variables)
    return model


@pytest.fixture(scope="module")
def failed():
    """A model of 2 devices and the error of its step."""
    model = model_of(strategy_on(2, zero_stage=1))
    with pytest.MonkeyPatch.context() as patch, pytest.raises(tf.errors.ResourceExhaustedError) as caught:
        patch.setattr(out_of_memory, "_most_in_use", lambda device: None)  # the process's: other tests may have used more
        model.fit(*ROWS, batch_size=8, verbose=0)
    return model, caught.value


def test_the_error_says_what_takes_most_and_what_would_help(failed):
    model, error = failed
    assert TOLD in str(error) and "tfdist" not in str(error)
    (note,) = error.__notes__
    lines = [" ".join(line.split()) for line in note.splitlines()]
    assert lines[0].startswith(f"tfdist: CPU:1 ran out of memory in a step of {model.name!r}.")
    assert "was asked for 655.36 kB more" in lines[0]
    held = tfdist.memory_report(model).devices[1]
    parts = [line.partition(" ")[0] for line in lines[1:4]]
    assert set(parts) == {"parameters", "gradients", "optimizer"} and lines[1].endswith("the most")
    assert f"parameters {held.parameter_bytes / 1e6:.2f} MB" in " ".join(lines)
    told = {line.partition(" about ")[0]: line for line in lines if " about " in line}
    assert {"zero_stage=2", "zero_stage=3", "tensor_parallel_size=2"} <= set(told)
    assert "tfdist.plan" in lines[-1]


@pytest.mark.exhaustive
def test_what_is_measured_is_divided_and_what_is_planned_is_scaled_to_it(failed, monkeypatch):
    """The device held as much as 4,096 examples take: then the activations are most, and half of the batch halves them."""
    model, _ = failed
    state = tfdist.memory_report(model).devices[0]
    traced = out_of_memory.trace(blocks())
    now = out_of_memory.Candidate(zero_stage=1, data=2)
    taken = out_of_memory.memory_of(traced, now, 2 * 4096)
    used = state.total_bytes + taken.activations + taken.buffers
    monkeypatch.setattr(out_of_memory, "_most_in_use", lambda device: used)
    monkeypatch.setattr(out_of_memory, "_SECONDS", 600)
    lines = [" ".join(line.split()) for line in out_of_memory.explained(model, "no words").splitlines()]
    assert lines[0].endswith(f"It held {used / 1e6:.2f} MB at most.")
    assert lines[1].startswith(f"activations and buffers {(taken.activations + taken.buffers) / 1e6:.2f} MB the most")
    saved = {line.partition(" about ")[0]: float(line.partition(" about ")[2].split()[0]) for line in lines if " about " in line}
    half = taken.together - out_of_memory.memory_of(traced, now, 4096).together
    assert saved["half the batch"] == pytest.approx(half / 1e6, rel=0.1)
    assert saved['tfdist.recompute(model, "block")'] > 0.3 * taken.activations / 1e6
    assert list(saved.values()) == sorted(saved.values(), reverse=True)


@pytest.mark.exhaustive
def test_a_model_that_cannot_be_made_again_is_explained_by_its_state(failed, monkeypatch):
    model, _ = failed
    monkeypatch.setattr(out_of_memory, "trace", lambda build, optimizer: 1 / 0)
    told = out_of_memory.explained(model, TOLD)
    state = tfdist.memory_report(model).devices[1]
    assert "recompute" not in told
    saved = next(line for line in told.splitlines() if "zero_stage=2" in line).partition(" about ")[2]
    assert float(saved.split()[0]) == pytest.approx(state.gradient_bytes / 2 / 1e6, rel=0.01)


def test_an_explanation_that_fails_hides_nothing(monkeypatch):
    def broken(function, error):
        raise KeyError("explainer")

    monkeypatch.setattr(out_of_memory, "explanation", broken)
    error = tf.errors.ResourceExhaustedError(None, None, TOLD)
    notes.explain(fail, error)
    assert str(error) == TOLD and error.__notes__ == ["What filled the memory cannot be said: KeyError: 'explainer'"]
    notes.explain(fail, error)  # it has passed here
    other = ValueError("no memory")
    notes.explain(fail, other)
    assert len(error.__notes__) == 1 and not hasattr(other, "__notes__")


def test_models_are_found_by_what_functions_reach(failed):
    model, _ = failed

    def step(x):
        return tf.function(lambda x: model(x))(x)

    for function in (model.train_step, step, tf.function(step), functools.partial(step, 1), [step]):
        assert out_of_memory.trained_by(function) is model
    assert out_of_memory.trained_by(fail) is None and out_of_memory.trained_by(mine_alone) is None
    assert out_of_memory.explanation(fail, ValueError()) is None


def mine_alone():
    return PLAIN


PLAIN = keras.Sequential([keras.Input((3,)), keras.layers.Dense(2)])


@pytest.mark.exhaustive
def test_loops_of_ones_own_and_eager_steps():
    strategy = strategy_on(2, zero_stage=3)
    model = model_of(strategy, run_eagerly=True)
    for step in (tf.function(lambda: strategy.run(model.train_step, (ROWS,))), lambda: model.train_on_batch(*ROWS)):
        with pytest.raises(tf.errors.ResourceExhaustedError, match="OOM when allocating") as caught:
            step()
        assert "ran out of memory in a step" in caught.value.__notes__[0]
