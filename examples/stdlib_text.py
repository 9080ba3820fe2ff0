"""English text that needs no download: the documentation carried by every Python installation.

`StdlibText` is an ordinary tensorflow-datasets builder. Its records are the language reference that `help()` shows
(`pydoc_data.topics`) and the docstrings of the standard library. Importing this module registers it:

    import stdlib_text, tensorflow_datasets as tfds
    builder = tfds.builder("stdlib_text", data_dir="out/data")
    builder.download_and_prepare()                      # a few seconds, no network
    train = builder.as_dataset(split="train")           # {"source": ..., "text": ...}
"""

import ast
import hashlib
import pathlib
import platform
import sysconfig
import warnings

import tensorflow_datasets as tfds

MIN_BYTES = 200_000  # less than this is not a usable Python library to learn from
MIN_RECORD_CHARS = 40
MIN_DUPLICATE_CHARS = 60  # shorter paragraphs ("See also:") may repeat
VALIDATION_PERIOD = 20  # one record in this many is held out
SKIPPED_FOLDERS = {"test", "tests", "idle_test", "site-packages", "dist-packages", "__pycache__"}


def help_topics():
    """Yields `(source, text)` for each `help()` topic, by name; nothing where Python comes without `pydoc_data`."""
    try:
        from pydoc_data.topics import topics
    except ImportError:  # some distributions package it apart
        return
    for name in sorted(topics):
        yield f"topic:{name}", topics[name]


def docstrings(root):
    """Yields `(source, text)` for each docstring of the .py files under the folder `root`, by path."""
    for path in sorted(root.rglob("*.py")):
        relative = path.relative_to(root)
        if SKIPPED_FOLDERS.intersection(relative.parts):
            continue
        try:
            with warnings.catch_warnings():  # invalid escapes in old code
                warnings.simplefilter("ignore")
                tree = ast.parse(path.read_bytes())
        except (SyntaxError, ValueError, OSError):  # templates and bad-syntax samples: not ours to mend
            continue
        for node in ast.walk(tree):
            if isinstance(node, (ast.Module, ast.ClassDef, ast.FunctionDef, ast.AsyncFunctionDef)):
                text = ast.get_docstring(node)
                if text:
                    text = text.encode("utf-8", "replace").decode()  # lone surrogates from escapes
                    yield f"{relative.as_posix()}:{getattr(node, 'lineno', 1)}:{getattr(node, 'name', '')}", text


def deduplicate(records):
    """Drops each text and each longer paragraph that an earlier record holds: one split shows nothing of the other.

    Args:
        records: iterable of `(source, text)`.

    Yields:
        `(source, text)` with what is left of each text, where at least `MIN_RECORD_CHARS` characters are.
    """
    seen, seen_paragraphs = set(), set()
    for source, text in records:
        kept = []
        for paragraph in text.split("\n\n"):
            words = " ".join(paragraph.split())  # however it is indented and wrapped
            if len(words) >= MIN_DUPLICATE_CHARS:
                if words in seen_paragraphs:
                    continue
                seen_paragraphs.add(words)
            kept.append(paragraph.rstrip())
        text = "\n\n".join(kept).strip()
        if len(text) >= MIN_RECORD_CHARS and text not in seen:
            seen.add(text)
            yield source, text


def is_validation(text):
    """Whether a text is held out. Depends on the text alone, so it holds across runs and machines."""
    return int.from_bytes(hashlib.sha256(text.encode()).digest()[:8], "big") % VALIDATION_PERIOD == 0


def collect(root=None):
    """Returns the list of `(source, text)` of this Python installation.

    Args:
        root: folder of the standard library. Defaults to the running interpreter's.

    Raises:
        RuntimeError: if less than `MIN_BYTES` of text was found.
    """
    root = pathlib.Path(root or sysconfig.get_paths()["stdlib"])
    records = list(deduplicate([*help_topics(), *docstrings(root)]))
    size = sum(len(text) for _, text in records)
    if size < MIN_BYTES:
        raise RuntimeError(
            f"`stdlib_text` needs at least {MIN_BYTES:,} characters of documentation in the Python library at {root}. "
            f"Received: {size:,} characters in {len(records)} texts. This Python was installed without its .py files "
            "or with its docstrings stripped; use a full Python, or name another tensorflow-datasets data set."
        )
    return records


class StdlibText(tfds.core.GeneratorBasedBuilder):
    """The documentation of the Python standard library, one topic or docstring per record."""

    VERSION = tfds.core.Version("1.0.0")
    # The text is the interpreter's own, so each Python version has its own copy under `data_dir`.
    BUILDER_CONFIGS = [
        tfds.core.BuilderConfig(name=f"python{platform.python_version()}", description="Text of this Python version.")
    ]

    def _info(self):
        return tfds.core.DatasetInfo(
            builder=self,
            description=__doc__,
            homepage="https://docs.python.org/3/",
            license="Python Software Foundation License Version 2",
            features=tfds.features.FeaturesDict({"text": tfds.features.Text(), "source": tfds.features.Text()}),
        )

    def _split_generators(self, dl_manager):
        records = collect()
        return {
            "train": self._generate_examples(records, validation=False),
            "validation": self._generate_examples(records, validation=True),
        }

    def _generate_examples(self, records, validation):
        for source, text in records:
            if is_validation(text) == validation:
                yield source, {"text": text, "source": source}
