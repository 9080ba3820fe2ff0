"""Ports and TF_CONFIG."""

import json
import socket

import pytest

from tfdist.runtime import Cluster
from tfdist.tools.launch.job import free_ports, tasks_on_free_ports

pytestmark = pytest.mark.timeout(60)


def configs(tasks):
    return [json.loads(Cluster(tasks, index).tf_config()) for index in range(len(tasks))]


def test_workers():
    tasks = tasks_on_free_ports(3, chief=False)
    assert [task.name for task in tasks] == ["worker 0", "worker 1", "worker 2"]
    assert configs(tasks) == [
        {"cluster": {"worker": [f"localhost:{task.port}" for task in tasks]}, "task": {"type": "worker", "index": index}}
        for index in range(3)
    ]


def test_the_first_is_the_chief():
    tasks = tasks_on_free_ports(3, chief=True)
    first, second, third = (task.address for task in tasks)
    assert [task.name for task in tasks] == ["chief 0", "worker 0", "worker 1"]
    assert all(config["cluster"] == {"chief": [first], "worker": [second, third]} for config in configs(tasks))
    assert [config["task"] for config in configs(tasks)] == [
        {"type": "chief", "index": 0},
        {"type": "worker", "index": 0},
        {"type": "worker", "index": 1},
    ]


def test_a_chief_alone():
    (config,) = configs(tasks_on_free_ports(1, chief=True))
    assert list(config["cluster"]) == ["chief"]


def test_ports_are_distinct_and_free():
    # One by one, 400 of the system's 28,000 would repeat with a probability of 94%.
    ports = free_ports(400)
    assert len(set(ports)) == 400
    for port in ports[:10]:
        with socket.socket() as listener:
            listener.bind(("", port))
