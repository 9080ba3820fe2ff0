"""Ports and TF_CONFIG."""

import json
import socket

import pytest

from tfdist.launch.tasks import Cluster, Task, free_ports

pytestmark = pytest.mark.timeout(60)


def test_workers():
    cluster = Cluster.on_free_ports(3, chief=False)
    addresses = [f"localhost:{port}" for port in cluster.ports]
    assert [str(task) for task in cluster.tasks] == ["worker 0", "worker 1", "worker 2"]
    for index, task in enumerate(cluster.tasks):
        assert json.loads(cluster.tf_config(task)) == {
            "cluster": {"worker": addresses},
            "task": {"type": "worker", "index": index},
        }


def test_the_first_is_the_chief():
    cluster = Cluster.on_free_ports(3, chief=True)
    first, second, third = (f"localhost:{port}" for port in cluster.ports)
    assert cluster.tasks == (Task("chief", 0), Task("worker", 0), Task("worker", 1))
    configs = [json.loads(cluster.tf_config(task)) for task in cluster.tasks]
    assert all(config["cluster"] == {"chief": [first], "worker": [second, third]} for config in configs)
    assert [config["task"] for config in configs] == [
        {"type": "chief", "index": 0},
        {"type": "worker", "index": 0},
        {"type": "worker", "index": 1},
    ]


def test_a_chief_alone():
    cluster = Cluster.on_free_ports(1, chief=True)
    assert list(json.loads(cluster.tf_config(cluster.tasks[0]))["cluster"]) == ["chief"]


def test_ports_are_distinct_and_free():
    # One by one, 400 of the system's 28,000 would repeat with a probability of 94%.
    ports = free_ports(400)
    assert len(set(ports)) == 400
    for port in ports[:10]:
        with socket.socket() as listener:
            listener.bind(("", port))
