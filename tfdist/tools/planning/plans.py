"""What `tfdist.plan` returns: the plans that fit, those that do not, the best one, and what was assumed."""

import dataclasses
import os
from collections.abc import Sequence
from typing import Any

from tfdist import errors
from tfdist.extensions.pipeline.schedules.drawing import matplotlib_figure
from tfdist.tables import size_text, table_lines
from tfdist.tools.planning.hardware import Hardware
from tfdist.tools.planning.scaling import Training, count_text
from tfdist.tools.planning.search import Estimated


@dataclasses.dataclass(frozen=True, eq=False)
class Plans:
    """The ways to train a model on some devices. Prints as a table.

    Attributes:
        model: the model's name.
        parameters: how many it has.
        devices: how many devices.
        hosts: on how many machines.
        memory_per_device: bytes of each.
        batch_size: examples of a step, all devices together.
        optimizer: its name.
        candidates: all that was considered: first what fits, the fastest first, then what does not, that first which lacks least.
        hardware: what times are estimated for.
        blocks: the regular expression of the layers that are recomputed; "" where there are none.
        assumed: sentences on what was assumed.
        training: what the whole training takes; None: not asked for.
        shown: how many of each kind the table shows.
        is_lower_bound: whether a device may hold more: loops whose length is not known count nothing of what they keep.
    """

    model: str
    parameters: int
    devices: int
    hosts: int
    memory_per_device: float
    batch_size: int
    optimizer: str
    candidates: Sequence[Estimated]
    hardware: Hardware
    blocks: str = ""
    assumed: Sequence[str] = ()
    training: Training | None = None
    shown: int = 5
    is_lower_bound: bool = False

    @property
    def fitting(self) -> list[Estimated]:
        """The plans that fit, the fastest first."""
        return [one for one in self.candidates if one.fits]

    @property
    def best(self) -> Estimated:
        """The fastest that fits. Raises ValueError when nothing fits, with what lacks least."""
        if not self.fitting:
            raise errors.value_error("No plan fits: " + self._nearest(), memory_per_device=self.memory_per_device)
        return self.fitting[0]

    @property
    def python(self) -> str:
        """The lines of Python that train the model of `build` by the best plan."""
        return self.python_of(self.best)

    def python_of(self, one: Estimated) -> str:
        """Returns the lines of Python that train the model of `build` by a plan."""
        return one.candidate.python(hosts=self.hosts, blocks=self.blocks)

    def __str__(self) -> str:
        lines = [
            f"{self.model}: {count_text(self.parameters)} parameters, {self.devices} x {size_text(self.memory_per_device)}"
            + (f" on {self.hosts} hosts" if self.hosts > 1 else "")
            + f", batch {self.batch_size:,}, {self.optimizer}",
            "",
            *self._table(),
            "",
        ]
        if self.fitting:
            lines += [f"{self.python}", "", *self._refuted(), self._confirmation()]
            if reason := self._alternative():
                lines.append(reason)
        else:
            lines += [*self._refuted(), "No plan fits: " + self._nearest()]
        if self.training is not None:
            lines += ["", str(self.training)]
        return "\n".join([*lines, "", *(f"* {sentence}" for sentence in self._assumed())])

    def to_json(self) -> dict[str, Any]:
        """Returns what JSON can carry."""
        return {
            "format": 1,
            **{name: getattr(self, name) for name in _TOLD},
            "best": self._json(self.fitting[0]) if self.fitting else None,
            "is_lower_bound": self.is_lower_bound,
            "candidates": [self._json(one) for one in self.candidates],
            "training": dataclasses.asdict(self.training) if self.training is not None else None,
            "hardware": {"name": self.hardware.name, "measured": self.hardware.measured, "source": self.hardware.source},
            "assumed": self._assumed(),
        }

    def draw(self, path: str | os.PathLike[str]) -> None:
        """Draws the memory of the plans that the table shows, as stacked bars against the device's limit.

        Args:
            path: the file; its suffix (".png", ".svg", ".pdf") says in which format the picture is.

        Raises:
            ValueError: matplotlib does not know the suffix.
            ImportError: matplotlib is not installed: `pip install 'tfdist[examples]'`.
        """
        _draw(self._shown(), self.memory_per_device, path, title=f"{self.model} on {self.devices} devices")

    def _json(self, one: Estimated) -> dict[str, Any]:
        return {
            "name": one.candidate.name(),
            "candidate": dataclasses.asdict(one.candidate),
            "fits": one.fits,
            "memory": {**one.memory.parts(), "together": one.memory.together},
            "dry_run": one.dry_run.to_json() if one.dry_run is not None else None,
            "missing_bytes": one.missing_bytes,
            "largest": one.memory.largest(),
            "time": dataclasses.asdict(one.time) if one.time is not None else None,
            "python": self.python_of(one),
        }

    def _shown(self) -> list[Estimated]:
        """The first plans that fit, and of those that do not the ones that lack least, of each stage one."""
        others: dict[int, Estimated] = {}
        for one in self.candidates[len(self.fitting) :]:
            others.setdefault(one.candidate.zero_stage, one)
        return [*self.fitting[: self.shown], *list(others.values())[: self.shown]]

    def _table(self) -> list[str]:
        measured = "" if self.hardware.measured else " *"
        rows = [["plan", *_ADVICE, "together", f"step{measured}", "fits"]]
        for one in self._shown():
            parts = one.memory.parts()
            step = f"{_duration(one.time.together)}{measured}" if one.time is not None else ""
            least = ">= " if self.is_lower_bound else ""
            sizes = [(least if name == "activations" else "") + size_text(parts[name]) for name in _ADVICE]
            rows.append([one.candidate.name(), *sizes, least + size_text(one.memory.together), step, self._verdict(one)])
        header, *lines = table_lines(rows, "<>>>>>>><")
        left = len(self.candidates) - len(self._shown())
        told = [f"{left} more: {len(self.fitting)} of {len(self.candidates)} fit"] if left else []
        return [header, "-" * len(header), *lines, *told]

    def _verdict(self, one: Estimated) -> str:
        if one.is_refused:
            return "no: its strategy refuses it"
        if not one.fits:
            return f"no: {size_text(one.missing_bytes)} too much, most of it {one.device_memory.largest()}"
        left = size_text(one.limit - one.memory.together)
        return f"yes, if its loops keep less than {left}" if self.is_lower_bound else "yes"

    def _refuted(self) -> list[str]:
        """Says which plans dry runs have refuted, and why."""
        return [
            f"{one.candidate.name()} would fit by its arithmetic, but {one.dry_run.refuted(one.memory, one.limit)}"
            for one in self.candidates
            if one.dry_run is not None and not one.fits
        ]

    def _confirmation(self) -> str:
        best = self.best.dry_run
        if best is None:
            return "Not confirmed by a dry run: `dry_run=True`, or --dry-run, traces a rank of this plan's strategy."
        return best.confirmed(self.best.memory)

    def _alternative(self) -> str:
        """Says why the plan with the least memory is not the best, where it is another."""
        best, least = self.best, min(self.fitting, key=lambda one: one.memory.together)
        if least is best or least.time is None or best.time is None:
            return ""
        saved = best.memory.together - least.memory.together
        longer = least.time.together / best.time.together - 1
        return f"{least.candidate.name()} takes the least memory, {size_text(saved)} less, and {longer:.0%} longer."

    def _nearest(self) -> str:
        one = self.candidates[0]
        largest = one.device_memory.largest()
        unit = "A size without a unit is in bytes. " if self.memory_per_device < _SMALL else ""
        return unit + (
            f"{one.candidate.name()} lacks least, {size_text(one.missing_bytes)} of a device. Its {largest} take most, "
            f"{size_text(one.device_memory.parts()[largest])}: {_ADVICE[largest]}"
        )

    def _assumed(self) -> list[str]:
        told = [
            f"Times are of {self.hardware.name} ({self.hardware.source})."
            + ("" if self.hardware.measured else " Nothing of it is measured: `python -m tfdist calibrate` does it.")
        ]
        return [*self.assumed, *told]


_TOLD = ("model", "parameters", "devices", "hosts", "memory_per_device", "batch_size", "optimizer")
_SMALL = 1e5  # bytes: who has so little means gigabytes
_ADVICE = {
    "parameters": "more devices, or an optimizer with less state, help.",
    "gradients": "more devices help.",
    "optimizer": "more devices, or an optimizer with less state, help.",
    "activations": "a smaller batch, with `gradient_accumulation_steps`, half precision or recomputation help.",
    "buffers": "smaller `bucket_bytes` and `group_bytes` help.",
}

_COLOURS = {
    "parameters": "#4878d0",
    "gradients": "#6acc64",
    "optimizer": "#d5bb67",
    "activations": "#d65f5f",
    "buffers": "#8c8c8c",
}
_INCHES_PER_PLAN = 0.42


def _duration(seconds: float) -> str:
    for unit, scale in (("s", 1.0), ("ms", 1e-3)):
        if seconds >= scale:
            return f"{seconds / scale:.3g} {unit}"
    return f"{seconds * 1e6:.3g} µs"


def _draw(plans: Sequence[Estimated], limit: float, path: str | os.PathLike[str], *, title: str) -> None:
    """Draws a bar for each plan, from top to bottom, and what a device has, and writes the picture to a file."""
    # A figure of its own, not one of pyplot's: those belong to the user's program and its windows.
    figure = matplotlib_figure().Figure(figsize=(9.0, 1.6 + _INCHES_PER_PLAN * len(plans)), layout="constrained")
    axes = figure.add_subplot()
    left = [0.0] * len(plans)
    for name, colour in _COLOURS.items():
        widths = [one.memory.parts()[name] / 1e9 for one in plans]
        axes.barh(range(len(plans)), widths, left=left, color=colour, label=name)
        left = [start + width for start, width in zip(left, widths, strict=True)]
    axes.axvline(limit / 1e9, color="black", linestyle="--", label="a device has")
    axes.set_yticks(range(len(plans)), [one.candidate.name() for one in plans])
    axes.invert_yaxis()
    axes.set_xlabel("GB of the fullest device")
    axes.set_title(title)
    figure.legend(loc="outside lower center", ncols=3)
    figure.savefig(path)
