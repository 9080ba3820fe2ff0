"""The abilities of devices and links, in the terms in which the time of a step is estimated.

    a product of two matrices     FLOPs / rate, which grows with the FLOPs of the product; on a CPU its bytes come on top
    what only moves bytes         bytes read and written / `bytes_per_second`, of tensors that no cache has kept
    exp, tanh, random numbers     elements x `function_seconds`, where that is longer: a GPU hides them behind the bytes
    an operation                  `operation_seconds`: on a GPU at least, which is given the next meanwhile; on a CPU besides,
                                  where it is not so small that the executor runs it at once
    a collective of S bytes       alpha + S k / beta: k is the bus factor of nccl-tests for N ranks, 2 (N - 1)/N of an all-reduce

Measured by `python -m tfdist calibrate`, or from data sheets, of which nothing is measured here.
"""

import dataclasses
import json
import math
import pathlib
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np

from tfdist import errors

# Which k of N ranks makes the bytes S of a collective comparable with the speed of a link. S: all_reduce, reduce_scatter and
# all_to_all the tensor of each rank, all_gather the tensor afterwards, broadcast and send the tensor. Source: PERFORMANCE.md of
# nccl-tests.
BUS_FACTORS: Mapping[str, Callable[[int], float]] = {
    "all_reduce": lambda n: 2 * (n - 1) / n,
    "reduce_scatter": lambda n: (n - 1) / n,
    "all_gather": lambda n: (n - 1) / n,
    "all_to_all": lambda n: (n - 1) / n,
    "broadcast": lambda n: 1.0,
    "send": lambda n: 1.0,
}
_FORMAT = 1


@dataclasses.dataclass(frozen=True)
class Collective:
    """How long a collective takes over one kind of link: alpha + S k / beta.

    Attributes:
        alpha: seconds that the smallest message takes.
        beta: bytes per second of the link.
    """

    alpha: float
    beta: float

    def seconds(self, name: str, size: float, ranks: int) -> float:
        """Returns how long `name` takes with S = `size` bytes among `ranks`; nothing among one."""
        return 0.0 if ranks < 2 else self.alpha + size * BUS_FACTORS[name](ranks) / self.beta


@dataclasses.dataclass(frozen=True)
class Hardware:
    """Devices of one kind, and the links between them.

    Attributes:
        name: what it is, in words.
        matmul: for each dtype points (FLOPs of one product, FLOP/s), in increasing order.
        bytes_per_second: read and written together, of operations that only move bytes.
        operation_seconds: what an operation takes that computes nothing.
        links: for "within" a host and "between" hosts, each collective by its name; and for "staged", within a host beside a
            pipeline, those that are not as without one.
        function_seconds: of one element of exp, tanh, erf and their like.
        step_seconds: what a step of `fit` takes that computes nothing.
        overlap: how long two things take together that take as long each, over one alone: 1 is perfect overlap, 2 none.
        update_seconds: of one optimizer update (Adam), for each parameter.
        sharing: how much faster a device computes while the others idle: 1 for devices of their own, N for N logical devices
            that share one processor.
        measured: whether it was measured; False: from data sheets.
        source: where the figures are from.
        memory_bytes: of a device; None: not known.
    """

    name: str
    matmul: Mapping[str, Sequence[tuple[float, float]]]
    bytes_per_second: float
    operation_seconds: float
    links: Mapping[str, Mapping[str, Collective]]
    function_seconds: float = 0.0
    step_seconds: float = 0.0
    overlap: float = 1.0
    update_seconds: float = 0.0
    sharing: float = 1.0
    measured: bool = False
    source: str = ""
    memory_bytes: float | None = None

    @property
    def is_gpu(self) -> bool:
        """Whether the devices are GPUs."""
        return "CPU" not in self.name

    @property
    def is_shared(self) -> bool:
        """Whether devices share a processor: one is faster while others idle by more than what is measured of devices of their
        own."""
        return self.sharing > 1.5

    def flops_per_second(self, dtype: str, flops: float) -> float:
        """Returns the rate of a product of so many FLOPs: between the measured points, by the logarithm of their FLOPs.

        Raises:
            ValueError: nothing is known of `dtype`.
        """
        points = self.matmul.get(dtype)
        if not points:
            raise errors.value_error(f"`dtype` must be one of {', '.join(self.matmul)} on {self.name}.", dtype=dtype)
        sizes, rates = zip(*points, strict=True)
        return float(np.interp(math.log(max(flops, 1.0)), np.log(sizes), rates))

    def collective_seconds(self, name: str, size: float, ranks: int, link: str = "within") -> float:
        """Returns how long a collective takes.

        Args:
            name: one of `BUS_FACTORS`.
            size: S in bytes, as nccl-tests counts them.
            ranks: of the group.
            link: "within" a host, "staged" or "between" hosts. Of links that were not measured those that were stand in.
        """
        kinds = [self.links.get(kind, {}) for kind in (link, "within")] + list(self.links.values())
        known = next((kind for kind in kinds if name in kind), None)
        if known is None:
            if ranks > 1:
                fix = "Calibrate with two devices or more: `python -m tfdist calibrate`, under `tfdist run` for workers."
                raise errors.value_error(
                    "`hardware` must know the links of a plan with several devices.", hardware=self.name, fix=fix
                )
            return 0.0
        return known[name].seconds(name, size, ranks)

    def to_json(self) -> dict[str, Any]:
        """Returns what JSON can carry."""
        return {"format": _FORMAT, **dataclasses.asdict(self)}

    def to_file(self, path: str | pathlib.Path) -> None:
        """Writes it as JSON; `from_file` reads it."""
        pathlib.Path(path).write_text(json.dumps(self.to_json(), indent=2) + "\n", encoding="utf-8")


def from_file(path: str | pathlib.Path) -> Hardware:
    """Returns what `python -m tfdist calibrate --out FILE` wrote. Raises ValueError when the file is no such one."""
    fix = "Make it anew: `python -m tfdist calibrate --out FILE`."
    try:
        found = json.loads(pathlib.Path(path).read_text(encoding="utf-8"))
        if found.pop("format") != _FORMAT:
            raise errors.value_error("`calibration` is of another version of tfdist.", calibration=str(path), fix=fix)
        matmul = {dtype: [(flops, rate) for flops, rate in points] for dtype, points in found.pop("matmul").items()}
        links = {
            link: {name: Collective(**known) for name, known in collectives.items()}
            for link, collectives in found.pop("links").items()
        }
        return Hardware(matmul=matmul, links=links, **found)
    except OSError as error:
        raise errors.value_error(f"`calibration` must be a file that can be read ({error}).", calibration=str(path)) from None
    except (KeyError, TypeError, AttributeError, UnicodeDecodeError, json.JSONDecodeError):
        raise errors.value_error("`calibration` must be a file of `calibrate`.", calibration=str(path), fix=fix) from None


def fitted(rows: Sequence[Mapping[str, float]], name: str, ranks: int) -> Collective:
    """Returns alpha and beta of a collective, by least squares of relative errors over measured sizes.

        time_i = alpha + x_i / beta, x_i = S_i k;  the sum of (1 - (alpha + x_i / beta) / time_i)^2 is least, alpha at least 0

    Args:
        rows: each with "bytes" (S) and "seconds".
        name: of the collective.
        ranks: among which it was measured.

    Raises:
        ValueError: there are fewer than two sizes.
    """
    if len({row["bytes"] for row in rows}) < 2:
        raise errors.value_error("`rows` must have two sizes or more.", rows=len(rows))
    sizes, times = (np.array([row[column] for row in rows], float) for column in ("bytes", "seconds"))
    xs = sizes * BUS_FACTORS[name](ranks)
    slope, alpha = map(float, np.polyfit(xs, times, 1, w=1 / times))
    if alpha < 0:  # one of them is lost in the noise: the other alone
        return Collective(0.0, float(np.sum((xs / times) ** 2) / np.sum(xs / times)))
    if slope <= 0:
        return Collective(float(np.sum(1 / times) / np.sum(1 / times**2)), math.inf)
    return Collective(alpha, 1 / slope)
