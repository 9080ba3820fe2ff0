"""`Optimizer.apply` under a tfdist strategy, in the place of Keras's own; and the note of gradients that a tape returns."""

import contextlib
from collections.abc import Callable
from typing import Any

import keras
import tensorflow as tf

from tfdist import errors
from tfdist.collectives import RankProgram, in_loop, nested_functions, rank_program
from tfdist.graphs import tape
from tfdist.optimizers.step import apply_gradients, whole_sums
from tfdist.optimizers.target import variable_of
from tfdist.placements.redistribute import Redistribution
from tfdist.placements.repair import Repair
from tfdist.sharding import MeshConfig, config_of, placement
from tfdist.sharding.gradient_weight import GradientWeight
from tfdist.sharding.tape_gradients import TapeGradients


def noted(found: Any, sources: Any, is_of_weights: Callable[[Any, RankProgram], bool]) -> Any:
    """Returns `found`, the gradients of `sources` that a tape has returned, and notes those of parameters that ranks hold whole.

    So it does, in a step of Keras's trainer, with those of tensors that `is_of_weights` (see `losses.step_gradients`). Where
    the user's code reads them, it reads the sums over the ranks (`tape_gradients`). Gradients of embeddings are made dense. A
    tape in a block that holds parameters is not the user's: what it returns is not noted.
    """
    program = rank_program(peers_on="data")
    flat, sources = tf.nest.flatten(found), tf.nest.flatten(sources)
    if program is None or program.is_eager or len(flat) != len(sources):
        return found
    if tape.in_vectorized_map() or program.root.parameter_reader is not None:  # the first gives gradients of single examples
        return found
    strategy, gradients, here = tf.distribute.get_strategy(), program.part(TapeGradients), program.here()
    is_in_loop, is_of_trainer = in_loop(program.root.graph), program.part(GradientWeight).is_of_trainer
    given = [place for place, grad in enumerate(flat) if grad is not None]
    parameters = [place for place in given if _is_parameter(sources[place], strategy, is_whole=not is_in_loop)]
    may_be_tensors = is_of_trainer and here is program.root and not is_in_loop
    tensors = [place for place in given if may_be_tensors and is_of_weights(sources[place], program)]
    with contextlib.nullcontext() if here is None else here.part(Repair).not_seen():
        for place in (*parameters, *tensors):
            flat[place] = tf.convert_to_tensor(flat[place])
            if is_of_trainer and not is_in_loop and here is not None and tape.tapes_watching([flat[place]]):
                flat[place] = _read_by_all(flat[place], here.part(Redistribution))
    for place in parameters if is_in_loop else ():
        gradients.note_in_loop(flat[place], sources[place])
    if tensors:
        gradients.note([flat[place] for place in tensors], [None] * len(tensors))
    if parameters and not is_in_loop:
        if here is None or tf.compat.v1.get_default_graph() is not here.graph:
            raise nested_functions.refusal(variable_of(sources[parameters[0]]))
        places, config = [place for place in parameters if flat[place].graph is here.graph], config_of(strategy)
        here.part(TapeGradients).note(
            [flat[place] for place in places],
            [sources[place] for place in places],
            lambda grads, theirs: whole_sums(grads, theirs, config, here),
        )
    elif here is not None and here.outer is not None:  # a branch, whose gradients of sharded parameters may come out of it
        here.part(TapeGradients).be_asked()
    return tf.nest.pack_sequence_as(found, flat)


def _read_by_all(grad: tf.Tensor, redistribution: Redistribution) -> tf.Tensor:
    """Returns `grad` for tapes around the one that has returned it: what goes back to it is of readers on all ranks."""
    with tape.stop_recording():
        passed = tf.identity(grad)
    tape.record_gradient("Gradient", [passed], [grad], lambda upstream: [redistribution.of_all_readers(upstream)])
    return passed


def _is_parameter(variable: Any, strategy: tf.distribute.Strategy, is_whole: bool) -> bool:
    """Whether `variable` is one of the strategy; with `is_whole`, one that each rank holds whole."""
    value = variable if isinstance(variable, tf.Variable) else getattr(variable, "value", None)
    if not isinstance(value, tf.Variable) or getattr(value, "distribute_strategy", None) is not strategy:
        return False
    return hasattr(value, "layout") and not (is_whole and value.layout.is_data_sharded)


def apply(optimizer: Any, grads: Any, trainable_variables: Any, config: MeshConfig) -> None:
    """Takes a step: as `keras.optimizers.Optimizer.apply`, with this rank's gradients. Builds the optimizer if it must.

    Raises:
        RuntimeError: the optimizer is not built, and ranks store different layers.
        ValueError: the variables are not given, and there are not as many gradients as the optimizer was built with.
    """
    with keras.name_scope(optimizer.name, caller=optimizer):
        if not optimizer.built and trainable_variables is not None:
            if config.mesh.splits_layers:
                raise errors.runtime_error(
                    "Where ranks store different layers an optimizer must be built before the first step, on all weights.",
                    optimizer=type(optimizer).__name__,
                    fix="Call `optimizer.build(model.trainable_variables)` in `strategy.scope()`.",
                )
            with placement(is_replicated=True):  # whatever the optimizer makes that is no slot
                optimizer.build(list(trainable_variables))
        if trainable_variables is None and len(grads) != len(optimizer._trainable_variables):
            raise errors.value_error(
                f"`grads` must have one gradient for each of the {len(optimizer._trainable_variables)} variables that "
                f"{type(optimizer).__name__} was built with.",
                grads=f"{len(grads)} gradients",
                fix="Pass the variables too: `optimizer.apply(grads, trainable_variables)`.",
            )
        variables = list(optimizer._trainable_variables if trainable_variables is None else trainable_variables)
        optimizer._check_variables_are_known(variables)
        if grads:
            grads, variables = optimizer._filter_empty_gradients(grads, variables)
        apply_gradients(optimizer, grads, variables, config)
        optimizer._iterations.assign_add(1)  # here: what an optimizer assigns is looked at no further
