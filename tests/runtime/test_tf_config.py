"""TF_CONFIG: what is read from it, and what is refused."""

import json

import pytest
import tensorflow as tf

from tfdist.runtime import read_cluster
from tfdist.runtime.tf_config import number_setting

HOSTS = ["a:1", "b:2", "c:3"]


def set_config(monkeypatch, jobs, task):
    monkeypatch.setenv("TF_CONFIG", json.dumps({"cluster": jobs, "task": task}))


@pytest.mark.parametrize("text", ["", "  ", "{}", '{"task": {"type": "worker", "index": 0}}'])
def test_no_cluster(monkeypatch, text):
    monkeypatch.setenv("TF_CONFIG", text)
    assert read_cluster() is None


def test_a_cluster_of_one_needs_no_server(monkeypatch):
    set_config(monkeypatch, {"worker": ["a:1"]}, {"type": "worker", "index": 0})
    assert read_cluster() is None


def test_workers_in_the_order_of_their_ranks(monkeypatch):
    many = [f"host:{port}" for port in range(1, 13)]
    set_config(monkeypatch, {"worker": many}, {"type": "worker", "index": 10})
    cluster = read_cluster()
    assert [task.address for task in cluster.tasks] == many
    assert (cluster.num_workers, cluster.worker_index, cluster.is_chief) == (12, 10, False)
    assert str(cluster.task) == "worker 10 (host:11)"
    assert cluster.task.device == "/job:worker/replica:0/task:10"
    assert [index for index, _ in cluster.others()] == [*range(10), 11]
    assert cluster.num_workers_here == 12


def test_workers_of_the_same_host(monkeypatch):
    set_config(monkeypatch, {"worker": ["a:1", "b:1", "b:2", "[::1]:1"]}, {"type": "worker", "index": 2})
    cluster = read_cluster()
    assert (cluster.num_workers_here, [task.host for task in cluster.tasks]) == (2, ["a", "b", "b", "[::1]"])


@pytest.mark.parametrize(("kind", "index", "place"), [("chief", 0, 0), ("worker", 0, 1), ("worker", 1, 2)])
def test_the_chief_comes_first(monkeypatch, kind, index, place):
    set_config(monkeypatch, {"worker": HOSTS[1:], "chief": HOSTS[:1]}, {"type": kind, "index": index})
    cluster = read_cluster()
    assert [task.address for task in cluster.tasks] == HOSTS
    assert (cluster.worker_index, cluster.is_chief) == (place, place == 0)


def test_an_index_may_be_a_string(monkeypatch):
    set_config(monkeypatch, {"worker": HOSTS}, {"type": "worker", "index": "2"})
    assert read_cluster().worker_index == 2


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("{", "must be JSON"),
        ("[]", "must be a JSON object"),
        ('{"cluster": []}', None),
        ('{"cluster": ["a:1"]}', "must be JSON objects"),
    ],
)
def test_no_json(monkeypatch, text, words):
    monkeypatch.setenv("TF_CONFIG", text)
    if words is None:
        assert read_cluster() is None
        return
    with pytest.raises(ValueError, match=words) as error:
        read_cluster()
    assert repr(text) in str(error.value) and "It looks like" in str(error.value)


WORKER = {"type": "worker", "index": 0}


@pytest.mark.parametrize(
    ("jobs", "task", "words"),
    [
        ({"worker": HOSTS}, {"type": "worker", "index": 3}, r"index in \[0, 3\); it is index 3"),
        ({"worker": HOSTS}, {"type": "worker", "index": -1}, "it is index -1"),
        ({"worker": HOSTS}, {"type": "worker"}, "it is index None"),
        ({"worker": HOSTS}, {"type": "worker", "index": "first"}, "it is index 'first'"),
        ({"worker": HOSTS}, {}, r"these are not: \[None\]"),
        ({"worker": HOSTS}, {"type": "trainer", "index": 0}, r"these are not: \['trainer'\]"),
        ({"worker": HOSTS}, {"type": "evaluator", "index": 0}, r"these are not: \['evaluator'\]"),
        ({"worker": HOSTS, "ps": ["d:4"]}, WORKER, r"these are not: \['ps'\]"),
        ({"worker": HOSTS, "evaluator": ["d:4"]}, WORKER, "Leave evaluators and parameter servers out"),
        ({"worker": HOSTS}, {"type": "chief", "index": 0}, "a chief with an index"),
        ({"worker": HOSTS, "chief": ["d:4", "e:5"]}, WORKER, "one chief only"),
        ({"worker": ["a:1", "a:1"]}, WORKER, "an address of its own"),
        ({"worker": "a:1"}, WORKER, "must be a list"),
        ({"worker": ["a", "b"]}, WORKER, "must be a list"),
        ({"worker": ["a:0", "b:1"]}, WORKER, "must be a list"),
        ({"worker": [1, 2]}, WORKER, "must be a list"),
    ],
)
def test_malformed(monkeypatch, jobs, task, words):
    set_config(monkeypatch, jobs, task)
    with pytest.raises(ValueError, match=words) as error:
        read_cluster()
    assert "Received: TF_CONFIG=" in str(error.value)


def test_a_resolver(monkeypatch):
    monkeypatch.delenv("TF_CONFIG", raising=False)
    spec = tf.train.ClusterSpec({"worker": HOSTS})
    resolver = tf.distribute.cluster_resolver.SimpleClusterResolver(spec, task_type="worker", task_id=1)
    assert read_cluster(resolver).task.address == "b:2"
    with pytest.raises(ValueError, match="`cluster_resolver` must be"):
        read_cluster("localhost")


def test_the_stock_resolver_gets_our_errors(monkeypatch):
    monkeypatch.setenv("TF_CONFIG", "{")
    with pytest.raises(ValueError, match="must be JSON"):
        read_cluster(tf.distribute.cluster_resolver.TFConfigClusterResolver())


@pytest.mark.parametrize(("text", "number"), [("", None), (" 2 ", 2)])
def test_devices_per_worker(monkeypatch, text, number):
    monkeypatch.setenv("TFDIST_DEVICES_PER_WORKER", text)
    assert number_setting("TFDIST_DEVICES_PER_WORKER") == number


@pytest.mark.parametrize("text", ["0", "-1", "two"])
def test_bad_devices_per_worker(monkeypatch, text):
    monkeypatch.setenv("TFDIST_DEVICES_PER_WORKER", text)
    with pytest.raises(ValueError, match="TFDIST_DEVICES_PER_WORKER must be a positive integer"):
        number_setting("TFDIST_DEVICES_PER_WORKER")


def test_what_is_written_is_read(monkeypatch):
    set_config(monkeypatch, {"chief": ["a:1"], "worker": ["b:2", "c:3"]}, {"type": "worker", "index": 1})
    cluster = read_cluster()
    monkeypatch.setenv("TF_CONFIG", cluster.tf_config())
    assert read_cluster() == cluster
