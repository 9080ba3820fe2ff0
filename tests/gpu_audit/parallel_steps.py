"""More kinds of steps: tensor parallelism and pipelines, of up to eight ranks."""

from __future__ import annotations

import functools
from typing import Any

import keras
import tensorflow as tf

import tfdist
from tests.gpu_audit import steps
from tests.gpu_audit.steps import (
    LENGTH,
    STEPS,
    WIDTH,
    WORDS,
    adamw,
    caught,
    compiled,
    fit,
    policy,
    step,
    strategy,
    transformer,
    words,
)

PLAN = {r"words$": "vocab", r"attention": "column", r"wide": "column", r"narrow": "row", r"logits$": "column"}


def sharded() -> keras.Model:
    model = transformer()
    tfdist.parallelize(model, PLAN)
    return model


def vocabulary_loss(**settings: Any) -> keras.losses.Loss:
    return tfdist.layers.VocabParallelCrossentropy(from_logits=True, **settings)


def _tensor(stage: int, dtypes: str = "float32") -> tf.Graph:
    with policy(dtypes):
        return fit(compiled(strategy(zero_stage=stage, tensor_parallel_size=2), sharded, loss=vocabulary_loss), words())


for _number in (0, 2, 3):
    STEPS[f"tensor parallel/stage {_number}"] = functools.partial(_tensor, _number)
for _dtypes in ("mixed_float16", "mixed_bfloat16"):
    STEPS[f"tensor parallel/{_dtypes}"] = functools.partial(_tensor, 2, _dtypes)


def blocks(sequence_parallel: bool = False) -> keras.Model:
    parallel = tfdist.layers
    block = functools.partial(parallel.ParallelTransformerBlock, 2, 3 * WIDTH, sequence_parallel=sequence_parallel)
    inputs = keras.Input((LENGTH,), dtype="int32")
    x = parallel.VocabParallelEmbedding(WORDS, WIDTH, mask_zero=sequence_parallel)(inputs)
    x = block(gather_output=not sequence_parallel, dropout=0.1)(x)
    x = block(input_is_parallel=sequence_parallel)(x)
    return keras.Model(inputs, parallel.ColumnParallelDense(WORDS, gather_output=False)(x))


def _sequence_parallel(dtypes: str) -> tf.Graph:
    on = strategy(zero_stage=2, tensor_parallel_size=2, check_drift_every=3)
    build = functools.partial(blocks, sequence_parallel=True)
    loss = functools.partial(vocabulary_loss, ignore_class=3, label_smoothing=0.1)
    with policy(dtypes):
        return fit(compiled(on, build, lambda: adamw(global_clipnorm=1.0), loss, metrics=["accuracy"]), words())


for _dtypes in ("float32", "mixed_float16", "mixed_bfloat16"):
    STEPS[f"sequence parallel/{_dtypes}"] = functools.partial(_sequence_parallel, _dtypes)


# Pipelines


def _pipeline(schedule: str = "1f1b", stage: int = 2, ranks: int = 2, build: Any = transformer, **settings: Any) -> tf.Graph:
    model = lambda: tfdist.PipelineModel(build(), num_microbatches=4, schedule=schedule, **settings)  # noqa: E731
    return fit(compiled(strategy(ranks, zero_stage=stage, pipeline_parallel_size=2), model, metrics=["accuracy"]), words())


for _schedule in ("gpipe", "1f1b", "zb-h1"):
    STEPS[f"pipeline/{_schedule}"] = functools.partial(_pipeline, _schedule)
STEPS["pipeline/interleaved-1f1b"] = lambda: _pipeline("interleaved-1f1b", stages_per_rank=2)
STEPS["pipeline/recompute"] = lambda: _pipeline(recompute=True)


@step("pipeline/mixed_float16")
def _() -> tf.Graph:
    with policy("mixed_float16"):
        return _pipeline()


@step("pipeline/evaluate")
def _() -> tf.Graph:
    model = compiled(
        strategy(zero_stage=2, pipeline_parallel_size=2), lambda: tfdist.PipelineModel(transformer(), num_microbatches=4)
    )
    return caught(lambda: model.evaluate(*words(), batch_size=steps.ROWS, verbose=0))


# Of more ranks than the suite's process has devices


def _three_axes(stage: int, dtypes: str) -> tf.Graph:
    on = strategy(8, zero_stage=stage, tensor_parallel_size=2, pipeline_parallel_size=2)
    with policy(dtypes):
        model = lambda: tfdist.PipelineModel(blocks(), num_microbatches=2)  # noqa: E731
        return fit(compiled(on, model, lambda: adamw(global_clipnorm=1.0), vocabulary_loss), words())


STEPS["2x2x2/stage 2"] = functools.partial(_three_axes, 2, "float32")
STEPS["2x2x2/mixed_bfloat16"] = functools.partial(_three_axes, 1, "mixed_bfloat16")
STEPS["pipeline/stage 3, four ranks"] = lambda: _pipeline(stage=3, ranks=4)
STEPS["four ranks/stage 3"] = lambda: fit(compiled(strategy(4, zero_stage=3), transformer, metrics=["accuracy"]), words())
