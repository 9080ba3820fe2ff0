"""No sentence of the documentation is longer than a reader can follow in one go."""

import pathlib
import re
from collections.abc import Iterator

import pytest
from snippets import blocks

ROOT = pathlib.Path(__file__).parents[2]
PAGES = [ROOT / "README.md", ROOT / "CONTRIBUTING.md", *sorted((ROOT / "docs").rglob("*.md"))]
MOST_WORDS = 35


def sentences(text: str) -> Iterator[str]:
    """Yields the sentences of a Markdown text, without code blocks, comments, addresses and the parameters of signatures.

    Each cell of a table has its own. A colon ends one too: a list or the reason follows it.
    """
    lines = text.splitlines()
    for block in blocks(text):
        lines[block.first : block.last + 1] = [""] * (len(block.lines) + 2)
    text = re.sub(r"<!--.*?-->|(?<=\])\([^)\s]+\)", "", "\n".join(lines), flags=re.DOTALL)
    text = re.sub(r"(`[\w.]+)\([^`]*\)`", r"\1`", text)
    for part in re.split(r"\n\s*\n|\n(?=\s*(?:[*#|>-]|\d+\.) ?)|(?<!\\)\|", text):
        if not re.match(r"\n*(?: {4}){1,}\S", part):  # an indented code block
            yield from re.split(r"(?<=[.!?:])\s+", " ".join(part.split()))


def number_of_words(sentence: str) -> int:
    return len(re.findall(r"\w[\w'`.\-/]*", sentence))


@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(ROOT)))
def test_no_sentence_is_too_long(page):
    found = [(number_of_words(sentence), sentence) for sentence in sentences(page.read_text("utf-8"))]
    long = [f"{page.relative_to(ROOT)}, {words} words: {sentence}" for words, sentence in found if words > MOST_WORDS]
    assert not long, f"{len(long)} sentences of more than {MOST_WORDS} words:\n" + "\n".join(long)


def test_sentences_are_found():
    text = (
        "# Head\nOne `f(a, b)` [link](a/c.md).\nTwo: three\n* four\n\n"
        "| five | six. Seven |\n|---|---|\n\n```sh\nno\n```\n<!-- no -->\n\n    no"
    )
    found = [sentence for sentence in sentences(text) if number_of_words(sentence)]
    assert found == ["# Head One `f` [link].", "Two:", "three", "* four", "five", "six.", "Seven"]
    assert number_of_words(" ".join(["word"] * 36)) > MOST_WORDS
