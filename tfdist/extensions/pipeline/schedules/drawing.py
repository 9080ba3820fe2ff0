"""A picture of a pipeline's step: a row for each rank, a box for each action.

rank 0   │F0│F1│     │B0   │  │B1   │
rank 1      │F0│B0   │F1│B1   │
         ──────────────────────────────> time
"""

import importlib
import os
from collections.abc import Sequence
from typing import Any

from tfdist import errors
from tfdist.extensions.pipeline.schedules.actions import Phase
from tfdist.extensions.pipeline.schedules.simulation import Span

# Label and colour; a rank's later stages are paler.
_LOOKS = {
    Phase.FORWARD: ("forward (F)", "#4878d0"),
    Phase.BACKWARD: ("backward (B)", "#6acc64"),
    Phase.BACKWARD_INPUT: ("backward, input (I)", "#82c6e2"),
    Phase.BACKWARD_WEIGHT: ("backward, weights (W)", "#d5bb67"),
}
_PALER = 0.7  # opacity lost from a rank's first stage to its last, nearly

_INCHES_PER_BOX, _INCHES_PER_RANK = 0.3, 0.45
_LEAST_WIDTH, _LARGEST_WIDTH = 6.0, 40.0  # inches


def draw(spans: Sequence[Span], path: str | os.PathLike[str], *, title: str = "") -> None:
    """Draws when each rank did what, simulated or measured, and writes the picture to a file.

    A box is an action, its colour the phase, the number in it the microbatch; with several stages on a rank the later stages are
    paler. `draw` needs matplotlib, which tfdist itself does without: `pip install 'tfdist[examples]'`.

    Args:
        spans: the actions and times of all ranks; `simulate(schedule).spans`, for instance. The first start is drawn at 0.
        path: the file; its suffix (".png", ".svg", ".pdf") says in which format the picture is.
        title: a line above the picture.

    Raises:
        ValueError: there are no spans, or matplotlib does not know the suffix.
        ImportError: matplotlib is not installed.
    """
    if not spans:
        raise errors.value_error("`spans` must hold at least one span.", spans=spans)
    num_ranks = 1 + max(span.rank for span in spans)
    boxes_of_a_rank = max(sum(span.rank == rank for span in spans) for rank in range(num_ranks))
    width = min(max(_LEAST_WIDTH, _INCHES_PER_BOX * boxes_of_a_rank), _LARGEST_WIDTH)
    # A figure of its own, not one of pyplot's: those belong to the user's program and its windows.
    figure = matplotlib_figure().Figure(figsize=(width, 1.2 + _INCHES_PER_RANK * num_ranks), layout="constrained")
    axes = figure.add_subplot()
    origin = min(span.start for span in spans)
    rounds = 1 + max(span.action.stage_index for span in spans) // num_ranks
    for phase, (label, color) in _LOOKS.items():
        drawn = [span for span in spans if span.action.phase is phase]
        if not drawn:
            continue
        boxes = axes.barh(
            [span.rank for span in drawn],
            [span.end - span.start for span in drawn],
            left=[span.start - origin for span in drawn],
            color=[(color, 1 - _PALER * (span.action.stage_index // num_ranks) / rounds) for span in drawn],
            edgecolor="white",
            label=label,
        )
        axes.bar_label(boxes, [span.action.microbatch for span in drawn], label_type="center", fontsize=7)
    axes.set_yticks(range(num_ranks), [f"rank {rank}" for rank in range(num_ranks)])
    axes.invert_yaxis()  # rank 0 on top, as in the text form
    axes.margins(x=0.01)
    axes.set_xlabel("time")
    axes.set_title(title)
    axes.legend(loc="upper left", bbox_to_anchor=(1, 1), frameon=False)
    figure.savefig(path)


def matplotlib_figure() -> Any:
    """Returns the module `matplotlib.figure`, imported only now: it takes time, and most programs never draw."""
    try:
        return importlib.import_module("matplotlib.figure")
    except ImportError as error:
        raise ImportError(
            errors.message("`draw` needs matplotlib, which is not installed.", fix="pip install 'tfdist[examples]'")
        ) from error
