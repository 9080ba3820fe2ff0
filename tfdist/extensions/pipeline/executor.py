"""Runs one rank's part of a schedule: any schedule, one action after the other.

An action begins when the action before it on its rank has ended: that is what bounds the activations in flight. An action that
needs a message of another rank begins when the message has arrived. Transfers belong to no action, and so overlap with them;
where they wait for each other, they stand in one order of all ranks (`schedules.messages`).

    F   the stage's inputs, and the batch -> the stage's outputs, sent on; or the loss, on the last stage
    B   gradients of the outputs -> gradients of the inputs, sent back; gradients of the weights, added up
    I   the same, but operations that only the weights' gradients need are kept for
    W   ...
"""

import dataclasses
from collections.abc import Sequence
from typing import Any

import keras
import tensorflow as tf

from tfdist import temporary
from tfdist.collectives import RankProgram, point_to_point
from tfdist.extensions.pipeline.action_clock import ActionClock
from tfdist.extensions.pipeline.gradients import GradientSum, added
from tfdist.extensions.pipeline.parameter_cache import ParameterCache
from tfdist.extensions.pipeline.schedules.actions import Action, Phase
from tfdist.extensions.pipeline.schedules.dataflow import inputs_of
from tfdist.extensions.pipeline.schedules.messages import Message, events
from tfdist.extensions.pipeline.stages.stage import StageLayer
from tfdist.extensions.pipeline.stages.stage_functions import StageCall, StageFunctions, ends_of, floats
from tfdist.extensions.pipeline.work import Work
from tfdist.graphs import tape
from tfdist.losses.global_losses import whole_batch
from tfdist.losses.sliced_batch import OWN_ROWS
from tfdist.sharding.recomputation import Recomputation
from tfdist.sharding.variable import NotHereError

_NOT_OF_THIS_STAGE = (
    "A stage can use its own layers' weights only. Let the layers that share a weight be shared as layers of the model, so that "
    "`PipelineModel` sees it, or split the model elsewhere (`stages`)."
)


@dataclasses.dataclass(eq=False)
class _Forward:
    """The part of a forward that its backward needs. With a `call` the tape begins after the call, with the stage's outputs."""

    tape: tf.GradientTape
    call: StageCall | None
    stage_inputs: list[tf.Tensor]
    targets: list[tf.Tensor]
    ends: list[tf.Tensor]  # of its outputs, that gradients begin with
    weights: dict[Any, tf.Tensor]  # that were gathered then (stage 3), of a forward without a call


@dataclasses.dataclass(eq=False)
class _Gradients:
    """The results of one backward."""

    of_inputs: list[tf.Tensor]
    of_weights: list[Any]
    made: list[tf.Operation]  # operations that wait for their action's turn
    in_turn: Sequence[tf.Operation]  # those of `made` that TensorFlow runs in the order of tracing


class Executor:
    """Runs one step of a pipeline on one rank.

    Args:
        work: the step, which the executor asks about the batch.
        functions: which compute stages, where they can.
        gradients: to which each backward adds those of its stage's weights.
        clock: is read when an action starts and when it has ended.

    Attributes:
        pipe_rank: the rank's coordinate on the mesh axis "pipe".
        end: after `run`, operations at whose end all of the rank's actions have ended.
    """

    def __init__(self, work: Work, *, functions: StageFunctions, gradients: GradientSum, clock: ActionClock | None):
        self.work, self.functions, self.gradients, self.clock = work, functions, gradients, clock
        self.schedule, self.data, self.training = work.schedule, work.data, work.training
        self.stages, self.weights = work.staged.stages, work.staged.weights
        self.program = program = work.program
        self.pipe_rank = 0 if program is None else program.mesh.coordinate(program.rank).pipe
        self._ranks = (0,) if program is None else program.group_ranks("pipe")
        self._actions = frozenset(action for actions in self.schedule.orders.values() for action in actions)
        # By the action that made it, what others begin with: of this rank, or received ahead of its turn.
        self._made: dict[Action, list[tf.Tensor]] = {}
        self._forwards: dict[tuple[int, int], _Forward] = {}
        self._to_recompute: dict[tuple[int, int], tuple[list[tf.Tensor], list[tuple[keras.Variable, tf.Tensor]]]] = {}
        self._held_back: dict[tuple[int, int], _Gradients] = {}
        self.end: Sequence[tf.Operation] = []  # of the action that was made last
        self._end_of_one_before: Sequence[tf.Operation] = []
        self._held = None if program is None else program.part(ParameterCache)
        self._recomputation = None if program is None else program.part(Recomputation)
        self._pace = _Pace(program)

    def run(self) -> None:
        """Computes the rank's actions in the schedule's order."""
        run_phase = {
            Phase.FORWARD: self._forward,
            Phase.BACKWARD: self._backward,
            Phase.BACKWARD_INPUT: self._backward_input,
            Phase.BACKWARD_WEIGHT: self._backward_weight,
        }
        for event in events(self.schedule, self.pipe_rank):
            action = event.source if isinstance(event, Message) else event
            if action.microbatch >= self.data.count or not (self.training or action.phase is Phase.FORWARD):
                continue
            before = self.end
            try:
                with tf.name_scope(f"PP/{action}"):
                    if isinstance(event, Message):
                        self._transfer(event)
                        continue
                    if self._held is not None and self.work.model.reshard_after_microbatch:
                        self._held.renew(self.end)
                    self.end = self._pace.behind(self.end, is_sent=True)
                    run_phase[action.phase](action)
                    self._read_clock(action)
            except Exception as error:
                if isinstance(error, NotHereError):
                    error.add_note(_NOT_OF_THIS_STAGE)
                error.add_note(f"In the pipeline's action {action} on rank {self.pipe_rank}:\n{self.schedule.render(action)}")
                raise
            self._end_of_one_before = before

    # Actions

    def _forward(self, action: Action) -> None:
        stage, microbatch = self.stages[action.stage_index], action.microbatch
        stage_inputs = self._receive(action)
        if stage.index > 0:
            self.work.annotate(stage, microbatch, stage_inputs)
        self._read_clock(action, stage_inputs)
        with tf.control_dependencies(self.end):
            if self.training and not self.work.model.recompute:
                outputs, losses = self._record(stage, microbatch, stage_inputs)
            else:
                if self.training:
                    # What the layers write themselves: statistics, and the states of random numbers.
                    state = [(v, tf.convert_to_tensor(v.value)) for v in stage.variables if not v.trainable]
                    self._to_recompute[stage.index, microbatch] = (stage_inputs, state)
                call = self.functions.call(stage, stage_inputs, self.data.fed[microbatch], has_backward=False)
                outputs = self._traced(stage, microbatch, stage_inputs) if call is None else call.outputs
                losses = self.work.losses(stage, microbatch, stage_inputs, outputs)
            self.work.observe(stage.index, microbatch, outputs, losses)
        if stage.index < len(self.stages) - 1:
            self._made[action] = outputs
        self._end_after([*outputs, *losses])

    def _backward(self, action: Action) -> None:
        gradients = self._take_gradients(action)
        if self._pace.is_limited and action.stage_index > 0:
            self._run_of_inputs(gradients)
            self.end = self._pace.behind(self.end, is_sent=False)
        self._run_of_weights(action, gradients)

    def _backward_input(self, action: Action) -> None:
        gradients = self._held_back[action.stage_index, action.microbatch] = self._take_gradients(action)
        self._run_of_inputs(gradients)

    def _backward_weight(self, action: Action) -> None:
        self._read_clock(action)
        self._run_of_weights(action, self._held_back.pop((action.stage_index, action.microbatch)))

    def _run_of_inputs(self, gradients: _Gradients) -> None:
        """Has what the gradients of the stage's inputs need run now, and leaves what only those of its weights need."""
        # Operations that TensorFlow orders run now: it has put those of later actions of this rank after them.
        needed = tape.ancestors([*gradients.of_inputs, *gradients.in_turn], gradients.made)
        tape.run_all_after([operation for operation in gradients.made if operation in needed], self.end)
        gradients.made = [operation for operation in gradients.made if operation not in needed]
        self._end_after(gradients.of_inputs)

    def _run_of_weights(self, action: Action, gradients: _Gradients) -> None:
        """Has what is left of a backward run now."""
        tape.run_all_after(gradients.made, self.end)
        with tf.control_dependencies(self.end):
            sums = self.gradients.add(self.weights[action.stage_index], gradients.of_weights)
        self._end_after([*gradients.of_inputs, *sums])

    # Computing

    def _traced(self, stage: StageLayer, microbatch: int, stage_inputs: list[tf.Tensor]) -> list[tf.Tensor]:
        """Computes `stage` by operations that this microbatch has for itself."""
        own_rows = temporary.context_value(OWN_ROWS, self.data.rows[microbatch] if self.data.may_be_empty else None)
        with own_rows, whole_batch():  # what layers add is weighed by the microbatch's rows
            return stage(stage_inputs, self.data.fed[microbatch], training=self.training)

    def _record(
        self, stage: StageLayer, microbatch: int, stage_inputs: list[tf.Tensor], *, is_past: bool = False
    ) -> tuple[list[tf.Tensor], list[tf.Tensor]]:
        """Returns the outputs and losses of `stage`, and keeps what the backward needs.

        A forward that `is_past` is computed from an earlier state of the stage's layers, which no traced function reads.
        """
        call = None if is_past else self.functions.call(stage, stage_inputs, self.data.fed[microbatch], has_backward=True)
        with tf.GradientTape() as recorder:
            recorder.watch(floats(stage_inputs) if call is None else call.ends)
            outputs = self._traced(stage, microbatch, stage_inputs) if call is None else call.outputs
            losses = self.work.losses(stage, microbatch, stage_inputs, outputs)
            targets = [self.work.scale(loss) for loss in losses]
        weights = {} if self._held is None or call is not None else self._held.wholes()
        is_last = stage.index == len(self.stages) - 1
        ends = ends_of(outputs) if is_last else floats(outputs)
        self._forwards[stage.index, microbatch] = _Forward(recorder, call, stage_inputs, targets, ends, weights)
        return outputs, losses

    def _compute_again(self, action: Action) -> None:
        """With `recompute`: computes a forward again, from the layers' state of then, and leaves their state alone."""
        stage, key = self.stages[action.stage_index], (action.stage_index, action.microbatch)
        if key in self._to_recompute:
            stage_inputs, state = self._to_recompute.pop(key)
            # Keras's attention takes the masks off what it is called on.
            self.work.annotate(stage, action.microbatch, stage_inputs)
            with tf.control_dependencies(self.end), keras.StatelessScope(state_mapping=state, collect_losses=True):
                self._record(stage, action.microbatch, stage_inputs, is_past=bool(state))

    def _take_gradients(self, action: Action) -> _Gradients:
        """Takes the gradients of the stage's weights and of its inputs, with `recompute` of a forward that is computed again."""
        self._compute_again(action)
        stage, microbatch = self.stages[action.stage_index], action.microbatch
        forward = self._forwards.pop((stage.index, microbatch))
        upstream = self._receive(action)
        self._read_clock(action, upstream)
        before = tape.operations_so_far()
        weights, inputs = self.weights[stage.index], floats(forward.stage_inputs)
        if forward.call is None:
            of_inputs, of_weights = _gradients_of_tape(forward, upstream, inputs, weights)
            if self._recomputation is not None:
                self._recomputation.connect_alone()
            if self._held is not None:
                self._held.move_backward(forward.weights)
        else:
            ends = forward.call.ends
            of_ends, of_losses = _gradients_of_tape(forward, [], ends, weights)
            of_inputs = forward.call.gradients_of_inputs(upstream or list(map(with_zeros, of_ends, ends)))
            of_weights = list(map(added, forward.call.gradients_of_weights(), of_losses))
        of_inputs = list(map(with_zeros, of_inputs, inputs))
        if stage.index > 0:
            self._made[action] = of_inputs
        for_loops = tape.made_for_loops(tape.operations_since(0), before)  # which stand before the forward
        made = [operation for operation in tape.operations_since(before) if operation not in for_loops]
        in_turn = [operation for operation in made if tape.has_a_turn(operation)] if forward.call is None else []
        return _Gradients(of_inputs, of_weights, made, in_turn)

    # Messages between stages

    def _receive(self, action: Action) -> list[tf.Tensor]:
        """Returns what `action` begins with, of another stage: the stage's inputs, or the gradients of its outputs."""
        source = next((one for one in inputs_of(action, self._actions) if one.stage_index != action.stage_index), None)
        if source is None:
            return [] if action.phase is Phase.FORWARD else self.work.upstream(action.microbatch)
        return self._made.pop(source) if source in self._made else self._posted(Message(source, action))

    def _transfer(self, message: Message) -> None:
        """Sends a message in its turn; receives it where receives have an order, too, else `_receive` will."""
        source, destination = self._rank_of(message.source), self._rank_of(message.taker)
        if source == self.program.rank:
            for place, x in enumerate(self._made.pop(message.source)):
                point_to_point.send_message(self.program, x, destination, f"{_label(message.source)}/{place}")
        elif point_to_point.message_transport(self.program, source).is_in_order:
            self._made[message.source] = self._posted(message)

    def _posted(self, message: Message) -> list[tf.Tensor]:
        # The inputs of a stage travel forward, the gradients of those that have any back.
        microbatch, later = message.taker.microbatch, max(message.source.stage_index, message.taker.stage_index)
        specs = self.work.input_specs(self.stages[later], microbatch)
        specs = specs if message.taker.phase is Phase.FORWARD else floats(specs)
        rank, rows = self._rank_of(message.source), self.data.fed_rows[microbatch]
        # While the action before this one runs, not earlier: what is waited for has its memory already. After it, where a thread
        # would wait: that action may need it.
        is_held = point_to_point.message_transport(self.program, rank).holds_thread
        with tf.control_dependencies(self.end if is_held else self._end_of_one_before):
            return [
                point_to_point.receive_message(self.program, spec, rows, rank, f"{_label(message.source)}/{place}")
                for place, spec in enumerate(specs)
            ]

    def _rank_of(self, action: Action) -> int:
        return self._ranks[self.schedule.rank_of(action.stage_index)]

    # Order

    def _read_clock(self, action: Action, arrived: Sequence[tf.Tensor] = ()) -> None:
        if self.clock is not None:
            self.end = self.clock.read(action, [*self.end, *arrived])

    def _end_after(self, made: Sequence[tf.Tensor]) -> None:
        """Says that the action ends when all of `made` exist."""
        if made and not tf.executing_eagerly():
            self.end = [tf.group(*made)]


def _label(source: Action) -> str:
    """Returns what the message with the result of `source` is for. A backward that is split in two sends from its first part."""
    direction = "F" if source.phase is Phase.FORWARD else "B"
    return f"pipe/{source.stage_index}{direction}{source.microbatch}"


def _gradients_of_tape(
    forward: _Forward, upstream: Sequence[tf.Tensor], sources: Sequence[tf.Tensor], weights: Sequence[Any]
) -> tuple[list[Any], list[Any]]:
    """Returns the gradients of `sources` and of `weights`: those of the losses and, given an `upstream`, of the outputs."""
    targets = [*(forward.ends if upstream else ()), *forward.targets]
    starts = [*upstream, *map(tf.ones_like, forward.targets)]
    if not targets:
        return [None] * len(sources), [None] * len(weights)
    return forward.tape.gradient(targets, (sources, weights), output_gradients=starts)


def with_zeros(gradient: Any, of: tf.Tensor) -> tf.Tensor:
    """Returns a gradient of `of`, zeros in the place of None."""
    return tf.zeros_like(of) if gradient is None else tf.convert_to_tensor(gradient)


class _Pace:
    """How far the host runs ahead of a rank's GPU in a pipeline; that of one rank in one trace.

    A message between two GPUs waits for all that both have queued when it begins: a copy does, and so does one of NCCL's sums
    (`extensions.ordering`). A host that runs ahead has queued the next actions by then, which the other rank waits for:

        GPU 0          | 0F0 | 0F1 |                        a message is 0F0's result on its way to GPU 1
        its copies                 | message | message
        GPU 1                                | 1F0 ...

    So what follows a message's source is queued when the GPU has computed the source, and the message has begun long before:

        GPU 0          | 0F0 | 0F1 | ...
        its copies           | message
        GPU 1                          | 1F0 ...

    That is so for the next action; and for the gradients of a stage's weights, which come after those of its inputs.

    Note: on a chain. Where messages have an order, one begins when that before it is over. What stands after a message's source
    waits for that end, too: the GPU must hear of it first, and so the message begins before. Of an action's source the message
    is not emitted yet, and that before it is the last on the chain; after an action its message may be, or others that come
    first in the order of all ranks, and all but the last are over. These edges lead from what is earlier in that order to what
    is later, and so close no circle.

    The GPU waits for the host once for each action, and twice for a backward.
    """

    def __init__(self, program: RankProgram | None):
        ranks = () if program is None or program.is_eager else program.group_ranks("pipe")
        self._program = program
        self.is_limited = len(ranks) > 1 and program.transport_of(ranks).waits_for_queue
        self._is_chain = self.is_limited and any(
            point_to_point.message_transport(program, other).is_in_order for other in ranks if other != program.rank
        )

    def behind(self, source: Sequence[tf.Operation], *, is_sent: bool) -> Sequence[tf.Operation]:
        """Returns what operations wait for that come after `source`, whose message `is_sent` already, or will be next."""
        if not (self.is_limited and source):
            return source
        emitted = self._program.order.emitted() if self._is_chain else []
        before = emitted[:-1] if is_sent else emitted
        return [self._program.order.on_device([*source, *before[-1:]], "actions")]
