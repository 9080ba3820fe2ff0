"""Writes docs/keras_changes.md from the table of what tfdist replaces.

    python docs/make_keras_changes.py

Run it after a change in `tfdist/keras_hooks/`. A test fails when the page is not up to date.
"""

from __future__ import annotations

import inspect
import itertools
import pathlib
import sys
from collections.abc import Iterable, Iterator

from tfdist import keras_hooks
from tfdist.keras_hooks import Replacement
from tfdist.keras_hooks.table import SUPPORTED, resolve

PAGE = pathlib.Path(__file__).with_name("keras_changes.md")

HEAD = f"""\
# What tfdist changes in Keras

`import tfdist` changes nothing in Keras or TensorFlow. When the first strategy of tfdist is made (or a tensor-parallel layer or a
`PipelineModel`, before one), tfdist replaces the functions below: they assume that every device holds a whole copy of the model,
and Keras has no hook to say otherwise. From then on each of them looks at the strategy first, and does what it always did for
models, optimizers and losses that were made under none, or under one of TensorFlow's own.

The table was written for `{"`, `".join(SUPPORTED)}`; where Keras 3.16's nightly differs, it has both.
Before anything is replaced, all of it is compared with the packages that are installed. If a function is not there, or has other
parameters, the strategy raises an error that names each such function, and nothing has been changed.

This page is made from the table, which is `tfdist/keras_hooks/`, by `docs/make_keras_changes.py`.
"""


def parts(rows: Iterable[Replacement]) -> Iterator[tuple[str, list[Replacement]]]:
    """Yields the rows of each part of Keras, with the first sentence about it, which begins with its name."""
    for module, own in itertools.groupby(rows, key=lambda row: row.binding.__module__):
        yield (inspect.getdoc(sys.modules[module]) or "").partition("\n")[0], list(own)


def written(row: Replacement) -> str:
    """Returns what is replaced, as a call with its parameters, and where it is."""
    owner = row.owner.rpartition(".")
    is_class = inspect.isclass(resolve(row.owner))
    called = f"{owner[2]}.{row.name}" if is_class else row.name
    signatures = [f"`{called}{signature}`" for signature in row.signatures] or [f"`{called}`"]
    return f"{' or '.join(signatures)} in `{owner[0] if is_class else row.owner}`"


def page() -> str:
    """Returns the page."""
    lines = [HEAD]
    for about, rows in parts(keras_hooks.TABLE.rows):
        name, _, sentence = about.partition(": ")
        lines += [f"## {name}", "", sentence[:1].upper() + sentence[1:], "", "| replaced | why |", "|---|---|"]
        for why, alike in itertools.groupby(rows, key=lambda row: row.why):
            lines.append(f"| {'<br>'.join(written(row) for row in alike)} | {why} |")
        lines.append("")
    return "\n".join(lines).rstrip() + "\n"


if __name__ == "__main__":
    PAGE.write_text(page(), encoding="utf-8")
