"""The Python blocks of a Markdown file, as one script whose line numbers are those of the file."""

from __future__ import annotations

import dataclasses
import pathlib
import re

_FENCE = re.compile(r"^```(\w*)\s*$")
_NOT_RUN = re.compile(r"^<!-- not run: (?P<reason>.+) -->$")
_MARK = "=== end of the block in line {} ==="


@dataclasses.dataclass(frozen=True)
class Block:
    """A fenced block.

    Attributes:
        language: what stands behind the opening fence.
        first: number of the opening fence's line, from 0.
        lines: the text between the fences.
        not_run: the reason given in the comment before it; None when it runs.
    """

    language: str
    first: int
    lines: tuple[str, ...]
    not_run: str | None = None

    @property
    def last(self) -> int:
        """Number of the closing fence's line."""
        return self.first + len(self.lines) + 1


def blocks(text: str) -> list[Block]:
    """Returns the fenced blocks of a Markdown text. Raises ValueError when one is not closed."""
    found: list[Block] = []
    lines = text.splitlines()
    number = 0
    while number < len(lines):
        if opening := _FENCE.match(lines[number]):
            try:
                last = lines.index("```", number + 1)
            except ValueError:
                raise ValueError(f"The block opened in line {number + 1} is not closed.") from None
            comment = _NOT_RUN.match(lines[number - 1]) if number else None
            reason = comment["reason"] if comment else None
            found.append(Block(opening[1], number, tuple(lines[number + 1 : last]), reason))
            number = last
        number += 1
    return found


def script(text: str) -> str:
    """Returns the Python blocks that run, each on its own lines, followed by a line that prints its mark."""
    lines = [""] * len(text.splitlines())
    for block in blocks(text):
        if block.language == "python" and block.not_run is None:
            lines[block.first + 1 : block.last] = block.lines
            lines[block.last] = f"print({_MARK.format(block.first + 1)!r})"
    return "\n".join(lines) + "\n"


def expected_outputs(text: str) -> list[tuple[int, str, str]]:
    """Returns `(line, mark, output)` for each `output` block: what the Python block before it must have printed."""
    expected = []
    before = None
    for block in blocks(text):
        if block.language == "output":
            if before is None or before.not_run is not None:
                raise ValueError(f"The output in line {block.first + 1} follows no Python block that runs.")
            expected.append((block.first + 1, _MARK.format(before.first + 1), "\n".join(block.lines)))
        before = block if block.language == "python" else None
    return expected


def printed(stdout: str, mark: str) -> str:
    """Returns what was printed between the mark before `mark` and `mark`."""
    return re.split(_MARK.format(r"\d+"), stdout.partition(mark)[0])[-1].strip("\n")


def links(text: str, page: pathlib.Path) -> list[tuple[pathlib.Path, str]]:
    """Returns what a Markdown `page` with this `text` links to: files, each with an anchor or "". Web addresses are left out."""
    targets = re.findall(r"\]\(([^)\s]+)\)", text)
    places = [target.partition("#") for target in targets if not re.match(r"https?:", target)]
    return [(page.parent / file if file else page, anchor) for file, _, anchor in places]


def anchors(text: str) -> set[str]:
    """Returns the anchors of a Markdown text's headings, as GitHub makes them; of equal headings the first only."""
    within = {number for block in blocks(text) for number in range(block.first, block.last)}
    lines = [line for number, line in enumerate(text.splitlines()) if number not in within]
    headings = [line.lstrip("#").strip() for line in lines if re.match(r"#+ ", line)]
    return {re.sub(r"[^\w\- ]", "", heading.lower()).replace(" ", "-") for heading in headings}


def dotted_names(text: str) -> set[str]:
    """Returns the names that begin with `tfdist.`, such as `tfdist.layers.regions`; not those of files."""
    names = re.findall(r"(?<![\w./'\"<])tfdist(?:\.[A-Za-z_]\w*)+(?!\w*[/\[])", text)
    return {name for name in names if not re.search(r"\.(py|md)$", name)}


def file_names(text: str) -> set[str]:
    """Returns the files of this repository that a text names, such as `tests/docs/snippets.py`."""
    return set(re.findall(r"(?<![\w./])((?:tfdist|tests|benchmarks|examples|docs)/[\w/]+\.(?:py|md|png))", text))
