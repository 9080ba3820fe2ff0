"""Runs one rank's part of a schedule: any schedule, one action after the other.

An action begins when the one before it on its rank has ended: that is what bounds the activations in flight. Between ranks it
begins when what it needs has arrived. Transfers belong to no action, and so overlap with them.

    F   arriving boundary (and the batch) -> leaving boundary, or the loss on the last stage
    B   gradients of what left -> gradients of what arrived, sent back; gradients of the weights, added up
    I   the same, but operations that only the weights' gradients need wait for
    W   ...
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence
from typing import Any

import keras
import tensorflow as tf

from tfdist.collectives import RankProgram, edges
from tfdist.pipeline.clock import NoClock
from tfdist.pipeline.gradients import GradientSum, added
from tfdist.pipeline.masks import Masks
from tfdist.pipeline.schedules.actions import Action, Phase
from tfdist.pipeline.schedules.schedule import Schedule
from tfdist.pipeline.stages.stage import StageLayer
from tfdist.pipeline.stages.stage_functions import StageCall, StageFunctions, floats
from tfdist.sharding import tape
from tfdist.sharding.cut_activations import Cut, cut_of_output, set_cut


@dataclasses.dataclass(eq=False)
class _Forward:
    """What backward needs of a forward that has been computed.

    With a `call` the tape begins behind it, with what left.
    """

    tape: tf.GradientTape
    call: StageCall | None
    arrived: list[tf.Tensor]
    targets: list[tf.Tensor]
    left: list[tf.Tensor]
    began: int  # operations that the graph had before


@dataclasses.dataclass(eq=False)
class _Gradients:
    """What one backward makes."""

    back: list[tf.Tensor]
    of_weights: list[Any]
    made: list[tf.Operation]  # what has to wait for its turn
    in_turn: list[tf.Operation]  # those that TensorFlow orders


class Executor:
    """One step of a pipeline on one rank.

    Args:
        schedule: what every rank does.
        stages: all stages; those of other ranks are not computed here.
        program: the rank's program; None: one device runs all stages.
        weights: per stage, the variables whose gradients are wanted.
        count: how many microbatches there are: when training, the schedule's.
        inputs_of: returns the model's inputs of a microbatch.
        rows_of: returns its rows, an int32 scalar.
        losses_of: `(stage, microbatch, left) -> losses`: the scalars whose gradients a stage's backward begins with, from what
            left it: on the last stage, the model's outputs.
        observe: is called with the same arguments and the losses, once for each microbatch.
        scale: what of a loss the gradient is taken of.
        masks: the Keras masks of what arrives.
        training: whether there is a backward.
        recompute: keep what arrived only, and compute the forward again for the backward.
        clock: is told when actions start and end.
    """

    def __init__(
        self,
        schedule: Schedule,
        stages: Sequence[StageLayer],
        program: RankProgram | None,
        *,
        weights: Sequence[Sequence[Any]],
        count: int,
        inputs_of: Callable[[int], Sequence[tf.Tensor]],
        rows_of: Callable[[int], tf.Tensor],
        losses_of: Callable[[int, int, list[tf.Tensor]], list[tf.Tensor]],
        observe: Callable[[int, int, list[tf.Tensor], list[tf.Tensor]], None],
        scale: Callable[[tf.Tensor], tf.Tensor],
        masks: Masks,
        training: bool,
        recompute: bool,
        clock: NoClock,
    ):
        self._schedule = schedule
        self._stages = stages
        self._program = program
        self._weights = weights
        self._count = count
        self._inputs_of = inputs_of
        self._rows_of = rows_of
        self._losses_of = losses_of
        self._observe = observe
        self._scale = scale
        self._masks = masks
        self._training = training
        self._recompute = recompute
        self._clock = clock
        self.pipe_rank = 0 if program is None else program.mesh.coordinate(program.rank).pipe
        is_alone = program is None or program.mesh.tensor_parallel_size == 1
        self._functions = StageFunctions(program, weights, training) if is_alone else None
        self._ranks = (0,) if program is None else program.group_ranks("pipe")
        self._here: dict[tuple[str, int, int], list[tf.Tensor]] = {}
        self._forwards: dict[tuple[int, int], _Forward] = {}
        self._recomputed: dict[tuple[int, int], tuple[list[tf.Tensor], list[tuple[keras.Variable, tf.Tensor]]]] = {}
        self._held_back: dict[tuple[int, int], _Gradients] = {}
        self._last: list[tf.Operation] = []
        self._last_but_one: list[tf.Operation] = []
        self.gradients = GradientSum()

    def run(self) -> None:
        """Computes the rank's actions. Afterwards `gradients` holds the sums over the microbatches."""
        run_phase = {
            Phase.FORWARD: self._forward,
            Phase.BACKWARD: self._backward,
            Phase.BACKWARD_INPUT: self._backward_input,
            Phase.BACKWARD_WEIGHT: self._backward_weight,
        }
        for action in self._schedule.actions(self.pipe_rank):
            if not self._training and (action.phase is not Phase.FORWARD or action.microbatch >= self._count):
                continue
            before = self._last
            try:
                with tf.name_scope(f"PP/{action}"):
                    run_phase[action.phase](action)
                    self._last = self._clock.stop(action, self._last)
            except Exception as error:
                error.add_note(f"In the pipeline's action {action} on rank {self.pipe_rank}:\n{self._schedule.render(action)}")
                raise
            self._last_but_one = before

    # Actions

    def _forward(self, action: Action) -> None:
        stage, number = self._stages[action.stage_index], action.microbatch
        arrived = self._arrivals(stage, number)
        self._last = self._clock.start(action, self._last, arrived)
        with tf.control_dependencies(self._last):
            if self._recompute and self._training:
                state = [(variable, tf.convert_to_tensor(variable.value)) for variable in stage.state()]
                left, losses = self._computed(stage, number, arrived)
                self._recomputed[stage.index, number] = (arrived, state)
            elif self._training:
                left, losses = self._record(stage, number, arrived)
            else:
                left, losses = self._computed(stage, number, arrived)
            self._observe(stage.index, number, left, losses)
        if stage.index < len(self._stages) - 1:
            self._send("F", stage.index, stage.index + 1, number, left)
        self._done([*left, *losses])

    def _call(self, stage: StageLayer, number: int, arrived: list[tf.Tensor], *, has_backward: bool) -> StageCall | None:
        """Computes `stage` by its functions; None if it has none."""
        if self._functions is None:
            return None
        return self._functions.call(stage, arrived, list(self._inputs_of(number)), has_backward=has_backward)

    def _traced(self, stage: StageLayer, number: int, arrived: list[tf.Tensor]) -> list[tf.Tensor]:
        """Computes `stage` by operations of its own."""
        return stage(arrived, list(self._inputs_of(number)), training=self._training)

    def _computed(self, stage: StageLayer, number: int, arrived: list[tf.Tensor]) -> tuple[list[tf.Tensor], list[tf.Tensor]]:
        """Returns what leaves `stage`, and its losses."""
        call = self._call(stage, number, arrived, has_backward=False)
        left = self._traced(stage, number, arrived) if call is None else call.left
        return left, self._losses_of(stage.index, number, left)

    def _record(
        self, stage: StageLayer, number: int, arrived: list[tf.Tensor], *, is_past: bool = False
    ) -> tuple[list[tf.Tensor], list[tf.Tensor]]:
        """Computes `stage` and keeps what its backward needs. If it `is_past`, its layers' state is that of another time."""
        began = tape.operations_so_far()
        call = None if is_past else self._call(stage, number, arrived, has_backward=True)
        with tf.GradientTape() as recorder:
            recorder.watch(floats(arrived if call is None else call.left))
            left = self._traced(stage, number, arrived) if call is None else call.left
            losses = self._losses_of(stage.index, number, left)
            starts = [self._scale(loss) for loss in losses]
        self._forwards[stage.index, number] = _Forward(recorder, call, arrived, starts, left, began)
        return left, losses

    def _compute_again(self, action: Action) -> None:
        """With `recompute`: computes the forward of a backward, from the state that its layers had, which stays as it is."""
        key = (action.stage_index, action.microbatch)
        if key in self._recomputed:
            arrived, state = self._recomputed.pop(key)
            # Keras's attention takes the masks off what it is called on.
            self._masks.put(action.stage_index - 1, arrived, self._inputs_of(action.microbatch))
            with tf.control_dependencies(self._last), keras.StatelessScope(state_mapping=state, collect_losses=True):
                self._record(self._stages[action.stage_index], action.microbatch, arrived, is_past=bool(state))

    def _backward(self, action: Action) -> None:
        self._compute_again(action)
        gradients = self._take_gradients(action)
        tape.run_all_after(gradients.made, self._last)
        with tf.control_dependencies(self._last):
            sums = self._add_up(action, gradients)
        self._done([*gradients.back, *sums])

    def _backward_input(self, action: Action) -> None:
        self._compute_again(action)
        gradients = self._take_gradients(action)
        # What has a turn takes it: later actions of this rank have theirs after it.
        needed = tape.ancestors([*gradients.back, *gradients.in_turn], gradients.made)
        tape.run_all_after([operation for operation in gradients.made if operation in needed], self._last)
        gradients.made = [operation for operation in gradients.made if operation not in needed]
        self._held_back[action.stage_index, action.microbatch] = gradients
        self._done(gradients.back)

    def _backward_weight(self, action: Action) -> None:
        gradients = self._held_back.pop((action.stage_index, action.microbatch))
        self._last = self._clock.start(action, self._last)
        tape.run_all_after(gradients.made, self._last)
        with tf.control_dependencies(self._last):
            self._done(self._add_up(action, gradients))

    def _take_gradients(self, action: Action) -> _Gradients:
        """Takes the gradients of the weights and of what arrived, which are sent back."""
        stage, number = self._stages[action.stage_index], action.microbatch
        forward = self._forwards.pop((stage.index, number))
        upstream = self._upstream(stage, forward, number)
        self._last = self._clock.start(action, self._last, upstream)
        before = tape.operations_so_far()
        weights = self._weights[stage.index]
        if forward.call is None:
            back, of_weights = _gradients_of_tape(forward, upstream, floats(forward.arrived), weights)
        else:
            left = floats(forward.left)
            of_left, of_losses = _gradients_of_tape(forward, [], left, weights)
            back = forward.call.gradients_of_input(upstream or _with_zeros(of_left, left))
            of_weights = list(map(added, forward.call.gradients_of_weights(), of_losses))
        back = _with_zeros(back, floats(forward.arrived))
        # The gradient of a loop changes the loop's forward, and some of what it adds comes before that.
        made = tape.operations_since(before)
        before_forward = tape.ancestors(tape.operations_since(forward.began)[: -len(made) or None], made)
        if stage.index > 0:
            self._send("B", stage.index, stage.index - 1, number, back)
        made = [operation for operation in made if operation not in before_forward]
        in_turn = [operation for operation in made if tape.has_a_turn(operation)] if forward.call is None else []
        return _Gradients(back, of_weights, made, in_turn)

    def _add_up(self, action: Action, gradients: _Gradients) -> list[tf.Tensor]:
        return self.gradients.add(self._weights[action.stage_index], gradients.of_weights)

    # Between stages

    def _arrivals(self, stage: StageLayer, number: int) -> list[tf.Tensor]:
        if stage.index == 0:
            return []
        inputs = self._inputs_of(number)
        rows = inputs[0].shape[0]
        is_cut = self._program is not None and self._program.mesh.tensor_parallel_size > 1
        cuts = [cut_of_output(tensor) if is_cut else None for tensor in stage.arriving]
        specs = [
            tf.TensorSpec([rows, *self._local_shape(tensor.shape, cut)[1:]], tensor.dtype)
            for tensor, cut in zip(stage.arriving, cuts, strict=True)
        ]
        arrived = self._receive("F", stage.index - 1, number, specs)
        for x, cut in zip(arrived, cuts, strict=True):
            set_cut(x, cut)
        self._masks.put(stage.index - 1, arrived, inputs)
        return arrived

    def _local_shape(self, shape: Sequence[int | None], cut: Cut | None) -> Sequence[int | None]:
        return shape if cut is None else cut.local_shape(shape, self._program.mesh.tensor_parallel_size)

    def _upstream(self, stage: StageLayer, forward: _Forward, number: int) -> list[tf.Tensor]:
        if stage.index == len(self._stages) - 1:
            return []
        specs = [tf.TensorSpec(x.shape, x.dtype) for x in floats(forward.left)]
        return self._receive("B", stage.index + 1, number, specs)

    def _send(self, phase: str, source: int, destination: int, number: int, tensors: Sequence[tf.Tensor]) -> None:
        to = self._schedule.rank_of(destination)
        if to == self.pipe_rank:
            self._here[phase, source, number] = list(tensors)
            return
        for place, x in enumerate(tensors):
            edges.send(self._program, x, self._ranks[to], f"pipe/{source}{phase}{number}/{place}")

    def _receive(self, phase: str, source: int, number: int, specs: Sequence[tf.TensorSpec]) -> list[tf.Tensor]:
        at = self._schedule.rank_of(source)
        if at == self.pipe_rank:
            return self._here.pop((phase, source, number))
        rows, label = self._rows_of(number), f"pipe/{source}{phase}{number}"
        # While the action before this one runs, not earlier: what is waited for has its memory already. After it, where a thread
        # would wait: that action may need it.
        is_held = edges.holds_thread(self._program, self._ranks[at])
        with tf.control_dependencies(self._last if is_held else self._last_but_one):
            return [
                edges.receive(self._program, spec, rows, self._ranks[at], f"{label}/{place}") for place, spec in enumerate(specs)
            ]

    # Order

    def _done(self, made: Sequence[tf.Tensor]) -> None:
        """Says that the action ends when all of `made` exist."""
        if not tf.executing_eagerly():
            made = [x for x in made if x is not None]
            self._last = [tf.group(*made)] if made else self._last


def _gradients_of_tape(
    forward: _Forward, upstream: Sequence[tf.Tensor], sources: Sequence[tf.Tensor], weights: Sequence[Any]
) -> tuple[list[Any], list[Any]]:
    """Returns the gradients of `sources` and of `weights`: of what left, if it has an `upstream`, and of the losses."""
    targets = [*(floats(forward.left) if upstream else ()), *forward.targets]
    starts = [*upstream, *map(tf.ones_like, forward.targets)]
    if not targets:
        return [None] * len(sources), [None] * len(weights)
    found = forward.tape.gradient(targets, [*sources, *weights], output_gradients=starts)
    return found[: len(sources)], found[len(sources) :]


def _with_zeros(gradients: Sequence[Any], of: Sequence[tf.Tensor]) -> list[tf.Tensor]:
    return [tf.zeros_like(x) if g is None else tf.convert_to_tensor(g) for x, g in zip(of, gradients, strict=True)]
