"""Part a: losses, weights and optimizer variables of every technique, against one logical device.

The model, the batches and the comparison are the doctor's (`tfdist.tools.doctor.parity`): SGD with momentum, so that a gradient
that is wrong by a factor is wrong in what is compared, unless the row is about another optimizer.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable
from typing import Any

import keras
import numpy as np
import tensorflow as tf

import tfdist
from benchmarks.one_card.card import Card
from benchmarks.one_card.rows import Part, Row
from tfdist.mesh.device_details import details_of, tensor_float_32
from tfdist.tools.doctor.check import Finding, LeftOutError
from tfdist.tools.doctor.parity import ROWS_PER_RANK, TECHNIQUES, TOLERANCES, Technique, Trained, compared, train, train_alone

_RANKS, _MOST_RANKS, _QUICK_RANKS = 4, 8, 2
_FIRST_SCALE = 2.0**15  # of the loss, in Keras
Optimizer = Callable[[], keras.optimizers.Optimizer]


def _zero_bubble(model: keras.Model) -> keras.Model:
    return tfdist.PipelineModel(model, num_microbatches=4, schedule="zero_bubble")


def _all_three(model: keras.Model) -> keras.Model:
    """Builds the model anew of tensor-parallel layers, which a pipeline takes, with the same weights."""
    layers = {
        "up": tfdist.layers.ColumnParallelDense(model.get_layer("up").units, "gelu", gather_output=False, name="up"),
        "down": tfdist.layers.RowParallelDense(model.get_layer("down").units, input_is_parallel=True, name="down"),
    }

    def clone(layer: keras.layers.Layer) -> keras.layers.Layer:
        return layers.get(layer.name) or type(layer).from_config(layer.get_config())

    parallel = keras.models.clone_model(model, clone_function=clone)
    parallel.set_weights(model.get_weights())
    return tfdist.PipelineModel(parallel, num_microbatches=2, stages=["norm"])


def _recomputed(model: keras.Model) -> keras.Model:
    return tfdist.recompute(model, "up")


def _compiled_gelu(model: keras.Model) -> keras.Model:
    """Lets XLA compile what stands between the collectives."""
    model.get_layer("up").activation = tf.function(keras.activations.gelu, jit_compile=True, autograph=False)
    return model


def _accumulating() -> keras.optimizers.Optimizer:
    return keras.optimizers.SGD(0.1, momentum=0.9, gradient_accumulation_steps=2)


def _clipping() -> keras.optimizers.Optimizer:
    return keras.optimizers.SGD(0.1, momentum=0.9, global_clipnorm=0.1)


def _muon() -> keras.optimizers.Optimizer:
    return keras.optimizers.Muon(0.01, epsilon=1e-3)  # of Adam, its part for biases: a small one would enlarge rounding


def _adafactor() -> keras.optimizers.Optimizer:
    return keras.optimizers.Adafactor(0.01)


OVERFLOW = "mixed_float16, overflow"
ROWS: dict[str, Technique] = {
    **{name: TECHNIQUES[name] for name in ("zero_stage_3", "zero_stage_2", "zero_stage_1", "zero_stage_0")},
    OVERFLOW: Technique({"zero_stage": 2}, "mixed_float16", first_weight=1000.0),
    "mixed_bfloat16": TECHNIQUES["mixed_bfloat16"],
    "tensor_parallel_2": TECHNIQUES["tensor_parallel_2"],
    "pipeline_2, 1F1B": TECHNIQUES["pipeline_2"],
    "pipeline_2, zero bubble": dataclasses.replace(TECHNIQUES["pipeline_2"], prepare=_zero_bubble),
    "2 x 2 x 2": Technique(
        {"zero_stage": 3, "tensor_parallel_size": 2, "pipeline_parallel_size": 2}, prepare=_all_three, divisor=_MOST_RANKS
    ),
    "owners, Muon": Technique({"zero_stage": 2}, optimizer=_muon),
    "owners, Adafactor": Technique({"zero_stage": 3}, optimizer=_adafactor),
    "clipping": Technique({"zero_stage": 3}, optimizer=_clipping),
    "accumulation": Technique({"zero_stage": 2}, optimizer=_accumulating),
    "recompute": Technique({"zero_stage": 3}, prepare=_recomputed),
    "jit_compile of a function": Technique({"zero_stage": 3}, prepare=_compiled_gelu),
    "mixed_bfloat16, stage 3": Technique({"zero_stage": 3}, "mixed_bfloat16"),
    **{
        f"{name}, TensorFloat-32": dataclasses.replace(TECHNIQUES[name], dtype="tensor_float_32")
        for name in ("zero_stage_3", "zero_stage_2", "tensor_parallel_2", "pipeline_2")
    },
}
_QUICK = ("zero_stage_3", OVERFLOW, "pipeline_2, zero bubble")
REFUSED = "compile(jit_compile=True)"


def part(card: Card) -> Part:
    """Returns the rows; they share the results of one device, and so a process."""
    references: dict[Any, Trained] = {}
    names = _QUICK if card.is_quick else tuple(ROWS)
    rows = [Row(name, functools.partial(_compare, name, references)) for name in names]
    return Part(
        name="exact",
        rows=[*rows, Row(REFUSED, _refused)],
        shares_process=True,
        columns={
            "ranks": lambda x: x.get("ranks") and str(x["ranks"]),
            "deviation": lambda x: x.get("deviation") and f"{x['deviation']:.1e}",
            "at most": lambda x: x.get("tolerance") and f"{x['tolerance']:.1e}",
            "in": lambda x: x.get("in"),
        },
        text="Losses, changes of weights, optimizer variables against one logical device, in units of the largest of each. "
        "TensorFloat-32 is off but where a row names it.",
        seconds=150,
        row_seconds=75,
    )


def _compare(name: str, references: dict[Any, Trained], card: Card) -> Finding:
    technique = ROWS[name]
    devices = card.devices(_QUICK_RANKS if card.is_quick else _MOST_RANKS)
    ranks = _MOST_RANKS if technique.divisor == _MOST_RANKS else min(_RANKS, len(devices))
    with_tf32 = technique.dtype == "tensor_float_32"
    if with_tf32 and any((one.compute_capability or (0, 0)) < (8, 0) for one in details_of(devices)):
        raise LeftOutError("these devices have no TensorFloat-32")
    rows = ROWS_PER_RANK * ranks
    with tensor_float_32(with_tf32):
        key = (technique.dtype, technique.optimizer, technique.first_weight, rows)
        if key not in references:
            references[key] = train_alone(technique, rows)
        found = train(tfdist.ShardedStrategy(devices[:ranks], **technique.settings), technique, rows)
    if name == OVERFLOW:
        _check_overflow(references[key])
    finding = compared(found, references[key], TOLERANCES[technique.dtype])
    return dataclasses.replace(finding, data={**finding.data, "ranks": ranks})


def _check_overflow(alone: Trained) -> None:
    """Raises RuntimeError unless one device, too, has had to halve the scale of its loss."""
    scales = [slot for name, slot in alone if "dynamic_scale" in name]
    if not 1 <= float(np.max(scales)) < _FIRST_SCALE:
        raise RuntimeError(f"nothing has overflowed on one device: the loss's scale is {scales}, and began as {_FIRST_SCALE}")


def _refused(card: Card) -> Finding:
    """`compile(jit_compile=True)` is refused: with collectives in it XLA could not compile the step."""
    devices = card.devices(_QUICK_RANKS if card.is_quick else _MOST_RANKS)
    with tfdist.ShardedStrategy(devices[:2]).scope():
        model = keras.Sequential([keras.Input((2,)), keras.layers.Dense(2)])
        try:
            model.compile("sgd", "mse", jit_compile=True)
            model.fit(np.ones((4, 2)), np.ones((4, 2)), verbose=0)
        except NotImplementedError as error:
            return Finding(f"refused: {error}", {"ranks": 2})
    return Finding("it was not refused", {"ranks": 2}, holds=False)
