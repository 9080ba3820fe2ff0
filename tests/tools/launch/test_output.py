"""Bytes into lines, and which lines are shown, filed and remembered."""

import io

import hypothesis
import hypothesis.strategies as st
import pytest

from tfdist.tools.launch.output import UPDATE_SECONDS, Lines, Output

pytestmark = pytest.mark.timeout(60)


class Clock:
    now = 100.0

    def __call__(self):
        return self.now


def bar(done, previous):
    """What Keras's progress bar writes."""
    return b"\b" * previous + b"\r" + f"{done}/9 ━━".encode()


@pytest.mark.parametrize(
    ("data", "expected"),
    [
        (b"one\ntwo\n", ["one", "two"]),
        (b"one\n\n  \n", ["one", "", "  "]),
        (b"windows\r\n", ["windows"]),
        (b"10%\r20%\r100%\n", ["100%"]),
        (b"\r10%\r20%\n", ["20%"]),
        (b"100%\r    \rcleared\n", ["cleared"]),
        (b"100%\r    \r\n", ["100%"]),
        (b"Loading |\b/\b-\b done\n", ["Loading  done"]),
        (b"ab\b\b\b\bc\n", ["c"]),
        (bar(1, 0) + bar(2, 6) + bar(9, 6) + b"\n", ["9/9 ━━"]),
        (b"not UTF-8: \xff\n", ["not UTF-8: \ufffd"]),
    ],
)
def test_a_line_is_its_last_state(data, expected):
    lines = Lines(Clock())
    assert lines.feed(data) == expected
    assert lines.end() == []


@hypothesis.given(st.lists(st.sampled_from([b"a", b"b", "━".encode(), b" ", b"\b", b"\r", b"\n"])), st.data())
def test_it_does_not_matter_how_it_is_read(pieces, data):
    text = b"".join(pieces)
    whole, parts = Lines(Clock()), Lines(Clock())
    expected = whole.feed(text) + whole.end()
    cuts = sorted(data.draw(st.lists(st.integers(0, len(text)))))
    found = []
    for start, end in zip([0, *cuts], [*cuts, len(text)], strict=True):
        found += parts.feed(text[start:end])
    assert found + parts.end() == expected


def test_a_line_that_is_not_ended():
    lines = Lines(Clock())
    assert lines.feed(b"one\ntw") == ["one"]
    assert lines.end() == ["tw"]
    assert lines.end() == []


def test_a_progress_bar_is_shown_now_and_then():
    clock = Clock()
    lines = Lines(clock)
    shown = []
    for step in range(1000):
        shown += lines.feed(bar(step, 6 if step else 0))
        clock.now += UPDATE_SECONDS / 300
    shown += lines.feed(b"\n")
    # The state before the one that is being written, every 300 updates, and the last.
    assert shown == ["300/9 ━━", "601/9 ━━", "902/9 ━━", "999/9 ━━"]


def test_a_progress_bar_takes_no_memory():
    lines = Lines(Clock())
    for step in range(1000):
        assert lines.feed(bar(step, 6)) == []
    assert len(lines._rest) < 50


def test_a_line_without_end_is_cut():
    lines = Lines(Clock())
    shown = [line for _ in range(100) for line in lines.feed(b"x" * 1000)]
    assert len(shown) == 1 and len(shown[0]) > 60_000
    assert sum(map(len, shown + lines.end())) == 100_000


def test_prefix_and_stream(capsys):
    output = Output("worker 3")
    output.feed("stdout", b"to st")
    output.feed("stderr", b"to stderr\nno end")
    output.feed("stdout", b"dout\n")
    output.end("stdout")
    output.end("stderr")
    captured = capsys.readouterr()
    assert captured.out == "[worker 3] to stdout\n"
    assert captured.err == "[worker 3] to stderr\n[worker 3] no end\n"


def test_a_terminal_that_cannot_show_it(monkeypatch):
    terminal = io.TextIOWrapper(io.BytesIO(), encoding="ascii")
    monkeypatch.setattr("sys.stdout", terminal)
    Output("worker 0").feed("stdout", "━ fine\n".encode())
    assert terminal.buffer.getvalue() == b"[worker 0] ? fine\n"


def test_the_file_is_raw_and_the_console_silent(capsys):
    file = io.BytesIO()
    output = Output("worker 1", shown=False, file=file)
    output.feed("stdout", b"10%\r20")
    output.feed("stderr", b"oh\xff\n")
    output.feed("stdout", b"%\n")
    assert file.getvalue() == b"10%\r20oh\xff\n%\n"
    assert capsys.readouterr() == ("", "")
    assert output.last_words() == ["oh\ufffd", "20%"]


def test_last_words_are_the_last_traceback():
    output = Output("worker 0", shown=False)
    output.feed("stderr", b"Traceback (most recent call last):\n  first\nKeyError\n")
    output.feed("stderr", b"Traceback (most recent call last):\n  second\n")
    output.feed("stdout", b"something else\n")
    output.feed("stderr", b"ValueError: no")
    output.end("stderr")
    assert output.last_words() == ["Traceback (most recent call last):", "  second", "ValueError: no"]


def test_last_words_of_a_long_traceback():
    output = Output("worker 0", shown=False)
    output.feed("stderr", b"Traceback (most recent call last):\n" + b"".join(b"%d\n" % i for i in range(100)))
    assert output.last_words() == [str(i) for i in range(40, 100)]


def test_last_words_without_traceback():
    output = Output("worker 0", shown=False)
    assert output.last_words() == []
    output.feed("stdout", b"".join(b"%d\n" % i for i in range(100)))
    assert output.last_words() == [str(i) for i in range(80, 100)]
