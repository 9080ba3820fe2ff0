"""The machine: versions, devices, links, and how bytes will travel between the devices."""

import dataclasses
import importlib.metadata
import os
import pathlib
import platform
import re
import socket
import sys
from typing import Any

import keras
import tensorflow as tf

from tfdist.mesh.device_details import DeviceDetails, details_of, tensor_float_32_is_on
from tfdist.tools.doctor.check import Check, Finding
from tfdist.tools.doctor.session import Session
from tfdist.tools.doctor.topology import Topology, read_topology, uuids_of
from tfdist.tools.launch.gpus import visible_gpus

# The variables that change how GPUs, NCCL or TensorFlow behave are told. No others: Terraform's begin with TF_ as well, and hold
# secrets.
_TOLD = re.compile(
    r"(NCCL|CUDA|TFDIST|NVIDIA)_|XLA_FLAGS$|OMP_NUM_THREADS$|TF_(GPU|FORCE_GPU|XLA|CPP|CUDNN|CUDA|NUM_INT|ENABLE|DISABLE|"
    r"DETERMINISTIC|USE)_"
)
_PACKAGES = re.compile(r"nvidia-(nccl|cudnn|cuda-runtime|cublas)\b", re.IGNORECASE)
_DRIVER = pathlib.Path("/proc/driver/nvidia/version")


def _versions(_: Session) -> Finding:
    """Tells versions, and the environment; it never fails."""
    build = tf.sysconfig.get_build_info()
    installed = {package.metadata["Name"] or "": package.version for package in importlib.metadata.distributions()}
    driver = re.search(r"Kernel Module\D*([\d.]+)", _DRIVER.read_text(encoding="utf-8")) if _DRIVER.exists() else None
    versions = {
        "Python": platform.python_version(),
        "TensorFlow": tf.__version__,
        "Keras": keras.__version__,
        "tfdist": sys.modules["tfdist"].__version__,
        "CUDA, of TensorFlow's build": build.get("cuda_version", ""),
        "cuDNN, of TensorFlow's build": build.get("cudnn_version", ""),
        **{name: version for name, version in sorted(installed.items()) if _PACKAGES.match(name)},
        "NVIDIA's driver": driver[1] if driver else "",
        "system": f"{platform.system()} {platform.release()}, {platform.machine()}",
    }
    environment = {name: value for name, value in sorted(os.environ.items()) if _TOLD.match(name)}
    summary = ", ".join(f"{name} {versions[name]}" for name in ("Python", "TensorFlow", "Keras", "tfdist"))
    return Finding(summary, {"versions": versions, "environment": environment, "program": sys.executable})


def _topology(_: Session) -> Finding:
    """Asks for links; what is unknown is no failure."""
    topology = read_topology()
    told = [f"{len(topology.cards)} cards"] if topology.cards else []
    return Finding("; ".join([*told, *topology.unknown]) or "known", topology.to_json())


def _devices(session: Session) -> Finding:
    """Makes the first strategy: without it nothing else can run."""
    details = details_of(session.local_devices)
    topology = read_topology() if session.has_gpus else Topology()
    # CUDA counts the fastest card first, nvidia-smi by their place on the bus: of cards of one kind that is the same.
    in_one_order = os.environ.get("CUDA_DEVICE_ORDER") == "PCI_BUS_ID" or len({card.name for card in topology.cards}) == 1
    uuids = uuids_of(visible_gpus(), topology) if in_one_order else []
    devices = [
        {
            "rank": rank,
            **dataclasses.asdict(one),
            "compute_capability": one.compute_capability and ".".join(map(str, one.compute_capability)),
            "uuid": uuids[one.physical_index] if one.physical_index < len(uuids) else "",
        }
        for rank, one in zip(session.base.extended.communicator.local_ranks, details, strict=True)
    ]
    transport, reasons = transport_of(session, details)
    data: dict[str, Any] = {
        "host": socket.gethostname(),
        "world_size": session.world_size,
        "devices": devices,
        "transport": transport,
        "reason": reasons,
        "tensor_float_32": tensor_float_32_is_on(),
        "has_driver": bool(visible_gpus(environment={})),
    }
    kind = "GPU" if session.has_gpus else "CPU"
    return Finding(f"{session.world_size} {kind} device{'s' * (session.world_size > 1)}, {transport}: {reasons}", data)


def transport_of(session: Session, details: list[DeviceDetails]) -> tuple[str, str]:
    """Returns how collectives over all devices will travel, and why, in words."""
    if session.world_size == 1:
        return "nothing travels", "there is one device"
    communicator = session.base.extended.communicator
    transport = communicator.transport_of(session.base.mesh.group_ranks("data", communicator.local_ranks[0]))
    if communicator.transports:
        return "memory that the workers share", "all are CPUs of one machine, a device each"
    if transport.hint == "nccl":
        return "NCCL", "every device is a whole physical GPU"
    way = "TensorFlow's ring over gRPC, in pieces" if session.cluster else "TensorFlow's ring within the process"
    if session.has_gpus:
        reason = "NCCL refuses several logical GPUs of one card"
    elif session.cluster is None:
        reason = "the devices are CPUs"
    elif len(details) > 1:
        reason = "a worker has several devices, and only workers with one share memory"
    elif len({task.host for task in session.cluster.tasks}) > 1:
        reason = "the workers are on several machines"
    else:
        reason = "the workers could not share memory (they see no /dev/shm in common)"
    return way, reason


VERSIONS = Check("versions", _versions)
TOPOLOGY = Check("topology", _topology)
DEVICES = Check("devices", _devices, is_needed=True)
