"""Advice: each rule looks at the outcomes, and says something only where it finds its sign."""

from collections.abc import Callable, Iterator, Sequence
from typing import Any

from tfdist.tools.doctor.check import Outcome, Status
from tfdist.tools.doctor.topology import Link, Topology, link_between

# A link that moves less than this part of what it is said to move, in its largest messages, is worth a look.
_LOW = 0.4
_USED_BYTES = 512 * 2**20  # on a card, by others
_LARGE_BYTES = 16 * 2**20


class Seen:
    """The outcomes' data, looked up by name; of a check that did not run, or went wrong, there are no data."""

    def __init__(self, outcomes: Sequence[Outcome]):
        self.outcomes = {outcome.name: outcome for outcome in outcomes}

    def data(self, name: str) -> list[dict[str, Any]]:
        """Returns the data of each worker."""
        return [result.data for result in self.outcomes[name].results if result.data] if name in self.outcomes else []

    def first(self, name: str) -> dict[str, Any]:
        """Returns the data of the first worker that has any, as a rule the chief's."""
        return next(iter(self.data(name)), {})

    def devices(self) -> list[dict[str, Any]]:
        """Returns the devices of all workers in rank order, each with its "host"."""
        return [{**device, "host": data["host"]} for data in self.data("devices") for device in data["devices"]]

    def topology(self) -> Topology:
        data = self.first("topology")
        return Topology.from_json(data) if data else Topology()

    def environment(self) -> dict[str, str]:
        """Returns the variables that bear on GPUs."""
        return self.first("versions").get("environment", {})

    def link(self) -> Link:
        """Returns the slowest link between devices."""
        return link_between(self.devices(), self.topology())

    def bus_bandwidth(self, name: str) -> float | None:
        """Returns what a collective moves in its largest messages, GB/s; None where no large ones were measured."""
        rows = self.first(f"bandwidth/{name}").get("sizes", ())
        return max((row["bus_gb_per_second"] for row in rows if row["bytes"] >= _LARGE_BYTES), default=None)

    def errors(self) -> Iterator[tuple[str, str]]:
        """Returns (name of the check, all that was said) of those that went wrong."""
        for outcome in self.outcomes.values():
            if outcome.status is Status.ERROR:
                yield outcome.name, "\n".join(line for result in outcome.results for line in (result.summary, *result.log))


def advice(outcomes: Sequence[Outcome]) -> list[str]:
    """Returns what to change, in words with the names of the settings."""
    seen = Seen(outcomes)
    return [text for rule in _RULES for text in rule(seen)]


def _no_gpu_found(seen: Seen) -> Iterator[str]:
    for worker, data in enumerate(seen.data("devices")):
        if not data["has_driver"] or any("GPU" in device["device"] for device in data["devices"]):
            continue
        hidden = seen.data("versions")[worker]["environment"].get("CUDA_VISIBLE_DEVICES")
        if hidden is not None and hidden.strip() in ("", "-1"):
            yield f"Worker {worker}: CUDA_VISIBLE_DEVICES={hidden} hides the GPUs of this machine. Unset it to use them."
        else:
            yield (
                f"Worker {worker}: NVIDIA's driver is there, and TensorFlow sees no GPU. Install its CUDA packages (pip install "
                "'tensorflow[and-cuda]'); TF_CPP_MAX_VLOG_LEVEL=1 says which library it does not find."
            )


def _out_of_memory(seen: Seen) -> Iterator[str]:
    for name, said in seen.errors():
        if "OOM when allocating" in said or "RESOURCE_EXHAUSTED" in said or "ran out of memory" in said:
            yield (
                f"{name} ran out of memory. Set TF_FORCE_GPU_ALLOW_GROWTH=true where other programs use the card, and "
                "TF_GPU_ALLOCATOR=cuda_malloc_async where the message speaks of fragmentation."
            )


def _cards_in_use(seen: Seen) -> Iterator[str]:
    used = {device["uuid"] for device in seen.devices() if device["uuid"]}
    grows = seen.environment().get("TF_FORCE_GPU_ALLOW_GROWTH", "").lower() == "true"
    if grows or len(seen.data("topology")) > 1:  # another worker's doctor may have been first
        return
    for card in seen.topology().cards:
        # `nvidia-smi` was asked before TensorFlow took its part.
        if card.uuid in used and card.used_bytes is not None and card.used_bytes > _USED_BYTES:
            yield (
                f"GPU {card.index} ({card.name}): {card.used_bytes / 2**30:.1f} GiB were in use before the doctor began. "
                "TensorFlow takes all that is free: set TF_FORCE_GPU_ALLOW_GROWTH=true, or end the other program."
            )


def _nccl_failed(seen: Seen) -> Iterator[str]:
    failed = [name for name, said in seen.errors() if "nccl" in said.lower()]
    if failed:
        yield f"NCCL failed in {', '.join(failed)}. Run the doctor again with NCCL_DEBUG=INFO: its log says what NCCL tried."


def _collective_hung(seen: Seen) -> Iterator[str]:
    hung = [name for name, said in seen.errors() if name.startswith("bandwidth/") and "still running" in said]
    if hung and seen.first("devices").get("transport") == "NCCL":
        yield (
            f"{', '.join(hung)} did not end. Where the cards talk over PCIe this is often a machine whose IOMMU or ACS breaks "
            "direct access: try NCCL_P2P_DISABLE=1, and NCCL_DEBUG=INFO to see what NCCL does."
        )


def _switched_off(seen: Seen) -> Iterator[str]:
    environment = seen.environment()
    if seen.first("devices").get("transport") != "NCCL":
        return
    if environment.get("NCCL_P2P_DISABLE", "0") not in ("", "0") and seen.link().is_nvlink:
        yield "NCCL_P2P_DISABLE is set, so that NCCL does not use the NVLinks that are there. Unset it."
    has_infiniband = any(not name.startswith(("e", "lo")) for name in seen.topology().interfaces)
    if environment.get("NCCL_IB_DISABLE", "0") not in ("", "0") and has_infiniband and seen.link().is_network:
        yield "NCCL_IB_DISABLE is set, so that NCCL does not use the InfiniBand or RoCE interfaces that are there. Unset it."


def _slow_link(seen: Seen) -> Iterator[str]:
    link, measured = seen.link(), seen.bus_bandwidth("all_reduce")
    if link.gb_per_second is None or measured is None or measured >= _LOW * link.gb_per_second:
        return
    text = f"all_reduce moves {measured:.3g} GB/s over {link.words}, of which {link.gb_per_second:.3g} GB/s is said. "
    if link.is_network:
        yield (
            f"{text}NCCL may have taken another interface: NCCL_DEBUG=INFO names it, and NCCL_SOCKET_IFNAME (Ethernet) or "
            "NCCL_IB_HCA (InfiniBand) chooses it."
        )
    else:
        yield f"{text}NCCL_DEBUG=INFO says which way NCCL takes; NCCL_P2P_LEVEL says how far apart cards may talk directly."


def _no_shared_memory(seen: Seen) -> Iterator[str]:
    reason = seen.first("devices").get("reason", "")
    if "could not share memory" in reason:
        yield (
            f"Workers on one machine talk over gRPC, several times slower than through memory: {reason}. "
            "Let the workers' containers share /dev/shm (docker run --ipc)."
        )


def _unlike_cards(seen: Seen) -> Iterator[str]:
    cards = {device["card"] for device in seen.devices() if device["card"]}
    if len(cards) > 1:
        yield f"The cards differ ({', '.join(sorted(cards))}): every step takes as long as on the slowest."


def _old_cards(seen: Seen) -> Iterator[str]:
    capabilities = [device["compute_capability"] for device in seen.devices() if device["compute_capability"]]
    least = min((tuple(map(int, text.split("."))) for text in capabilities), default=None)
    if least is not None and least < (7, 0):
        yield f"Compute capability {least[0]}.{least[1]} has no tensor cores: mixed_float16 saves memory there, and hardly time."
    if least is not None and least < (8, 0):
        yield f"Compute capability {least[0]}.{least[1]} has no bfloat16: use mixed_float16, not mixed_bfloat16."


_RULES: tuple[Callable[[Seen], Iterator[str]], ...] = (
    _no_gpu_found,
    _out_of_memory,
    _cards_in_use,
    _nccl_failed,
    _collective_hung,
    _switched_off,
    _slow_link,
    _no_shared_memory,
    _unlike_cards,
    _old_cards,
)
