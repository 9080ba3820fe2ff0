"""A job of one worker, in this process, and what the strategy refuses."""

import json

import numpy as np
import pytest
import tensorflow as tf

import tfdist
from tests import training
from tests.strategy import worker_cases
from tfdist.runtime import coordination


@pytest.fixture(autouse=True)
def no_job(monkeypatch):
    monkeypatch.delenv("TF_CONFIG", raising=False)
    monkeypatch.delenv("TFDIST_DEVICES_PER_WORKER", raising=False)


@pytest.mark.parametrize("zero_stage", [0, 3])
def test_without_tf_config_it_is_a_job_of_one(cpus, zero_stage):
    strategy = tfdist.MultiWorkerShardedStrategy(zero_stage=zero_stage)
    assert isinstance(strategy, tf.distribute.MultiWorkerMirroredStrategy)
    assert strategy.cluster is None
    assert strategy.num_replicas_in_sync == len(cpus)  # all logical CPUs of this process
    assert strategy.share("anything", "mine") == "mine"
    strategy.barrier("anything")
    trained = training.fit(strategy, training.small, worker_cases.adam)
    training.assert_same(trained, training.fit(training.one_device(), training.small, worker_cases.adam))
    predicted = trained.model.predict(training.vectors(9)[0], batch_size=5, verbose=0)
    assert predicted.shape == (9, training.CLASSES) and np.isfinite(predicted).all()


def test_a_number_of_the_whole_batch_counts_once(cpus):
    """A sum over replicas of what they have agreed on, as under `ShardedStrategy`: it was counted by each."""
    x = np.arange(15.0, dtype="float32").reshape(5, 3)
    strategy = tfdist.MultiWorkerShardedStrategy()

    @tf.function
    def root_and_largest(x):
        found = strategy.run(lambda x: (tf.sqrt(tf.reduce_mean(x**2)), tf.reduce_max(x)), args=(x,))
        return [strategy.reduce("SUM", one, axis=None) for one in found]

    for part in strategy.experimental_distribute_dataset(tf.data.Dataset.from_tensors(x)):
        np.testing.assert_allclose(root_and_largest(part), [np.sqrt(np.mean(x**2)), 14.0], rtol=1e-6)


def test_one_worker_in_tf_config_needs_no_server(monkeypatch):
    config = {"cluster": {"worker": ["localhost:1"]}, "task": {"type": "worker", "index": 0}}
    monkeypatch.setenv("TF_CONFIG", json.dumps(config))
    assert tfdist.MultiWorkerShardedStrategy().cluster is None


Options = tf.distribute.experimental.CommunicationOptions
Implementation = tf.distribute.experimental.CommunicationImplementation


def test_communication_options():
    strategy = tfdist.MultiWorkerShardedStrategy(communication_options=Options(bytes_per_pack=1234, timeout_seconds=5.0))
    assert strategy.sharding_config.bucket_bytes == 1234
    assert tfdist.MultiWorkerShardedStrategy(bucket_bytes=99).sharding_config.bucket_bytes == 99
    assert strategy.extended.communicator.transport.hint == "ring"
    with pytest.raises(ValueError, match="asks for NCCL, which needs whole physical GPUs"):
        tfdist.MultiWorkerShardedStrategy(communication_options=Options(implementation=Implementation.NCCL))


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        ({"zero_stage": 4}, "`zero_stage` must be"),
        ({"rendezvous_timeout_seconds": 0}, "`rendezvous_timeout_seconds` must be a positive number"),
        ({"step_timeout_seconds": "long"}, "`step_timeout_seconds` must be a positive number"),
        ({"communication_options": "ring"}, "`communication_options` must be"),
        ({"cluster_resolver": "here"}, "`cluster_resolver` must be"),
    ],
)
def test_bad_arguments(arguments, words):
    with pytest.raises(ValueError, match=words):
        tfdist.MultiWorkerShardedStrategy(**arguments)


def test_malformed_tf_config(monkeypatch):
    monkeypatch.setenv("TF_CONFIG", "{")
    with pytest.raises(ValueError, match="TF_CONFIG must be JSON"):
        tfdist.MultiWorkerShardedStrategy()


def test_too_late(monkeypatch):
    """TensorFlow is initialised in this process: it cannot become a worker."""
    tf.constant(1)
    jobs = {"worker": ["localhost:1", "localhost:2"]}
    monkeypatch.setenv("TF_CONFIG", json.dumps({"cluster": jobs, "task": {"type": "worker", "index": 0}}))
    with pytest.raises(RuntimeError, match="already initialised in this process, too late"):
        tfdist.MultiWorkerShardedStrategy()


def test_after_another_strategy_has_started_the_servers(monkeypatch):
    jobs = {"worker": ["localhost:1", "localhost:2"]}
    monkeypatch.setenv("TF_CONFIG", json.dumps({"cluster": jobs, "task": {"type": "worker", "index": 0}}))
    monkeypatch.setattr(coordination, "is_started", lambda: True)
    with pytest.raises(RuntimeError, match=r"made this process a worker already.*Make the tfdist strategy first"):
        tfdist.MultiWorkerShardedStrategy()
