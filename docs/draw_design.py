"""Writes the pictures of the pages in docs/design/ from the plans of traced steps, and the doors of its path from the imports.

    python docs/draw_design.py

A picture stands in a block of a page that begins with the line "```plan_" and its name. The doors are the table at the end of
path.md: what files of the path import that is not on it before them. tests/docs/test_design.py compares.
"""

from __future__ import annotations

import ast
import pathlib
import re
import sys
from collections.abc import Callable, Sequence

import keras
import tensorflow as tf

import tfdist
from tfdist.collectives import CollectivePlan, CollectiveRecord

ROOT = pathlib.Path(__file__).parents[1]
sys.path.insert(0, str(ROOT))  # where the tests are
from tests.test_architecture import TREES, files_used  # noqa: E402

PAGES = ROOT / "docs" / "design"
LAYERS, WIDTH = 4, 8
BLOCK = re.compile(r"(```plan_(\w+)\n).*?(```)", re.DOTALL)
DOORS = "## Doors\n"


def plan_of(zero_stage: int) -> tuple[CollectivePlan, int]:
    """Returns the plan of a step of four layers on two ranks, each a bucket or a group of its own; and `prefetch`."""
    layer_bytes = 4 * (WIDTH * WIDTH + WIDTH)
    devices = tfdist.use_logical_cpus(4)[:2]
    strategy = tfdist.ShardedStrategy(devices, zero_stage=zero_stage, bucket_bytes=layer_bytes, group_bytes=0)
    with strategy.scope():
        dense = [keras.layers.Dense(WIDTH, activation="tanh", name=f"layer_{layer}") for layer in range(LAYERS)]
        model = keras.Sequential([keras.Input((WIDTH,)), *dense])
        optimizer = keras.optimizers.Adam()
        optimizer.build(model.trainable_variables)
    return _traced(strategy, model, optimizer), strategy.sharding_config.prefetch


def plan_of_two_axes() -> CollectivePlan:
    """Returns the plan of a step of two layers, split in two over the tensor axis, on two times two ranks at stage 3."""
    strategy = tfdist.ShardedStrategy(tfdist.use_logical_cpus(4), zero_stage=3, tensor_parallel_size=2, group_bytes=0)
    with strategy.scope():
        first = tfdist.layers.ColumnParallelDense(WIDTH, gather_output=False, activation="tanh", name="first")
        last = tfdist.layers.RowParallelDense(WIDTH, input_is_parallel=True, name="last")
        model = keras.Sequential([keras.Input((WIDTH,)), first, last])
        optimizer = keras.optimizers.Adam()
        optimizer.build(model.trainable_variables)
    return _traced(strategy, model, optimizer)


def _traced(strategy: tfdist.ShardedStrategy, model: keras.Model, optimizer: keras.Optimizer) -> CollectivePlan:
    def step_on_rank(x: tf.Tensor) -> None:
        with tf.GradientTape() as tape:
            loss = tf.reduce_sum(model(x, training=True) ** 2)
        optimizer.apply(tape.gradient(loss, model.trainable_variables), model.trainable_variables)

    tf.function(lambda x: strategy.run(step_on_rank, args=(x,)), autograph=False).get_concrete_function(tf.zeros((2, WIDTH)))
    return strategy.last_plan


def layer_of(label: str) -> int:
    """Returns the layer that a message is about: buckets are numbered as backward fills them, from the last layer on."""
    kind, number = re.search(r"(layer|bucket)_(\d)", label).groups()
    return int(number) if kind == "layer" else LAYERS - 1 - int(number)


def parameters(zero_stage: int) -> str:
    """Draws which layers' parameters a rank has whole (W) while a message travels, in parts (.), and updated (U)."""
    plan, prefetch = plan_of(zero_stage)
    whole = [] if zero_stage == 3 else list(range(LAYERS))
    updated: list[int] = []

    def state(record: CollectiveRecord) -> list[str]:
        layer = layer_of(record.label)
        if record.label.startswith("unshard"):
            whole[:] = [*[one for one in whole if one != layer], layer][-prefetch - 1 :]
        elif record.op == "all_gather":
            updated.append(layer)
        return ["U" if one in updated else "W" if one in whole else "." for one in range(LAYERS)]

    return _table(plan.records[0], "parameters", state)


def gradients(zero_stage: int) -> str:
    """Draws what a rank has of each layer's gradient while a message travels: the summand that it gives (S), what it keeps of
    the sum (p: its shard, W: all), nothing (.)."""
    plan, _ = plan_of(zero_stage)
    kept = {"all_reduce": "W", "reduce_scatter": "p"}
    states = dict.fromkeys(range(LAYERS), ".")

    def state(record: CollectiveRecord) -> list[str]:
        shown = dict(states)
        layer = layer_of(record.label)
        if record.op in kept:
            shown[layer], states[layer] = "S", kept[record.op]
        elif not record.label.startswith("unshard"):  # gathered when it is updated: the gradient is used
            shown[layer] = states[layer] = "."
        return list(shown.values())

    return _table(plan.records[0], "gradients", state)


def chains() -> str:
    """Draws the chains of four ranks of two axes: message after message, which ranks are in it together."""
    plan = plan_of_two_axes()
    lines = [f"{'':34}rank 0   rank 1   rank 2   rank 3"]
    for records in zip(*plan.records, strict=True):
        groups = ["+".join(map(str, record.ranks)) for record in records]
        lines.append(f"{records[0].label:34}" + "".join(f"{group:9}" for group in groups).rstrip())
    return "\n".join(lines)


def _table(records: Sequence[CollectiveRecord], what: str, state: Callable[[CollectiveRecord], list[str]]) -> str:
    lines = [f"{'message':28}{'sent':>5}   {what} of layer {' '.join(map(str, range(LAYERS)))}"]
    width = len(lines[0]) - 2 * LAYERS + 1
    for record in records:
        line = f"{record.label:28}{record.sent_bytes:5.0f}"
        lines.append(f"{line:{width}}{' '.join(state(record))}")
    return "\n".join(lines)


PICTURES: dict[str, Callable[[], str]] = {
    **{f"parameters_{stage}": lambda stage=stage: parameters(stage) for stage in (1, 2, 3)},
    **{f"gradients_{stage}": lambda stage=stage: gradients(stage) for stage in (0, 2, 3)},
    "chains": chains,
}


def path_of(page: str) -> list[str]:
    """Returns the files of the path, in reading order."""
    return re.findall(r"^\| `([\w/]+\.py)` \|", page.partition(DOORS)[0], re.MULTILINE)


def doors_of(files: Sequence[str]) -> list[str]:
    """Returns what `files` import that does not stand before the one that does, once each."""
    found = [used for place, file in enumerate(files) for used in sorted(files_used(file) - set(files[:place]))]
    return sorted(dict.fromkeys(found))


def written(page: str) -> str:
    """Returns the text of a page with its pictures, and its doors, made anew."""
    page = BLOCK.sub(lambda found: f"{found[1]}{PICTURES[found[2]]()}\n{found[3]}", page)
    before, doors, _ = page.partition(DOORS)
    if not doors:
        return page
    rows = [f"| `{file}` | {ast.get_docstring(TREES[file]).partition(chr(10))[0]} |" for file in doors_of(path_of(page))]
    return f"{before}{doors}\n" + "\n".join(["| file | promises |", "|---|---|", *rows]) + "\n"


if __name__ == "__main__":
    for path in sorted(PAGES.glob("*.md")):
        path.write_text(written(path.read_text("utf-8")), "utf-8")
