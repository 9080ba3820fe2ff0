"""The private names of Keras on which tfdist/keras_hooks/metrics.py stands."""

import inspect

import keras
import numpy as np
import tensorflow as tf
from keras.src.backend.tensorflow import trainer as tensorflow_trainer
from keras_owners import TensorFlowTrainer


def test_functions_that_the_seam_overrides():
    for owner, name, parameters in (
        (TensorFlowTrainer, "_make_function", ["self", "step_function"]),
        (tensorflow_trainer, "reduce_per_replica", ["values", "strategy", "reduction"]),
    ):
        original = getattr(owner, name)._tfdist_original
        assert original.__module__ == "keras.src.backend.tensorflow.trainer"
        assert list(inspect.signature(original).parameters) == parameters


def test_the_seam_is_where_keras_calls_it(cpus, monkeypatch):
    """Training and evaluation make their functions by one method and reduce their logs by name, what the step returned."""
    made, reduced = [], []
    original = TensorFlowTrainer._make_function
    monkeypatch.setattr(TensorFlowTrainer, "_make_function", lambda self, step: made.append(step) or original(self, step))
    reduce = tensorflow_trainer.reduce_per_replica
    monkeypatch.setattr(
        tensorflow_trainer,
        "reduce_per_replica",
        lambda values, strategy, reduction: reduced.append((values, reduction)) or reduce(values, strategy, reduction),
    )
    with tf.distribute.MirroredStrategy(cpus[:2]).scope():
        model = keras.Sequential([keras.Input((2,)), keras.layers.Dense(1)])
        model.compile("sgd", "mse")
    model.fit(np.ones((4, 2)), np.ones((4, 1)), verbose=0)
    model.evaluate(np.ones((4, 2)), np.ones((4, 1)), verbose=0)
    assert made == [model.train_step, model.test_step]
    assert len(reduced) >= 2
    for values, reduction in reduced:
        assert set(values) == {"loss"}
        assert reduction == "auto"


def test_results_by_name_and_metrics_variables():
    model = keras.Sequential([keras.Input((2,)), keras.layers.Dense(1)])
    model.compile("sgd", "mse", metrics=["mae"])
    model.fit(np.ones((4, 2)), np.ones((4, 1)), verbose=0)
    assert set(model.get_metrics_result()) == {"loss", "mae"}
    assert len(model.metrics_variables) == 4
    mapped = [(variable, tf.fill(variable.shape, 2.0 + place)) for place, variable in enumerate(model.metrics_variables)]
    with keras.StatelessScope(state_mapping=mapped):
        results = {name: float(value) for name, value in model.get_metrics_result().items()}
    np.testing.assert_allclose(list(results.values()), [2 / 3, 4 / 5], rtol=1e-6)
    for variable in model.metrics_variables:
        assert (variable.aggregation, variable.synchronization) == ("sum", "on_read")


def test_one_object_of_all_replicas_stays_one_object(cpus):
    strategy = tf.distribute.MirroredStrategy(cpus[:2])
    marker = object()
    found = []

    @tf.function
    def step():
        found.append(strategy.run(lambda: (tf.constant(1.0), marker)))

    step()
    assert found[0][1] is marker
