"""One optimizer step, from the gradients as they left the tape to the weights: the list of `plan`, walked from top to bottom."""

import dataclasses
import math
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any

import tensorflow as tf

from tfdist import errors
from tfdist.collectives import RankProgram, current_program
from tfdist.mesh import MESH_AXES
from tfdist.optimizers import owned_step, plan
from tfdist.optimizers.after_update import constrain, update_averages
from tfdist.optimizers.clipping import clip, kind_of_clipping
from tfdist.optimizers.copy_check import check_drift
from tfdist.optimizers.given import Given, accumulates_partial_sums, take
from tfdist.optimizers.ownership import owner_of
from tfdist.optimizers.publication import publish
from tfdist.optimizers.reduction import reduce_bucket
from tfdist.optimizers.slots import publish_slots
from tfdist.optimizers.support import may_share
from tfdist.optimizers.target import local_part, variable_of
from tfdist.optimizers.update import Updates, decays
from tfdist.sharding import MeshConfig, Shard, UnshardSchedule
from tfdist.sharding.compression import COMPRESSION
from tfdist.sharding.gradient_weight import weighted
from tfdist.sharding.gradients_in_flight import GradientsInFlight
from tfdist.sharding.known_sums import KnownSums
from tfdist.sharding.shard_messages import gather_shards_in_buckets
from tfdist.sharding.slot_reads import SlotReads
from tfdist.sharding.tape_gradients import TapeGradients


def apply_gradients(optimizer: Any, grads: Sequence[Any], variables: Sequence[Any], config: MeshConfig) -> None:
    """Lets `optimizer` update `variables` with the sum of this rank's `grads` over the data axis; all but counting the step.

    The order is Keras's: unscale, accumulate, clip, decay, update, average, constrain. Raises RuntimeError where no optimizer
    may step (`stepping_program`).
    """
    program = stepping_program()
    _sum_outside_branches(optimizer, grads, variables, config, program)
    program.plan.note(program.rank, f"the optimizer is {_described(optimizer)}")
    with tf.device(program.device), program.part(TapeGradients).own_use(grads), program.part(SlotReads).stepping():
        _Step(take(optimizer, grads, variables, config, program), variables, config, program, optimizer).apply()


def stepping_program(what: str = "`optimizer.apply`") -> RankProgram:
    """Returns the program in which `what` is done here: that of the rank, or of a branch, which all ranks must then take.

    Raises RuntimeError in a loop, or a nested `tf.function`, of the function given to `strategy.run`, and outside of that.
    """
    program = current_program(what).here()
    if program is None:
        raise errors.runtime_error(
            f"{what} was called inside a loop or a nested `tf.function` of the function given to `strategy.run`; its "
            "collectives must stand outside.",
            fix="Put the loop around `strategy.run`, and `@tf.function` on the outermost function.",
        )
    for mesh_axis in MESH_AXES:  # ranks that step alone would part, also where they have nothing to send
        program.compare_branches(program.group_ranks(mesh_axis))
    return program


def reduce_gradients(grads: Sequence[Any], variables: Sequence[Any], config: MeshConfig, program: RankProgram) -> list[tf.Tensor]:
    """Sums `grads` over the data axis; each comes back as what this rank keeps of it.

    IndexedSlices are summed and made dense. What has been reduced in this trace already is not reduced again.
    """
    _sum_outside_branches(None, grads, variables, config, program)
    with tf.device(program.device), program.part(TapeGradients).own_use():
        return _Step(take(None, grads, variables, config, program), variables, config, program).reduced()


def _sum_outside_branches(
    optimizer: Any, grads: Sequence[Any], variables: Sequence[Any], config: MeshConfig, program: RankProgram
) -> None:
    """In a branch: sums gradients that were taken outside of it, there, so that the branch reads no summand."""
    graph = tf.compat.v1.get_default_graph()
    if program.is_eager:
        return
    known = program.part(KnownSums)
    by_program: dict[RankProgram, list[tuple[Any, Any]]] = {}
    for grad, variable in zip(grads, variables, strict=True):
        if tf.is_symbolic_tensor(grad) and grad.graph is not graph and known.part_of(grad) is None:
            outer = program.that_made(grad)
            if outer is not None:
                by_program.setdefault(outer, []).append((grad, variable))
    for outer, pairs in by_program.items():
        outside, theirs = [grad for grad, _ in pairs], [variable for _, variable in pairs]
        if optimizer is None or not accumulates_partial_sums(optimizer, config):
            with outer.outermost():
                reduce_gradients(outside, theirs, config, outer)
        elif outer is not program:
            outer.part(TapeGradients).sum_now(outside)


def whole_sums(grads: Sequence[Any], variables: Sequence[Any], config: MeshConfig, program: RankProgram) -> list[tf.Tensor]:
    """Sums `grads` over the data axis; each comes back whole on every rank."""
    return _gathered(reduce_gradients(grads, variables, config, program), variables, config, program)


def wholes_of(parts: Sequence[tf.Tensor], variables: Sequence[Any], config: MeshConfig, program: RankProgram) -> list[tf.Tensor]:
    """Returns whole sums, of which each rank has its part; an optimizer that is given them finds the parts again."""
    wholes = _gathered(parts, variables, config, program)
    for whole, part in zip(wholes, parts, strict=True):
        program.part(KnownSums).note(whole, part)
        if not program.is_eager:
            program.part(TapeGradients).note_whole(whole)
    return wholes


def _gathered(parts: Sequence[tf.Tensor], variables: Sequence[Any], config: MeshConfig, program: RankProgram) -> list[tf.Tensor]:
    layouts = [config.slot_layout(variable_of(variable).layout) for variable in variables]
    gathered = dict(gather_shards_in_buckets(program, parts, layouts, config.bucket_bytes, "all_gather/gradient"))
    return [gathered[place] for place in range(len(parts))]


class InStep(list[Any]):
    """The list of gradients that Keras's `apply` hands to `_backend_update_step`, where each is reduced when the plan says.

    Attributes:
        take: called with the learning rate, updates the parameters.
    """

    def __init__(self, grads: Sequence[tf.Tensor], take: Callable[[Any], None], optimizer: Any):
        super().__init__(grads)
        self.take = take
        self._name = type(optimizer).__name__

    def __iter__(self) -> Iterator[Any]:
        """Refuses an optimizer's own `_backend_update_step`, which goes over the gradients."""
        raise errors.not_implemented(
            f"{self._name} goes over the gradients in `_backend_update_step`. Under a tfdist strategy "
            "they are no list there: each is reduced when its turn comes.",
            optimizer=self._name,
            fix="Override `apply(grads, trainable_variables)`, or `update_step` for one variable, and call `super()`.",
        )


class _Step:
    """One call of `optimizer.apply` on one rank; without an `optimizer`, the reduction of gradients for another purpose."""

    def __init__(self, given: Given, variables: Sequence[Any], config: MeshConfig, program: RankProgram, optimizer: Any = None):
        self._optimizer = optimizer
        self._config = config
        self._program = program
        self._variables = variables
        self._targets = given.targets
        self._from_caller = given.from_caller
        self._updated: dict[int, tf.Tensor] = {}  # what is gathered or broadcast next
        self._latest: Any = None  # while gradients are in flight: the operation that ends the last message
        self._grads, self._weight = given.tensors, given.weight  # as far as they have come; what summands count in their sums
        self._are_summed = given.are_summed
        self._gradients = [
            plan.Gradient(
                elements=target.layout.local_elements,
                stepped=math.prod(target.state_layout.component_shape),
                dtype=grad.dtype.name,
                itemsize=grad.dtype.size,
                kind=(decays(optimizer, target.variable), target.variable.dtype.name, target.exact is None),
                is_sharded=target.layout.is_data_sharded,
                is_reduced=state.is_reduced,
                owner=owner_of(optimizer, target.variable),
                global_elements=target.layout.num_elements,
            )
            for grad, target, state in zip(given.tensors, self._targets, given.states, strict=True)
        ]
        self._limit_lead()
        self._flight = self._gradients_in_flight()

    # The list

    def apply(self) -> None:
        self._plan = plan.plan_step(self._gradients, self._settings())
        self._program.plan.steps[self._program.rank].append(self._plan)
        self._emit(self._plan.first)
        self._keep_losses()
        if self._plan.accumulation_steps:
            self._accumulate()
        else:
            self._update_parameters()
        self._emit(self._plan.last)

    def reduced(self) -> list[tf.Tensor]:
        """Returns the reduced gradients."""
        self._emit(plan.plan_reduction(self._gradients, self._settings()))
        return self._grads

    def _take(self, learning_rate: Any) -> None:
        """Walks the list from the gradients, or their accumulated means, to the new parameters: in the place of Keras's loop."""
        self._learning_rate = tf.convert_to_tensor(learning_rate)
        self._updates = Updates(self._optimizer, self._learning_rate, self._program)
        self._emit(self._plan.step)
        self._keep_losses()

    def _emit(self, actions: Iterable[plan.Action]) -> None:
        optimizer, config, program = self._optimizer, self._config, self._program
        for action in actions:
            members = getattr(action, "members", ())
            grads, targets = [self._grads[place] for place in members], [self._targets[place] for place in members]
            match action:
                case plan.Reduce(bucket):
                    label = targets[0].variable.name if bucket is None else f"bucket_{bucket}"
                    with program.order.among_activations():
                        self._replace(members, reduce_bucket(grads, targets, label, config, program, self._weight))
                    self._note_reduction(bucket, members)
                case plan.HoldBack(bucket) if self._flight is not None:
                    self._flight.hold_back(bucket, self._latest)
                case plan.Unscale():
                    self._replace(members, [grad / optimizer.loss_scale_factor for grad in grads])
                case plan.Clip(kind):
                    layouts = [target.state_layout for target in targets]
                    self._replace(members, clip(kind, getattr(optimizer, kind), grads, layouts, config, program))
                case plan.Update(vectors):
                    for vector in vectors:
                        grads, targets = ([x[place] for place in vector.members] for x in (self._grads, self._targets))
                        shards = self._updates.update(targets, grads, vector.trace)
                        self._updated.update(zip(vector.members, shards, strict=False))  # none of what is stepped in place
                case plan.Gather(bucket):
                    shards = [self._updated.get(place) for place in members]  # none of what is stepped in place
                    # What waits for the message waits for this: until then the old parameter's memory is in use, too.
                    with program.order.among_activations():
                        self._latest = publish(targets, shards, f"all_gather/bucket_{bucket}", config, program)
                case plan.Complete(bucket):
                    wholes, weights = owned_step.complete(grads, targets, bucket, program)
                    self._replace(members, wholes)
                    self._updated.update(zip(members, weights, strict=True))
                case plan.UpdateWhole(owner):
                    if program.mesh.shard_rank(program.mesh.coordinate(program.rank)) == owner:
                        for place, target, grad in zip(members, targets, grads, strict=True):
                            stepped = owned_step.update_owned(optimizer, target, self._updated[place], grad, self._learning_rate)
                            self._updated[place] = stepped
                case plan.Broadcast(bucket, owner):
                    wholes = [self._updated[place] for place in members]
                    owned_step.publish(optimizer, targets, wholes, owner, bucket, program)
                case plan.Then("average"):
                    update_averages(optimizer, config, program)
                case plan.Then("constrain"):
                    constrain(self._variables, config, program)
                case plan.Then("publish slots"):
                    publish_slots(optimizer, program)
                case plan.Then("check drift"):
                    check_drift(optimizer, self._variables, config, program)

    def _replace(self, members: Sequence[int], grads: Sequence[tf.Tensor]) -> None:
        for place, grad in zip(members, grads, strict=True):
            self._grads[place] = grad

    def _keep_losses(self) -> None:
        """Writes what the gradients of this step have lost on their way, as far as they are summed."""
        COMPRESSION.now.keep_losses(self._program, [target.variable for target in self._targets])

    def _note_reduction(self, bucket: int | None, members: Sequence[int]) -> None:
        known = self._program.part(KnownSums)
        for place in members:
            known.note(self._from_caller[place], self._grads[place])
        if self._flight is not None and bucket is not None:
            self._latest = self._grads[members[0]].op
            self._flight.note_emitted(COMPRESSION.now.encoded(self._program))

    def _update_parameters(self) -> None:
        self._program.part(UnshardSchedule).invalidate()
        # By way of the optimizer, because some have something of their own to do once per step (Nadam); it takes the step.
        optimizer, variables = self._optimizer, [target.variable for target in self._targets]
        optimizer._backend_update_step(InStep(self._grads, self._take, optimizer), variables, optimizer.learning_rate)

    def _accumulate(self) -> None:
        """Adds to the accumulators; in every `gradient_accumulation_steps`-th call updates with their mean and empties them.

        Stages 0 and 1 accumulate each rank's own gradients, and nothing travels before the last call; 2 and 3, reduced shards.
        """
        optimizer, program, grads = self._optimizer, self._program, list(self._grads)
        if accumulates_partial_sums(optimizer, self._config):
            # Each summand counts what its own step's batch says.
            weights = [None if is_summed else self._weight for is_summed in self._are_summed]
            grads, self._weight = [weighted(grad, weight) for grad, weight in zip(grads, weights, strict=True)], None
        accumulators = [
            local_part(optimizer._accumulated_gradients[optimizer._get_variable_index(target.variable)], program)
            for target in self._targets
        ]

        def last() -> None:
            self._grads = [(grad + kept) / self._plan.accumulation_steps for grad, kept in zip(grads, accumulators, strict=True)]
            self._from_caller = list(self._grads)
            self._update_parameters()
            for accumulator in optimizer._accumulated_gradients:
                accumulator = local_part(accumulator, program)
                accumulator.assign(tf.zeros_like(accumulator), read_value=False)

        def not_last() -> None:
            for grad, accumulator in zip(grads, accumulators, strict=True):
                accumulator.assign_add(grad, read_value=False)

        is_last = tf.equal((tf.convert_to_tensor(optimizer._iterations) + 1) % self._plan.accumulation_steps, 0)
        program.cond(is_last, last, not_last)

    def _settings(self) -> plan.Settings:
        optimizer, config, program = self._optimizer, self._config, self._program
        settings = plan.Settings(config.placements, config.bucket_bytes, None if self._flight is None else self._flight.most)
        if optimizer is None:
            return settings
        afterwards = {
            "average": optimizer.use_ema,
            "constrain": any(getattr(variable, "constraint", None) for variable in self._variables),
            "publish slots": config.mesh.splits_layers,
            "check drift": config.check_drift_every and (config.mesh.tensor_parallel_size > 1 or config.mesh.is_hybrid),
        }
        return dataclasses.replace(
            settings,
            is_unscaled=optimizer.loss_scale_factor is not None,
            clipping=kind_of_clipping(optimizer),
            accumulation_steps=optimizer.gradient_accumulation_steps or 0,
            accumulates_partial_sums=accumulates_partial_sums(optimizer, config),
            is_shareable=may_share(optimizer),
            may_compile=program.is_on_cpu or bool(config.use_kernels),
            gathers_soon=isinstance(config.placements.optimizer_state, Shard) and program.order.is_on_chain,
            afterwards=tuple(what for what, is_wanted in afterwards.items() if is_wanted),
        )

    def _limit_lead(self) -> None:
        gradients = self._gradients
        bucket_bytes = self._config.bucket_bytes
        messages = [*plan.whole_of_shards(gradients, bucket_bytes), *plan.buckets_of(gradients, bucket_bytes)]
        whole = [[self._grads[place] for place in bucket if not gradients[place].is_reduced] for bucket in messages]
        if whole and all(whole) and self._config.mesh.data_parallel_size > 1:
            gathers = isinstance(
                self._config.placements.optimizer_state, Shard
            )  # a bucket's new parameters, after a later reduction
            order = self._program.order
            operations = order.operations([gradient for bucket in whole for gradient in bucket])
            order.limit_lead(whole, operations, collectives_each=1 + gathers)

    def _gradients_in_flight(self) -> GradientsInFlight | None:
        """Returns those of stage 2, if they were made in the graph in which they are reduced."""
        program, config, gradients = self._program, self._config, self._gradients
        messages = plan.buckets_of(gradients, config.bucket_bytes)
        is_sharded_soon = isinstance(config.placements.gradient, Shard) and config.mesh.data_parallel_size > 1
        if not is_sharded_soon or not messages or any(gradients[place].is_reduced for bucket in messages for place in bucket):
            return None
        if program.is_eager or tf.compat.v1.get_default_graph() is not program.graph:
            return None
        numbers = {op.name: number for number, op in enumerate(program.order.operations([]))}
        return GradientsInFlight([[self._grads[place] for place in bucket] for bucket in messages], numbers, program)


def _described(optimizer: Any) -> str:
    """Returns class and hyperparameters; not the learning rate, which is a variable (and the chief's)."""
    settings = {
        name: value
        for name, value in sorted(vars(optimizer).items())
        if not name.startswith("_") and name not in ("name", "built") and isinstance(value, bool | int | float | str)
    }
    return f"{type(optimizer).__name__}({', '.join(f'{name}={value!r}' for name, value in settings.items())})"
