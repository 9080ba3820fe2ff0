"""The private names of TensorFlow and Keras that jobs of several workers need: this fails when upstream changes them."""

import ctypes
import inspect

import numpy as np
import pytest
import tensorflow as tf
from keras.src.backend.tensorflow.trainer import TFEpochIterator
from signatures import parameters
from tensorflow.compiler.xla.tsl.protobuf import coordination_config_pb2
from tensorflow.python.distribute import collective_all_reduce_strategy, distribute_utils, input_util, values
from tensorflow.python.eager import context
from tensorflow.python.framework import random_seed

from tfdist.runtime import coordination

Extended = collective_all_reduce_strategy.CollectiveAllReduceExtended


@pytest.mark.parametrize(
    ("name", "expected"),
    [
        ("set_config_key_value", ["key", "value"]),
        ("get_config_key_value", ["key", "timeout_in_ms"]),
        ("abort_collective_ops", ["code", "message"]),
        ("check_collective_ops_peer_health", ["task", "timeout_in_ms"]),
    ],
)
def test_methods_of_the_eager_context(name, expected):
    assert parameters(getattr(context.context(), name)) == expected


def test_the_coordination_service_takes_these_settings():
    wanted = {"service_type", "service_leader", "cluster_register_timeout_in_ms", "heartbeat_timeout_in_ms", "coordinated_jobs"}
    assert wanted <= set(parameters(context.context().configure_coordination_service))
    job = coordination_config_pb2.CoordinatedJob(name="worker", num_tasks=3)
    assert (job.name, job.num_tasks) == ("worker", 3)


def test_state_of_the_eager_context():
    here = context.context()
    assert here._collective_ops_server_def is None  # this process is no worker
    tf.constant(1)
    assert here._initialized is True
    before = context.global_seed()
    try:
        tf.random.set_seed(random_seed.DEFAULT_GRAPH_SEED)
        assert context.global_seed() == random_seed.DEFAULT_GRAPH_SEED
        seeded = random_seed.get_seed(3)
        context.set_global_seed(None)
        assert context.global_seed() is None
        assert random_seed.get_seed(3) == seeded  # an operation's own seed means the same with it as without any
    finally:
        context.set_global_seed(before)


@pytest.mark.parametrize(
    ("name", "expected"),
    [
        ("__init__", ["self", "container_strategy", "cluster_resolver", "communication_options", "devices"]),
        ("_initialize_strategy", ["self", "cluster_resolver", "devices"]),
        ("_initialize_multi_worker", ["self", "cluster_resolver"]),
        ("_initialize_local_devices", ["self", "cluster_resolver", "worker_device"]),
        ("_get_variable_creator_initial_value", ["self", "replica_id", "device", "primary_var", "kwargs"]),
        ("_reduce_to", ["self", "reduce_op", "value", "destinations", "options"]),
        ("_batch_reduce_to", ["self", "reduce_op", "value_destination_pairs", "options"]),
        ("_gather_to_implementation", ["self", "value", "destinations", "axis", "options"]),
        ("_experimental_distribute_dataset", ["self", "dataset", "options"]),
        ("_input_workers_with_options", ["self", "options"]),
    ],
)
def test_methods_of_the_multi_worker_extended(name, expected):
    assert parameters(getattr(Extended, name)) == expected


def test_what_distributes_a_dataset():
    assert {"dataset", "input_workers", "strategy", "input_context", "options"} <= set(
        parameters(input_util.get_distributed_dataset)
    )
    assert "_std_server_started" in inspect.getsource(Extended._initialize_multi_worker)
    assert "experimental_enable_get_next_as_optional" in inspect.getsource(Extended.__init__)


def test_regrouped_values():
    pair = distribute_utils.regroup((tf.constant(1), tf.constant(2)), wrap_class=values.Mirrored)
    assert isinstance(pair, values.Mirrored) and isinstance(pair, values.DistributedValues)


def test_the_specs_of_a_distributed_dataset(cpus):
    strategy = tf.distribute.MirroredStrategy(cpus[:2])
    x = np.zeros((8, 3), "float32")
    iterator = TFEpochIterator(x=x, batch_size=4, distribute_strategy=strategy)
    (spec,) = tf.nest.flatten(iterator._distributed_dataset.element_spec)
    assert [part.shape[1] for part in spec._value_specs] == [3, 3]


def test_the_library_that_starts_servers():
    """`coordination.enable_collective_ops` calls it by `ctypes`."""
    library = ctypes.CDLL(coordination._LIBRARY)
    for name in ("TFE_EnableCollectiveOps", "TF_NewStatus", "TF_GetCode", "TF_Message", "TF_DeleteStatus"):
        assert hasattr(library, name)
    tf.constant(1)
    assert str(context.context()._context_handle).startswith("<capsule object NULL")
