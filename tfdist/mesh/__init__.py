"""Level 2: which devices there are, and how they form a mesh."""

from tfdist.mesh.device_mesh import DATA_AXES, MESH_AXES, Coordinate, DeviceMesh, current_mesh
from tfdist.mesh.devices import (
    are_cpus,
    default_devices,
    resolve_devices,
    short_name,
    use_logical_cpus,
    uses_physical_gpus,
    worker_devices,
)
from tfdist.mesh.logical_gpus import use_logical_gpus
