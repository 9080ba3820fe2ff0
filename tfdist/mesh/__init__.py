"""Level 2: which devices there are, and how they form a mesh. Only this package calls `tf.config`."""

from tfdist.mesh import coordination
from tfdist.mesh.cluster import Cluster, Task, read_cluster
from tfdist.mesh.coordination import Coordination
from tfdist.mesh.device_mesh import MESH_AXES, Coordinate, DeviceMesh, current_mesh
from tfdist.mesh.devices import default_devices, resolve_devices, use_logical_cpus, uses_physical_gpus, worker_devices
from tfdist.mesh.free_memory import give_back_free_memory
from tfdist.mesh.rendezvous import wait_for_workers
from tfdist.mesh.threads import operations_at_once, share_cores

__all__ = [
    "MESH_AXES",
    "Cluster",
    "Coordinate",
    "Coordination",
    "DeviceMesh",
    "Task",
    "coordination",
    "current_mesh",
    "default_devices",
    "give_back_free_memory",
    "operations_at_once",
    "read_cluster",
    "resolve_devices",
    "share_cores",
    "use_logical_cpus",
    "uses_physical_gpus",
    "wait_for_workers",
    "worker_devices",
]
