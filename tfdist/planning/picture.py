"""A picture of plans: what each takes of a device's memory, part upon part, against what the device has."""

import os
from collections.abc import Sequence

from tfdist.pipeline.schedules.drawing import matplotlib_figure
from tfdist.planning.search import Estimated

_COLOURS = {
    "parameters": "#4878d0",
    "gradients": "#6acc64",
    "optimizer": "#d5bb67",
    "activations": "#d65f5f",
    "buffers": "#8c8c8c",
}
_INCHES_PER_PLAN = 0.42


def draw(plans: Sequence[Estimated], limit: float, path: str | os.PathLike[str], *, title: str) -> None:
    """Draws a bar for each plan, from top to bottom, and what a device has, and writes the picture to a file: `Plans.draw`."""
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
