"""The environment of a worker: the only file that reads TF_CONFIG."""

import json
import os
from collections.abc import Mapping, Sequence
from typing import Any

import tensorflow as tf

from tfdist import errors
from tfdist.runtime.cluster import Cluster, Task

_TASK_TYPES = ("chief", "worker")
_EXAMPLE = '{"cluster": {"worker": ["host0:2222", "host1:2222"]}, "task": {"type": "worker", "index": 0}}'


def read_cluster(cluster_resolver: Any = None) -> Cluster | None:
    """Reads the job's cluster from `cluster_resolver`, or from the environment variable TF_CONFIG.

    Args:
        cluster_resolver: a `tf.distribute.cluster_resolver.ClusterResolver`; None reads TF_CONFIG.

    Returns:
        The cluster, or None where there is none or it has one worker only: such a job needs no server.

    Raises:
        ValueError: TF_CONFIG is no JSON or lacks a part, a task type other than "chief" and "worker" (evaluators and parameter
            servers take no part in synchronous training), several chiefs, an address that is not "host:port" or stands twice,
            or a task that the cluster does not list.
    """
    if cluster_resolver is None:
        text = os.environ.get("TF_CONFIG", "")
        if not text.strip():
            return None
        try:
            config = json.loads(text)
        except json.JSONDecodeError as error:
            raise _malformed(f"TF_CONFIG must be JSON ({error}).", text) from error
        if not isinstance(config, dict):
            raise _malformed("TF_CONFIG must be a JSON object.", text)
        jobs, task = config.get("cluster") or {}, config.get("task") or {}
        if not isinstance(jobs, dict) or not isinstance(task, dict):
            raise _malformed('TF_CONFIG: "cluster" and "task" must be JSON objects.', text)
        return _checked(jobs, task.get("type"), task.get("index"), text)
    if not isinstance(cluster_resolver, tf.distribute.cluster_resolver.ClusterResolver):
        raise errors.value_error(
            "`cluster_resolver` must be a `tf.distribute.cluster_resolver.ClusterResolver` or None.",
            cluster_resolver=cluster_resolver,
        )
    if isinstance(cluster_resolver, tf.distribute.cluster_resolver.TFConfigClusterResolver):
        read_cluster()  # the resolver's own errors do not say what is wrong
    jobs = cluster_resolver.cluster_spec().as_dict()
    return _checked(jobs, cluster_resolver.task_type, cluster_resolver.task_id, repr(jobs))


def _malformed(expected: str, received: str) -> ValueError:
    return errors.value_error(expected, TF_CONFIG=received, fix=f"It looks like {_EXAMPLE}.")


def _checked(jobs: Mapping[str, Sequence[str]], task_type: Any, task_index: Any, received: str) -> Cluster | None:
    if not jobs:
        return None
    unknown = sorted(set(jobs) - set(_TASK_TYPES))
    if unknown or task_type not in _TASK_TYPES:
        names = unknown or [task_type]
        raise errors.value_error(
            f"Tasks of a sharded job must be of type {' or '.join(map(repr, _TASK_TYPES))}; these are not: {names}.",
            TF_CONFIG=received,
            fix="Every task trains. Leave evaluators and parameter servers out of the cluster, and evaluate with "
            "`model.evaluate`, or in a job of its own.",
        )
    for job, addresses in jobs.items():
        if isinstance(addresses, str) or not isinstance(addresses, Sequence) or not all(map(_is_address, addresses)):
            raise _malformed(f'TF_CONFIG: {job!r} must be a list of "host:port" strings.', received)
    tasks = tuple(Task(job, index, address) for job in _TASK_TYPES for index, address in enumerate(jobs.get(job, ())))
    if len(jobs.get("chief", ())) > 1:
        raise _malformed("TF_CONFIG: there can be one chief only.", received)
    if len({task.address for task in tasks}) < len(tasks):
        raise _malformed("TF_CONFIG: every task needs an address of its own.", received)
    here = [place for place, task in enumerate(tasks) if (task.type, task.index) == (task_type, _as_int(task_index))]
    if not here:
        raise _malformed(
            f'TF_CONFIG: "task" must be one that "cluster" lists, a {task_type} with an index in '
            f"[0, {len(jobs.get(task_type, ()))}); it is index {task_index!r}.",
            received,
        )
    return Cluster(tasks, here[0]) if len(tasks) > 1 else None


def _as_int(value: Any) -> int | None:
    try:
        return int(value)
    except (TypeError, ValueError):
        return None


def _is_address(value: Any) -> bool:
    host, _, port = value.rpartition(":") if isinstance(value, str) else ("", "", "")
    return bool(host) and port.isdecimal() and 0 < int(port) < 1 << 16


def number_setting(name: str) -> int | None:
    """Returns what the launcher asks for with the variable `name`; None when it asks for nothing.

    TFDIST_DEVICES_PER_WORKER; TFDIST_LOGICAL_GPUS, that each worker is to have; TFDIST_WORKERS_PER_GPU, that share a card.

    Raises:
        ValueError: the variable is set to something other than a positive integer.
    """
    text = os.environ.get(name, "").strip()
    if not text:
        return None
    if not text.isdecimal() or int(text) < 1:
        raise errors.value_error(f"{name} must be a positive integer.", **{name: text})
    return int(text)
