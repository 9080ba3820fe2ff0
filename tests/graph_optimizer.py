"""TensorFlow's graph optimizer (grappler), which is a third of what a small training step costs, tracing included.

It runs in all tests, as it does for users, but those marked `as_traced`: tests that compare numbers or files with one device's
and trace a graph per case. Such a graph runs as it was traced. What the optimizer may spoil, such as an order of operations that
only control dependencies keep, shows in any case of a kind, so of a grid over `devices` the cases with 3 keep it, and so do
whole files: collectives, plans and counts, memory, settings of stage 3, documentation, examples, jobs of the launcher.

With it goes the filtering of tracebacks, for which TensorFlow and Keras wrap every call: such tests do not look at messages.
"""

from __future__ import annotations

import os
from collections.abc import Callable
from typing import Any

import keras
import tensorflow as tf
from tensorflow.python.eager import context

_VARIABLE = "TFDIST_TESTS_AS_TRACED"  # tells the processes that a test starts
DEVICES_THAT_KEEP_IT = 3


def switch(on: bool) -> None:
    """For what is traced, and called, from now on in this process and in workers that it starts."""
    os.environ[_VARIABLE] = "" if on else "1"
    tf.config.optimizer.set_experimental_options({"disable_meta_optimizer": not on})
    for filtering in (tf.debugging, keras.config):
        (filtering.enable_traceback_filtering if on else filtering.disable_traceback_filtering)()


def only_for_calls() -> None:
    """Initialises TensorFlow so that the functions of datasets and their iterators run as they were traced, whatever is switched
    later. Every iterator has some for every device.
    """
    switch(on=False)
    tf.config.list_logical_devices()
    switch(on=True)


def switch_as_the_test_did() -> None:
    """In a worker that a test has started."""
    if os.environ.get(_VARIABLE):
        switch(on=False)


def nodes_that_run(function: Callable[..., Any], *arguments: Any) -> list[Any]:
    """Calls a `tf.function`, and returns the NodeDefs of its graph after the optimizer, without those of functions it calls."""
    context.enable_run_metadata()
    context.export_run_metadata()  # what has been called before
    function(*arguments)
    graphs = context.export_run_metadata().function_graphs
    context.disable_run_metadata()
    return [node for graph in graphs for node in graph.post_optimization_graph.node]
