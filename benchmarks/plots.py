"""Pictures of a run's figures. Needs matplotlib."""

from __future__ import annotations

import pathlib
from collections.abc import Iterator
from typing import Any

from matplotlib.figure import Figure
from matplotlib.lines import Line2D
from matplotlib.patches import Patch

from benchmarks.cases import KERAS_KERNELS, TORCH_DATA, ZERO_STAGES
from benchmarks.figures import Figures, Spread
from benchmarks.suites import (
    CONTENDERS,
    LOCAL,
    MEMORY,
    MODELS,
    NARROW,
    SCALING,
    SCALING_CONTENDERS,
    SCALING_LAYERS,
    SCALING_RANKS,
    SIZES,
    SPEED,
)

TFDIST_COLOR, KERAS_COLOR, TENSORFLOW_COLOR, TORCH_COLOR = "#1b6ca8", "#8bbcdf", "#8a8f98", "#e07b39"
_LABELS = {"tfdist": TFDIST_COLOR, "with Keras's kernels": KERAS_COLOR, "TensorFlow": TENSORFLOW_COLOR}
_LABELS |= {"PyTorch, DeepSpeed": TORCH_COLOR}
_BAR_INCHES, _PANEL_INCHES, _DPI = 0.27, 5.2, 130


def draw_all(figures: Figures, folder: pathlib.Path) -> list[pathlib.Path]:
    """Writes a picture of every kind and model that was measured; returns the files."""
    found = []
    for model in MODELS:
        unit = "tokens" if SIZES[model]["model"] == "gpt" else "examples"
        speed = {"field": "tokens_per_second", "kind": SPEED, "scale": 1, "title": f"{model}: {unit} per second"}
        memory = {"field": "growth_bytes", "kind": MEMORY, "scale": 1e-6, "title": f"{model}: peak memory of a process, MB"}
        for fields in (speed, memory):
            if panels := _panels(figures, model, fields["kind"], fields["field"]):
                found.append(_draw_bars(figures, model, panels, folder / f"{fields['kind']}_{model}.png", **fields))
    if any(x["kind"] == SCALING and "step_seconds" in x for x in figures.records):
        found.append(_draw_scaling(figures, folder / "scaling.png"))
    return found


def _panels(figures: Figures, model: str, kind: str, field: str) -> dict[int, list[str]]:
    """Returns the contenders that have figures, by number of ranks; with the singles alone, under 1."""
    own = [x for x in figures.records if (x["kind"], x["model"]) == (kind, model) and field in x and "error" not in x]
    ranks = sorted({x["ranks"] for x in own if x["ranks"] > 1}) or sorted({x["ranks"] for x in own})
    return {
        number: [contender for contender in CONTENDERS if figures.by_round(field, kind, model, contender, number)]
        for number in ranks
    }


def _draw_bars(
    figures: Figures,
    model: str,
    panels: dict[int, list[str]],
    file: pathlib.Path,
    *,
    field: str,
    kind: str,
    scale: float,
    title: str,
) -> pathlib.Path:
    """A panel per number of ranks, a bar per contender; the line on a bar is the range over the rounds, the mark the floor."""
    handles: list[Any] = [Patch(color=color, label=label) for label, color in _LABELS.items()]
    if kind == MEMORY:
        handles.append(Line2D([], [], color="black", linewidth=2, label="floor: the stage's formula"))
    legend_rows = -(-len(handles) // (2 * len(panels)))
    height = 1.3 + 0.28 * legend_rows + _BAR_INCHES * max(map(len, panels.values()))
    figure = Figure(figsize=(_PANEL_INCHES * len(panels), height))
    axes = figure.subplots(1, len(panels), squeeze=False, sharex=True)
    for axis, (ranks, contenders) in zip(axes[0], panels.items(), strict=True):
        for position, contender in enumerate(contenders):
            found = figures.spread(field, kind, model, contender, ranks)
            _draw_bar(axis, position, found, scale, _color(contender))
            floor = figures.spread("floor_bytes", kind, model, contender, ranks)
            if floor is not None:
                axis.plot([floor.median * scale] * 2, [position - 0.42, position + 0.42], color="black", linewidth=2)
        axis.set_yticks(range(len(contenders)), contenders)
        axis.invert_yaxis()
        axis.margins(x=0.14)
        axis.set_title(f"{ranks} ranks" if ranks > 1 else "1 rank", fontsize=10)
        axis.grid(axis="x", alpha=0.3)
        axis.set_axisbelow(True)
        for side in ("top", "right"):
            axis.spines[side].set_visible(False)
    figure.legend(handles=handles, loc="lower center", ncol=2 * len(panels), frameon=False, fontsize=9)
    figure.suptitle(title)
    figure.tight_layout(rect=(0, 0.28 * legend_rows / height, 1, 1))
    return _save(figure, file)


def _draw_bar(axis: Any, position: int, found: Spread, scale: float, color: str) -> None:
    value = found.median * scale
    # Without a range, in one round, there is no line to draw.
    error = [[value - found.low * scale], [found.high * scale - value]] if found.high > found.low else None
    axis.barh(position, value, xerr=error, color=color, height=0.72, capsize=2.5, error_kw={"linewidth": 1})
    axis.annotate(
        f"{value:,.0f}", (found.high * scale, position), xytext=(5, 0), textcoords="offset points", va="center", fontsize=8
    )


def _color(contender: str) -> str:
    if contender in TORCH_DATA:
        return TORCH_COLOR
    if contender in KERAS_KERNELS:
        return KERAS_COLOR
    return TFDIST_COLOR if contender in (*ZERO_STAGES, *LOCAL) else TENSORFLOW_COLOR


def _draw_scaling(figures: Figures, file: pathlib.Path) -> pathlib.Path:
    """Seconds of building and tracing, and nanoseconds of a step per parameter, over the layers."""
    figure = Figure(figsize=(10.5, 4))
    axes = figure.subplots(1, 2)
    panels = (
        ("build_and_trace_seconds", 1, "building and tracing, s"),
        ("step_seconds_per_parameter", 1e9, "a step, ns per parameter"),
    )
    for axis, (field, scale, title) in zip(axes, panels, strict=True):
        for contender, (layers, spreads) in _lines(figures, field):
            middle = [spread.median * scale for spread in spreads]
            error = [
                [value - spread.low * scale for value, spread in zip(middle, spreads, strict=True)],
                [spread.high * scale - value for value, spread in zip(middle, spreads, strict=True)],
            ]
            color = _color(contender)
            style = "--" if contender == SCALING_CONTENDERS[1] else "-"
            axis.errorbar(layers, middle, yerr=error, marker="o", capsize=3, color=color, linestyle=style, label=contender)
        axis.set_title(title, fontsize=10)
        axis.set_xlabel("layers")
        axis.set_xticks(SCALING_LAYERS, map(str, SCALING_LAYERS))
        axis.margins(y=0.1)
        axis.set_ylim(bottom=0)
        axis.grid(alpha=0.3)
        axis.legend(frameon=False)
    figure.suptitle(f"{NARROW} GPT on {SCALING_RANKS} logical CPUs of one process")
    figure.tight_layout()
    return _save(figure, file)


def _lines(figures: Figures, field: str) -> Iterator[tuple[str, tuple[list[int], list[Spread]]]]:
    for contender in SCALING_CONTENDERS:
        found = {
            layers: spread
            for layers in SCALING_LAYERS
            if (spread := figures.spread(field, SCALING, NARROW, contender, SCALING_RANKS, layers)) is not None
        }
        if found:
            yield contender, (list(found), list(found.values()))


def _save(figure: Figure, file: pathlib.Path) -> pathlib.Path:
    figure.savefig(file, dpi=_DPI)
    return file
