"""Draws docs/images/zero_stages.png: what a rank computes and what it sends during one step of each ZeRO stage.

    python docs/draw_stages.py

A stage is a table: two lanes of tasks, each lane in the order in which a rank runs it, and for each task those that it waits for.
tests/docs/test_draw_stages.py compares the order of the messages with that of traced steps. Durations are chosen, not measured.
"""

from __future__ import annotations

import dataclasses
import pathlib

from matplotlib.figure import Figure
from matplotlib.patches import Patch

PICTURE = pathlib.Path(__file__).parent / "images" / "zero_stages.png"
LAYERS = 4

# Label and colour of each kind of task; forward and backward as in the pictures of pipelines.
LOOKS = {
    "F": ("forward", "#4878d0"),
    "B": ("backward", "#6acc64"),
    "U": ("update", "#d5bb67"),
    "AR": ("all-reduce of gradients", "#d65f5f"),
    "RS": ("reduce-scatter of gradients", "#e17c3a"),
    "AG": ("all-gather of parameters", "#8b8f98"),
}
# A message takes longer than the computation of its layer, so that the picture shows who waits; an all-reduce is two halves.
DURATIONS = {"F": 1.0, "B": 2.0, "U": 0.4, "AR": 5.0, "RS": 2.5, "AG": 2.5}


@dataclasses.dataclass(frozen=True)
class Task:
    """A box of the picture.

    Attributes:
        kind: a key of `LOOKS`.
        layer: the layer that is computed or sent, from 0.
        after: the tasks of the other lane that it waits for, by name.
        again: whether it is stage 3's second gather of the layer in a step.
    """

    kind: str
    layer: int
    after: tuple[str, ...] = ()
    again: bool = False

    @property
    def name(self) -> str:
        return f"{self.kind}{self.layer}" + ("'" if self.again else "")


@dataclasses.dataclass(frozen=True)
class Step:
    """One step of a stage: a line that says what it is, and the tasks of its two lanes."""

    title: str
    computation: tuple[Task, ...]
    messages: tuple[Task, ...]


FORWARD = tuple(Task("F", layer) for layer in range(LAYERS))
BACKWARD = tuple(Task("B", layer) for layer in reversed(range(LAYERS)))

STEPS = (
    Step(
        "stage 0: every rank keeps everything, and steps on all of it",
        (*FORWARD, *BACKWARD, *(Task("U", layer, (f"AR{layer}",)) for layer in (3, 2, 1, 0))),
        tuple(Task("AR", layer, (f"B{layer}",)) for layer in (3, 2, 1, 0)),
    ),
    Step(
        "stage 1: optimizer state in parts. Backward never waits; its full gradients do",
        (*FORWARD, *BACKWARD, *(Task("U", layer, ("RS0",)) for layer in (3, 2, 1, 0))),
        (
            *(Task("RS", layer, (f"B{layer}",)) for layer in (3, 2, 1, 0)),
            *(Task("AG", layer, (f"U{layer}",)) for layer in (3, 2, 1, 0)),
        ),
    ),
    Step(
        "stage 2: gradients in parts, too. Backward waits for the bucket two before",
        (
            *FORWARD,
            Task("B", 3),
            Task("B", 2),
            Task("B", 1, ("RS3",)),
            Task("U", 3, ("RS3",)),
            Task("B", 0, ("RS2",)),
            Task("U", 2, ("RS2",)),
            Task("U", 1, ("RS1",)),
            Task("U", 0, ("RS0",)),
        ),
        (
            Task("RS", 3, ("B3",)),
            Task("RS", 2, ("B2",)),
            Task("RS", 1, ("B1",)),
            Task("AG", 3, ("U3",)),
            Task("RS", 0, ("B0",)),
            Task("AG", 2, ("U2",)),
            Task("AG", 1, ("U1",)),
            Task("AG", 0, ("U0",)),
        ),
    ),
    Step(
        "stage 3: parameters in parts, too. Layers are gathered when they are used, and freed",
        (
            *(Task("F", layer, (f"AG{layer}",)) for layer in range(LAYERS)),
            Task("B", 3),
            Task("B", 2, ("AG2'",)),
            Task("B", 1, ("AG1'",)),
            Task("B", 0),
            *(Task("U", layer, (f"RS{layer}",)) for layer in (3, 2, 1, 0)),
        ),
        (
            # A gather waits for the readers of the one two before it (prefetch=1).
            Task("AG", 0),
            Task("AG", 1),
            Task("AG", 2, ("F0",)),
            Task("AG", 3, ("F1",)),
            Task("AG", 2, ("F2",), again=True),
            Task("RS", 3, ("B3",)),
            Task("AG", 1, ("B3",), again=True),
            Task("RS", 2, ("B2",)),
            Task("RS", 1, ("B1",)),
            Task("RS", 0, ("B0",)),
        ),
    ),
)


def times(step: Step) -> dict[str, float]:
    """Returns when each task begins: when the one before it in its lane, and all that it waits for, have ended."""
    begins: dict[str, float] = {}
    ends: dict[str, float] = {}
    lanes = [list(step.computation), list(step.messages)]
    free = [0.0, 0.0]
    while any(lanes):
        ready = [number for number, lane in enumerate(lanes) if lane and set(lane[0].after) <= set(ends)]
        if not ready:
            raise ValueError(f"The lanes wait for each other: {[lane[0].name for lane in lanes if lane]}.")
        for number in ready:
            task = lanes[number].pop(0)
            begins[task.name] = max([free[number], *(ends[name] for name in task.after)])
            ends[task.name] = free[number] = begins[task.name] + DURATIONS[task.kind]
    return begins


def draw(path: pathlib.Path = PICTURE) -> None:
    """Draws all stages below each other and writes the picture to `path`."""
    figure = Figure(figsize=(9.5, 6.8), layout="constrained")
    panels = figure.subplots(len(STEPS), sharex=True)
    for axes, step in zip(panels, STEPS, strict=True):
        begins = times(step)
        for row, lane in enumerate((step.computation, step.messages)):
            for task in lane:
                length = DURATIONS[task.kind]
                axes.barh(row, length, 0.78, left=begins[task.name], color=LOOKS[task.kind][1], edgecolor="white")
                axes.text(begins[task.name] + length / 2, row, task.layer, ha="center", va="center", fontsize=8)
        axes.set_yticks([0, 1], ["compute", "send"])
        axes.invert_yaxis()
        axes.set_title(step.title, loc="left", fontsize=10)
        axes.set_xticks([])
        axes.spines[["top", "right", "bottom"]].set_visible(False)
        axes.margins(x=0.01)
    panels[-1].set_xlabel("time of one step, 4 layers ──>")
    handles = [Patch(color=color, label=label) for label, color in LOOKS.values()]
    figure.legend(handles=handles, loc="outside lower center", ncols=3, frameon=False, fontsize=9)
    figure.savefig(path, dpi=100)


if __name__ == "__main__":
    draw()
