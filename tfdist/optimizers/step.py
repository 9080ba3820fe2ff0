"""One optimizer step, from the gradients as they left the tape to the weights: the list of `plan`, walked from top to bottom."""

import dataclasses
import math
from collections.abc import Iterable, Iterator, Sequence
from typing import Any

import tensorflow as tf

from tfdist import errors
from tfdist.collectives import RankProgram, current_program
from tfdist.mesh import MESH_AXES
from tfdist.optimizers import owned_step, plan
from tfdist.optimizers.after_update import constrain, update_averages
from tfdist.optimizers.clipping import clip, kind_of_clipping
from tfdist.optimizers.copy_check import check_drift
from tfdist.optimizers.ownership import owner_of
from tfdist.optimizers.publication import publish
from tfdist.optimizers.reduction import agreed, own_part, reduce_bucket, summand, summand_of_sum
from tfdist.optimizers.slots import publish_slots
from tfdist.optimizers.support import changes_gradients, may_share
from tfdist.optimizers.target import Target, local_part, variable_of
from tfdist.optimizers.update import Updates, decays
from tfdist.sharding import MeshConfig, Shard, UnshardSchedule
from tfdist.sharding.compression import COMPRESSION
from tfdist.sharding.gradient_weight import GradientWeight, weighted
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
        _Step(grads, variables, config, program, optimizer).apply()


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
        return _Step(grads, variables, config, program).reduced()


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


def accumulates_partial_sums(optimizer: Any, config: MeshConfig) -> bool:
    """Whether gradients are accumulated before they are reduced: at stages 0 and 1, where a rank has room for whole ones.

    Not where a replica spans several ranks: what TensorFlow sums over ranks when it is read has one shape on all of them.
    """
    if isinstance(config.placements.gradient, Shard) or config.mesh.data_parallel_size < config.mesh.world_size:
        return False
    return bool(optimizer.gradient_accumulation_steps)


class _Step:
    """One call of `optimizer.apply` on one rank; without an `optimizer`, the reduction of gradients for another purpose."""

    def __init__(
        self, grads: Sequence[Any], variables: Sequence[Any], config: MeshConfig, program: RankProgram, optimizer: Any = None
    ):
        self._optimizer = optimizer
        self._config = config
        self._program = program
        self._variables = variables
        self._targets = [Target.of(variable, config, program) for variable in variables]
        self._given = list(grads)  # as they left the tape
        self._grads: list[tf.Tensor] = []  # as far as they have come
        self._whole: list[int] = []  # places of those that the user's code has made of sums and every rank has whole
        self._summed: set[int] = set()  # places of summands of what is summed, and weighted, already
        self._updated: dict[int, tf.Tensor] = {}  # what is gathered or broadcast next
        self._flight: GradientsInFlight | None = None
        self._latest: Any = None  # while gradients are in flight: the operation that ends the last message
        self._weight: tf.Tensor | None = None  # what this rank's gradients count in their sum

    # The list

    def apply(self) -> None:
        self._plan = plan.plan_step(*self._facts())
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
        self._emit(plan.plan_reduction(*self._facts()))
        return self._grads

    def take(self, learning_rate: Any) -> None:
        """Walks the list from the gradients, or their accumulated means, to the new parameters: in the place of Keras's loop."""
        self._learning_rate = tf.convert_to_tensor(learning_rate)
        self._updates = Updates(self._optimizer, self._learning_rate, self._program)
        self._emit(self._plan.step)
        self._keep_losses()

    def __iter__(self) -> Iterator[Any]:
        """Refuses to be the list of gradients that an optimizer's own `_backend_update_step` expects."""
        raise errors.not_implemented(
            f"{type(self._optimizer).__name__} goes over the gradients in `_backend_update_step`. Under a tfdist strategy "
            "they are no list there: each is reduced when its turn comes.",
            optimizer=type(self._optimizer).__name__,
            fix="Override `apply(grads, trainable_variables)`, or `update_step` for one variable, and call `super()`.",
        )

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
            known.note(self._given[place], self._grads[place])
        if self._flight is not None and bucket is not None:
            self._latest = self._grads[members[0]].op
            self._flight.note_emitted(COMPRESSION.now.encoded(self._program))

    def _update_parameters(self) -> None:
        self._program.part(UnshardSchedule).invalidate()
        # By way of the optimizer, because some have something of their own to do once per step (Nadam); it calls `take`.
        self._optimizer._backend_update_step(self, [target.variable for target in self._targets], self._optimizer.learning_rate)

    def _accumulate(self) -> None:
        """Adds to the accumulators; in every `gradient_accumulation_steps`-th call updates with their mean and empties them.

        Stages 0 and 1 accumulate each rank's own gradients, and nothing travels before the last call; 2 and 3, reduced shards.
        """
        optimizer, program, grads = self._optimizer, self._program, list(self._grads)
        if accumulates_partial_sums(optimizer, self._config):
            # Each summand counts what its own step's batch says.
            weights = [None if place in self._summed else self._weight for place in range(len(grads))]
            grads, self._weight = [weighted(grad, weight) for grad, weight in zip(grads, weights, strict=True)], None
        accumulators = [
            local_part(optimizer._accumulated_gradients[optimizer._get_variable_index(target.variable)], program)
            for target in self._targets
        ]

        def last() -> None:
            self._grads = [(grad + kept) / self._plan.accumulation_steps for grad, kept in zip(grads, accumulators, strict=True)]
            self._given = list(self._grads)
            self._update_parameters()
            for accumulator in optimizer._accumulated_gradients:
                accumulator = local_part(accumulator, program)
                accumulator.assign(tf.zeros_like(accumulator), read_value=False)

        def not_last() -> None:
            for grad, accumulator in zip(grads, accumulators, strict=True):
                accumulator.assign_add(grad, read_value=False)

        is_last = tf.equal((tf.convert_to_tensor(optimizer._iterations) + 1) % self._plan.accumulation_steps, 0)
        program.cond(is_last, last, not_last)

    # What the plan must know

    def _facts(self) -> tuple[list[plan.Gradient], plan.Settings]:
        """Takes the gradients as they are, and returns what the plan must know of them and of the settings."""
        optimizer, config, program = self._optimizer, self._config, self._program
        if any(program.part(KnownSums).part_of(grad) is None for grad in self._given):
            program.part(UnshardSchedule).flush(self._given)
            self._weight = program.part(GradientWeight).of_wholes()
        gradients = [self._facts_of(given, target) for given, target in zip(self._given, self._targets, strict=True)]
        if self._whole:
            grads, targets = [self._grads[place] for place in self._whole], [self._targets[place] for place in self._whole]
            self._replace(self._whole, agreed(grads, targets, config, program))
        self._limit_lead(gradients)
        self._flight = self._gradients_in_flight(gradients)
        settings = plan.Settings(config.placements, config.bucket_bytes, None if self._flight is None else self._flight.most)
        if optimizer is None:
            return gradients, settings
        afterwards = {
            "average": optimizer.use_ema,
            "constrain": any(getattr(variable, "constraint", None) for variable in self._variables),
            "publish slots": config.mesh.splits_layers,
            "check drift": config.check_drift_every and (config.mesh.tensor_parallel_size > 1 or config.mesh.is_hybrid),
        }
        return gradients, dataclasses.replace(
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

    def _facts_of(self, given: Any, target: Target) -> plan.Gradient:
        known = self._program.part(KnownSums)
        self._check_is_whole(given, target)
        if self._optimizer is not None and accumulates_partial_sums(self._optimizer, self._config):
            is_reduced = False
            if known.is_returned(given):
                COMPRESSION.now.refuse_two_sums(self._config)
                grad = summand_of_sum(known.part_of(given), target)
                self._summed.add(len(self._grads))
            else:
                grad = summand(given, target, self._weight)
        elif (grad := known.part_of(given)) is not None:
            is_reduced = True
        else:
            grad, is_reduced = own_part(given, target)
            if is_reduced:
                self._whole += [] if target.state_layout.is_data_sharded else [len(self._grads)]
                known.note(given, grad)
        self._grads.append(grad)
        return plan.Gradient(
            elements=target.layout.local_elements,
            stepped=math.prod(target.state_layout.component_shape),
            dtype=grad.dtype.name,
            itemsize=grad.dtype.size,
            kind=(decays(self._optimizer, target.variable), target.variable.dtype.name, target.exact is None),
            is_sharded=target.layout.is_data_sharded,
            is_reduced=is_reduced,
            owner=owner_of(self._optimizer, target.variable),
            global_elements=target.layout.num_elements,
        )

    def _check_is_whole(self, given: Any, target: Target) -> None:
        """Raises NotImplementedError for what an optimizer has made, in an `apply` of its own, of a shard as if it were whole."""
        if self._optimizer is None or not changes_gradients(self._optimizer) or not tf.is_tensor(given):
            return
        is_shard = given.shape == target.state_layout.component_shape != target.layout.local_shape
        if is_shard and self._program.part(KnownSums).part_of(given) is None:
            name = type(self._optimizer).__name__
            raise errors.not_implemented(
                f"{name} changes gradients in an `apply` of its own and has been given shards, as `tfdist.clip_by_global_norm` "
                "returns them.",
                optimizer=name,
                fix="Clip by `tf.clip_by_global_norm`, which returns whole gradients, or by the optimizer's `global_clipnorm`.",
            )

    def _limit_lead(self, gradients: Sequence[plan.Gradient]) -> None:
        bucket_bytes = self._config.bucket_bytes
        messages = [*plan.whole_of_shards(gradients, bucket_bytes), *plan.buckets_of(gradients, bucket_bytes)]
        whole = [[self._grads[place] for place in bucket if not gradients[place].is_reduced] for bucket in messages]
        if whole and all(whole) and self._config.mesh.data_parallel_size > 1:
            gathers = isinstance(self._config.placements.optimizer_state, Shard)  # a bucket's new parameters, behind a later one
            order = self._program.order
            operations = order.operations([gradient for bucket in whole for gradient in bucket])
            order.limit_lead(whole, operations, collectives_each=1 + gathers)

    def _gradients_in_flight(self, gradients: Sequence[plan.Gradient]) -> GradientsInFlight | None:
        """Returns those of stage 2, if they were made in the graph in which they are reduced."""
        program, config = self._program, self._config
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
