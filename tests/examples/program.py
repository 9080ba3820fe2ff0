"""The examples as programs of a fork, whose path and logical CPUs are its own."""

from __future__ import annotations

import importlib
import runpy
import sys
from collections.abc import Sequence

import numpy as np

from tests.workers import ROOT

EXAMPLES = str(ROOT / "examples")
SMALL_LIBRARY = ROOT / "tests" / "examples" / "small_library"


def run(name: str, argv: Sequence[str], on_random_text: bool = False) -> None:
    """Calls the `main` of an example."""
    sys.path.insert(0, EXAMPLES)
    if on_random_text:
        text = np.random.default_rng(0).choice(np.frombuffer(b"tensor ", np.uint8), 2000)
        importlib.import_module("train_gpt").load_tokens = lambda dataset, data_dir: (text[:1500], text[1500:])
    importlib.import_module(name).main(argv)


def prepare(data: str) -> None:
    """Prepares the data set of a small library in the folder `data`."""
    sys.path.insert(0, EXAMPLES)
    runpy.run_path(str(SMALL_LIBRARY / "sitecustomize.py"))
    importlib.import_module("stdlib_text")
    datasets = importlib.import_module("tensorflow_datasets")
    datasets.disable_progress_bar()
    datasets.builder("stdlib_text", data_dir=data).download_and_prepare()
