"""Pictures of a step."""

import sys

import matplotlib.figure
import pytest

from tfdist.extensions.pipeline import Phase, ScheduleGPipe, ScheduleInterleaved1F1B, ScheduleZeroBubble, draw, simulate


@pytest.mark.parametrize("schedule", [ScheduleGPipe(1, 1), ScheduleZeroBubble(3, 4), ScheduleInterleaved1F1B(4, 4, 2)])
def test_a_picture_of_what_there_is(schedule, tmp_path, monkeypatch):
    figures = []
    save = matplotlib.figure.Figure.savefig
    monkeypatch.setattr(matplotlib.figure.Figure, "savefig", lambda figure, path: (figures.append(figure), save(figure, path)))
    spans = simulate(schedule).spans
    draw(spans, tmp_path / "picture.png", title="A title")
    assert (tmp_path / "picture.png").read_bytes().startswith(b"\x89PNG")
    (axes,) = figures[0].axes
    assert axes.get_title() == "A title"
    boxes = sorted((box.get_x(), box.get_width(), round(box.get_y() + box.get_height() / 2)) for box in axes.patches)
    assert boxes == sorted((span.start, span.end - span.start, span.rank) for span in spans)
    assert sorted(text.get_text() for text in axes.texts) == sorted(str(span.action.microbatch) for span in spans)
    phases = [phase.value for phase in Phase if any(span.action.phase is phase for span in spans)]
    assert [text.get_text()[-2] for text in axes.get_legend().get_texts()] == phases
    assert [label.get_text() for label in axes.get_yticklabels()] == [f"rank {rank}" for rank in range(schedule.num_ranks)]
    colors = {box.get_facecolor() for box in axes.patches}
    assert len(colors) == len(phases) * schedule.stages_per_rank


def test_other_formats_and_paths_of_text(tmp_path):
    draw(simulate(ScheduleGPipe(2, 2)).spans, str(tmp_path / "picture.svg"))
    assert "<svg" in (tmp_path / "picture.svg").read_text("utf-8")


def test_nothing_to_draw(tmp_path):
    with pytest.raises(ValueError, match="`spans` must hold at least one span"):
        draw([], tmp_path / "picture.png")


def test_matplotlib_is_missing(tmp_path, monkeypatch):
    monkeypatch.setitem(sys.modules, "matplotlib.figure", None)
    with pytest.raises(ImportError, match=r"`draw` needs matplotlib, which is not installed. pip install 'tfdist\[examples\]'"):
        draw(simulate(ScheduleGPipe(2, 2)).spans, tmp_path / "picture.png")
