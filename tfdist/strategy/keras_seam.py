"""Where Keras's `Trainer` assumes mirrored variables and equal batches: the few methods that tfdist overrides.

Every override looks at the strategy first and falls through, untouched, for all but tfdist's. The names are private to Keras:
tests/test_private_names.py fails when they change.

    Trainer.compile                    model, optimizer and strategy must belong together; no XLA
    TensorFlowTrainer._maybe_symbolic_build   Keras reads and averages the ranks' first batches only to learn their shape:
                                              that fails for uneven batches and strings, and moves a shuffled dataset on
    TensorFlowTrainer.predict_on_batch        every rank predicts the whole batch: return it once
    trainer._multi_worker_concat              `predict` over workers: Keras deals the rows to all workers' first devices
                                              first; here a worker's devices are neighbours, and `gather` keeps their order
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import tensorflow as tf
from keras.src.backend.tensorflow import trainer as tensorflow_trainer
from keras.src.backend.tensorflow.trainer import TensorFlowTrainer
from keras.src.trainers.trainer import Trainer

from tfdist import errors
from tfdist.optimizers.support import check_variables, describe
from tfdist.override import override
from tfdist.pipeline import PipelineModel
from tfdist.sharding import config_of


@override("compile", Trainer)
def _compile(original: Callable[..., None], self: Any, *args: Any, **kwargs: Any) -> None:
    scope = tf.distribute.get_strategy() if tf.distribute.has_strategy() else None
    made_by = getattr(self, "_distribute_strategy", None)
    if config_of(scope) is not None and made_by is not scope:
        raise ValueError(
            errors.message(
                f"The model was built under {describe(made_by)}, but is compiled under {describe(scope)}: its variables are "
                "not sharded.",
                model=self.name,
                fix="Build the model and call `compile` inside the same `strategy.scope()`.",
            )
        )
    original(self, *args, **kwargs)
    if config_of(made_by) is not None:
        _check_compiled(self, made_by)


def _check_compiled(model: Any, strategy: tf.distribute.Strategy) -> None:
    if model.jit_compile:
        raise NotImplementedError(
            errors.message(
                "`jit_compile=True` is not supported under a tfdist strategy: XLA has no collectives on CPU.",
                jit_compile=model.jit_compile,
                fix='Use `jit_compile="auto"` (the default) or `False`.',
            )
        )
    if strategy.mesh.pipeline_parallel_size > 1 and not isinstance(model, PipelineModel):
        raise ValueError(
            errors.message(
                "Under a strategy with a pipeline the model to train must be a `PipelineModel`.",
                model=type(model).__name__,
                pipeline_parallel_size=strategy.mesh.pipeline_parallel_size,
                fix="Wrap it: `tfdist.PipelineModel(model, num_microbatches=...)`.",
            )
        )
    optimizer = model.optimizer
    if optimizer is not None and optimizer._distribution_strategy is not strategy:
        raise ValueError(
            errors.message(
                f"The optimizer was made under {describe(optimizer._distribution_strategy)}, but the model under "
                f"{describe(strategy)}.",
                optimizer=type(optimizer).__name__,
                fix="Make the optimizer, or call `compile`, inside the model's `strategy.scope()`.",
            )
        )
    if optimizer is not None and model.built:
        check_variables(optimizer, model.trainable_variables, strategy)


@override("_maybe_symbolic_build", TensorFlowTrainer)
def _maybe_symbolic_build(original: Callable[..., None], self: Any, iterator: Any = None, data_batch: Any = None) -> None:
    strategy = self._distribute_strategy
    if config_of(strategy) is None or iterator is None:
        original(self, iterator=iterator, data_batch=data_batch)
        return
    batch = tf.nest.map_structure(_rank_spec, iterator._distributed_dataset.element_spec)
    if any(isinstance(spec, tf.RaggedTensorSpec | tf.SparseTensorSpec) for spec in tf.nest.flatten(batch)):
        return  # Keras would take them for dense ones; as on one device, what is not built yet is built in the first step
    if not all(_has_known_shape(spec) for spec in tf.nest.flatten(batch)):
        for _, _, batches in iterator:
            batch = tf.nest.map_structure(lambda value: strategy.experimental_local_results(value)[0], next(batches))
            break
    original(self, data_batch=batch)


def _rank_spec(spec: Any) -> Any:
    """Returns the spec of one rank's value, from that of the values of all; None for a value that is always None."""
    spec = getattr(spec, "_value_specs", (spec,))[0]
    return None if isinstance(spec, tf.NoneTensorSpec) else spec


def _has_known_shape(spec: Any) -> bool:
    """Whether all but the number of rows is known."""
    is_dense = isinstance(spec, tf.TensorSpec) and spec.shape.rank is not None
    return spec is None or is_dense and spec.shape[1:].is_fully_defined()


@override("predict_on_batch", TensorFlowTrainer)
def _predict_on_batch(original: Callable[..., Any], self: Any, x: Any) -> Any:
    outputs = original(self, x)
    if config_of(self._distribute_strategy) is None:
        return outputs
    rows = len(tf.nest.flatten(x)[0])
    return tf.nest.map_structure(lambda output: output[:rows], outputs)


@override("_multi_worker_concat", tensorflow_trainer)
def _multi_worker_concat(original: Callable[..., Any], value: Any, strategy: tf.distribute.Strategy) -> Any:
    return original(value, strategy) if config_of(strategy) is None else strategy.gather(value, axis=0)
