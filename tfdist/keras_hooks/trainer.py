"""Models: `compile` checks that model, optimizer and strategy belong together; `fit` and `predict` do without equal batches."""

import contextlib
import inspect
import threading
import weakref
from collections.abc import Callable, Iterator
from typing import Any

import keras
import tensorflow as tf

from tfdist import errors
from tfdist.checkpoint import tfdist_strategy
from tfdist.data import EPOCH_ITERATOR, EpochIterator
from tfdist.keras_hooks.table import TENSORFLOW_TRAINER, TRAINER, is_users, replaces
from tfdist.keras_layers import layer_strategy
from tfdist.keras_layers.in_stages import InStages, check_is_in_stages
from tfdist.metrics.outside_scope import move_metric
from tfdist.optimizers.outside_scope import move_optimizer
from tfdist.optimizers.support import check_variables, describe
from tfdist.sharding import config_of
from tfdist.sharding.deferral import DEFERRAL
from tfdist.sharding.sharded_activations import WHOLE

ITERATOR = "_tfdist_iterator"  # an attribute of a model: a reference to what it has looked at last


@replaces(
    TRAINER,
    "compile",
    signature="""(self, optimizer='rmsprop', loss=None, loss_weights=None, metrics=None, weighted_metrics=None, \
run_eagerly=False, steps_per_execution=1, jit_compile='auto', auto_scale_loss=True)""",
)
def _compile(original: Callable[..., None], self: Any, *args: Any, **kwargs: Any) -> None:
    """Model, optimizer and strategy must belong together, and XLA has no collectives; Keras does not look."""
    scope = tf.distribute.get_strategy() if tf.distribute.has_strategy() else None
    strategy = _strategy_of(self, scope)
    if config_of(scope) is not None and strategy is not scope:
        raise errors.value_error(
            f"The model was built under {describe(strategy)}, but is compiled under {describe(scope)}: its variables are "
            "not sharded.",
            model=self.name,
            fix="Build the model and call `compile` inside the same `strategy.scope()`.",
        )
    if config_of(strategy) is None:
        original(self, *args, **kwargs)
        return
    self._distribute_strategy = strategy
    given = inspect.signature(original).bind(self, *args, **kwargs).arguments
    if isinstance(given.get("optimizer"), keras.optimizers.Optimizer):
        move_optimizer(given["optimizer"], strategy)
    for metric in tf.nest.flatten([given.get("metrics"), given.get("weighted_metrics")]):
        if isinstance(metric, keras.metrics.Metric):
            move_metric(metric, strategy)
    with contextlib.nullcontext() if scope is not None else strategy.scope():
        original(self, *args, **kwargs)
    _check_compiled(self, strategy)


def _strategy_of(model: Any, scope: tf.distribute.Strategy | None) -> tf.distribute.Strategy | None:
    """Returns the strategy of a model that is compiled in `scope`: that of its weights, where it was made outside any scope."""
    made_in = getattr(model, "_distribute_strategy", None)
    if made_in is not None:
        return made_in
    return layer_strategy.only_strategy_of(model) if model.weights else scope


def _check_compiled(model: Any, strategy: tf.distribute.Strategy) -> None:
    if model.jit_compile:
        raise errors.not_implemented(
            "`jit_compile=True` is not supported under a tfdist strategy: XLA compiles no step that holds collectives.",
            jit_compile=model.jit_compile,
            fix='Use `jit_compile="auto"` (the default) or `False`.',
        )
    optimizer = model.optimizer
    if optimizer is not None and optimizer._distribution_strategy is not strategy:
        raise errors.value_error(
            f"The optimizer was made under {describe(optimizer._distribution_strategy)}, but the model under "
            f"{describe(strategy)}.",
            optimizer=type(optimizer).__name__,
            fix="Make the optimizer, or call `compile`, inside the model's `strategy.scope()`.",
        )
    if optimizer is not None and model.built:
        # A weight that is not made yet is made under the strategy of its `PipelineModel`.
        check_variables(optimizer, [v for v in model.trainable_variables if not DEFERRAL.now.is_deferred(v)], strategy)


@replaces(TENSORFLOW_TRAINER, "make_predict_function")
def _make_predict_function(original: Callable[..., Any], self: Any, force: bool = False) -> Any:
    """Under a strategy with a pipeline only a `PipelineModel` predicts; `compile` may come before a model is wrapped in one, and
    KerasHub's tasks compile themselves."""
    check_is_in_stages(self)
    return original(self, force)


@replaces(TENSORFLOW_TRAINER, "_maybe_symbolic_build")
def _maybe_symbolic_build(original: Callable[..., None], self: Any, iterator: Any = None, data_batch: Any = None) -> None:
    """Keras reads and averages the ranks' first batches only to learn their shape: that fails for uneven batches and strings, and
    moves a shuffled dataset on. It calls the model on symbols, which a model may not bear. Under a strategy with a pipeline only
    a `PipelineModel` trains and evaluates."""
    check_is_in_stages(self)
    if iterator is not None and tfdist_strategy(self) is not None:
        vars(self)[ITERATOR] = weakref.ref(iterator)  # keeps no data alive
    _build_on_symbols(original, self, iterator, data_batch)


def _build_on_symbols(original: Callable[..., None], self: Any, iterator: Any, data_batch: Any) -> None:
    strategy = self._distribute_strategy
    if config_of(strategy) is None:
        original(self, iterator=iterator, data_batch=data_batch)
        return
    # What is not built yet is built in the first step, as on one device: steps of one's own use the data in their own way.
    if self.run_eagerly or any(map(is_users, (type(self).train_step, type(self).test_step))):
        return
    if iterator is not None and iterator.is_generator:
        data_batch = iterator.data_adapter._first_batches[0]  # Keras will yield it again; another one would move it on
    elif iterator is not None:
        data_batch = tf.nest.map_structure(_spec_of_one_rank, iterator._distributed_dataset.element_spec)
        specs = tf.nest.flatten(data_batch)
        if any(isinstance(spec, tf.RaggedTensorSpec | tf.SparseTensorSpec) for spec in specs):
            return  # Keras would take them for dense ones
        if not all(spec is None or isinstance(spec, tf.TensorSpec) and spec.shape[1:].is_fully_defined() for spec in specs):
            for _, _, batches in iterator:
                data_batch = tf.nest.map_structure(lambda value: strategy.experimental_local_results(value)[0], next(batches))
                break
    # A call that fails on symbols fails again in the first step, if that is the user's mistake. A pipeline is built here alone.
    with contextlib.nullcontext() if isinstance(self, InStages) else contextlib.suppress(Exception), _not_called(self):
        original(self, data_batch=data_batch)


@contextlib.contextmanager
def _not_called(model: Any) -> Iterator[None]:
    """A block in which a model of built layers answers with what its outputs are known to be like.

    Keras calls it only for that, which takes as long as to trace the step of a rank forward.
    """
    is_of_keras = type(model).call.__module__ in ("keras.src.models.functional", "keras.src.models.sequential")
    if not is_of_keras or not all(layer.built for layer in model.layers):
        yield
        return
    known = model.outputs if isinstance(model, keras.Sequential) else model.output
    known = known[0] if isinstance(known, list | tuple) and len(known) == 1 else known  # so does Keras
    call, here = model.call, threading.get_ident()

    def answered(*args: Any, **kwargs: Any) -> Any:
        if threading.get_ident() != here:  # another thread predicts
            return call(*args, **kwargs)
        return tf.nest.map_structure(lambda x: tf.compat.v1.placeholder(x.dtype, x.shape), known)

    vars(model)["call"] = answered  # not as an attribute that Keras sees: it keeps those of a model
    try:
        yield
    finally:
        vars(model).pop("call", None)  # another thread may have been first


@replaces("keras.src.backend.tensorflow.trainer", "TFEpochIterator")
def _epoch_iterator(_: Any) -> Any:
    """Each worker takes as many steps as its own data, or its own arguments, say. Batches read early from a generator are lost.
    An error of a graph comes with the graph's traceback, in which nobody finds the worker whose data have ended. A `fit` that
    goes on from a backup begins its data anew."""
    return EPOCH_ITERATOR.now


def build_for_backup(model: Any, iterator: EpochIterator) -> None:
    """Builds, on symbols, what the first step of `fit` would build: a backup is restored before it. Does what it can."""
    specs = tf.nest.map_structure(_spec_of_one_rank, iterator._distributed_dataset.element_spec)
    shapes = [spec.shape[1:] for spec in tf.nest.flatten(specs) if isinstance(spec, tf.TensorSpec)]
    if all(shape.is_fully_defined() for shape in shapes):
        with contextlib.suppress(Exception), model.distribute_strategy.scope():
            model._symbolic_build(data_batch=specs)


def _spec_of_one_rank(spec: Any) -> Any:
    """Returns the spec of one rank's value, from that of the values of all; None for a value that is always None."""
    spec = getattr(spec, "_value_specs", (spec,))[0]
    return None if isinstance(spec, tf.NoneTensorSpec) else spec


@replaces(TENSORFLOW_TRAINER, "predict_on_batch")
def _predict_on_batch(original: Callable[..., Any], self: Any, x: Any) -> Any:
    """Every rank predicts the whole batch, and Keras returns it once for each of them."""
    outputs = original(self, x)
    if config_of(self._distribute_strategy) is None:
        return outputs
    rows = len(tf.nest.flatten(x)[0])
    return tf.nest.map_structure(lambda output: output[:rows], outputs)


@replaces("keras.src.backend.tensorflow.trainer", "_multi_worker_concat")
def _multi_worker_concat(original: Callable[..., Any], v: Any, strategy: tf.distribute.Strategy) -> Any:
    """Keras puts the predictions of all workers' first devices first; a worker's devices are neighbours here."""
    return original(v, strategy) if config_of(strategy) is None else strategy.gather(v, axis=0)


@replaces(TRAINER, "compute_metrics")
def _compute_metrics(original: Callable[..., Any], self: Any, x: Any, y: Any, y_pred: Any, sample_weight: Any = None) -> Any:
    """Metrics must see whole predictions, also of a layer that leaves its output sharded over the tensor axis."""
    # Without metrics nothing is gathered: a compiled model has its own mean of the loss, which sees no predictions.
    whole = WHOLE.now.all_whole(y_pred) if self._compile_metrics is not None else y_pred
    return original(self, x, y, whole, sample_weight)
