"""The actions of one step of an optimizer, in order. Pure: gradients are numbers, their places in the step.

Backward makes the last layers' gradients first, so the buckets begin there. With `zero_stage=2` and four layers:

    reduce 0 (3) · hold back 2 · reduce 1 (2) · hold back 3 · reduce 2 (1) · update (3) · gather 0 (3) · reduce 3 (0) · ...

Bucket 0 is gathered when the next two have been reduced; when one has, where gathers run beside products. Stage 1, where all
full gradients exist at once, loses no time to waiting for updates between: it reduces all buckets first, but where gathers pass
so. And so does every stage if all gradients must be there before the first is used, for a norm or for accumulators.
"""

import dataclasses
import enum
import re
from collections.abc import Sequence
from typing import Any

from tfdist.collectives import assign_buckets
from tfdist.sharding import Shard, ZeroPlacements

# From this many elements on, on a rank, a parameter is large: its update is a function of its own.
LARGE_ELEMENTS = 2**17
# Small parameters are updated side by side in vectors of at most this many elements, since they are copied: half a megabyte of
# float32.
JOINT_ELEMENTS = 2**17
# From this many on the function is compiled by XLA,
COMPILED_ELEMENTS = 2**20
# if the rank steps as many in all (270 MB of parameters, gradients and slots of Adam) or of one parameter (100 MB of results).
COMPILER_PAYS_IN_ALL = 2**24
COMPILER_PAYS_IN_ONE = 2**23


@dataclasses.dataclass(frozen=True)
class Gradient:
    """One gradient and its parameter, as a plan sees them.

    Attributes:
        elements: elements of the full gradient, as it leaves the tape at stages 0 to 2.
        stepped: elements that a rank steps on: all of them, or those of a shard.
        dtype: name of the gradient's dtype.
        itemsize: bytes of one of its elements.
        kind: what must agree among parameters that are updated side by side.
        is_sharded: whether ranks store the parameter as shards (stage 3), which are stepped on in place.
        is_reduced: whether the gradient is summed over the data axis already.
        owner: the data rank that alone steps on the whole parameter; None: every rank steps on its part.
        global_elements: elements of the parameter, of which `elements` may be a shard over the tensor axis.
    """

    elements: int
    stepped: int
    dtype: str = "float32"
    itemsize: int = 4
    kind: tuple[Any, ...] = ()
    is_sharded: bool = False
    is_reduced: bool = False
    owner: int | None = None
    global_elements: int = 0


@dataclasses.dataclass(frozen=True)
class Settings:
    """The strategy and the optimizer, as a plan sees them.

    Attributes:
        placements: the ZeRO stage.
        bucket_bytes: bytes of a message to aim at.
        in_flight: how many buckets of full gradients may exist at once; None: backward makes them as it likes.
        is_unscaled: whether gradients are divided by `loss_scale_factor`.
        clipping: "clipnorm", "global_clipnorm", "clipvalue" or None.
        accumulation_steps: in every so many-th step the parameters are updated; 0: in each.
        accumulates_partial_sums: whether each rank accumulates its own gradients, which are reduced in the last of these steps.
        is_shareable: whether one update serves several parameters.
        may_compile: whether updates of very large parameters may be compiled.
        gathers_soon: whether a gather runs beside backward's products if it stands between reductions, also at stage 1, and as
            soon as it can.
        afterwards: what there is to do when the parameters are updated, in every call (`Then`).
    """

    placements: ZeroPlacements
    bucket_bytes: int
    in_flight: int | None = None
    is_unscaled: bool = False
    clipping: str | None = None
    accumulation_steps: int = 0
    accumulates_partial_sums: bool = False
    is_shareable: bool = True
    may_compile: bool = False
    gathers_soon: bool = False
    afterwards: tuple[str, ...] = ()

    @property
    def norm(self) -> str | None:
        """The kind of clipping if it needs a norm, for which all gradients must be there."""
        return self.clipping if self.clipping in ("clipnorm", "global_clipnorm") else None


class Trace(enum.Enum):
    """How the update of a vector is traced: some forty operations (Adam), which would be half of a deep model's step.

    * `INLINE`: among the step's operations.
    * `SHARED`: a function that all large parameters of one shape call.
    * `COMPILED`: such a function, compiled: one pass over memory instead of ten, for some 70 MB that the compiler takes.
    """

    INLINE = ""
    SHARED = " shared"
    COMPILED = " compiled"


@dataclasses.dataclass(frozen=True)
class Vector:
    """Parameters that are updated side by side, by one update; a single one is updated as it is."""

    members: tuple[int, ...]
    trace: Trace = Trace.INLINE

    def __str__(self) -> str:
        return f"({' '.join(map(str, self.members))}){self.trace.value}"


class Action:
    """One entry of the list. It prints as what it is called and what it is about: `members` are places of gradients."""

    def __str__(self) -> str:
        words = [re.sub("(?<!^)([A-Z])", r" \1", type(self).__name__).lower()]
        for name, value in vars(self).items():
            if name == "members":
                words.append(str(Vector(value)))
            elif name == "vectors":
                words += map(str, value)
            elif value is not None:
                words.append(f"owner {value}" if name == "owner" else str(value))
        return " ".join(words)


@dataclasses.dataclass(frozen=True)
class _Message(Action):
    bucket: int | None
    members: tuple[int, ...]


class Reduce(_Message):
    """Sums `members` over the data axis in one message; with `bucket` None they are whole gradients of sharded parameters."""


@dataclasses.dataclass(frozen=True)
class HoldBack(Action):
    """Lets the full gradients of `bucket` be computed only after the message before it in the list has arrived.

    Where gradients travel compressed, after that is encoded: see `sharding.gradients_in_flight`.
    """

    bucket: int


@dataclasses.dataclass(frozen=True)
class Unscale(Action):
    """Divides gradients by `loss_scale_factor`."""

    members: tuple[int, ...]


@dataclasses.dataclass(frozen=True)
class Clip(Action):
    """Clips gradients as the optimizer's setting `kind` says."""

    kind: str
    members: tuple[int, ...]


@dataclasses.dataclass(frozen=True)
class Update(Action):
    """Runs the optimizer's update on what the rank steps on: in place, or on shards of whole parameters to be gathered."""

    vectors: tuple[Vector, ...]

    @property
    def members(self) -> tuple[int, ...]:
        return tuple(place for vector in self.vectors for place in vector.members)


class Gather(_Message):
    """Gathers the updated shards of whole parameters, in one message, and stores the parameters."""


class Complete(_Message):
    """Gathers the whole gradients and parameters that owners step on."""


@dataclasses.dataclass(frozen=True)
class UpdateWhole(Action):
    """Lets data rank `owner` update whole parameters; the others do nothing."""

    owner: int
    members: tuple[int, ...]


@dataclasses.dataclass(frozen=True)
class Broadcast(Action):
    """Sends what data rank `owner` has updated to the others, in one message, and stores it."""

    bucket: int
    owner: int
    members: tuple[int, ...]


@dataclasses.dataclass(frozen=True)
class Then(Action):
    """Does one of what may follow a step: "average", "constrain", "publish slots" or "check drift"."""

    what: str


@dataclasses.dataclass(frozen=True)
class StepPlan:
    """One call of `optimizer.apply`.

    Attributes:
        first: what happens to the gradients before they are accumulated; nothing without accumulation.
        accumulation_steps: in every so many-th call `step` is taken, in the others gradients are accumulated; 0: in each.
        step: from gradients to updated parameters.
        last: what follows in every call.
    """

    first: Sequence[Action]
    accumulation_steps: int
    step: Sequence[Action]
    last: Sequence[Action]

    def __str__(self) -> str:
        step = " · ".join(map(str, self.step))
        if self.accumulation_steps:
            step = f"accumulate, in every {self.accumulation_steps}. call [{step}]"
        return " · ".join([*map(str, self.first), *([step] if step else []), *map(str, self.last)])


def plan_step(gradients: Sequence[Gradient], settings: Settings) -> StepPlan:
    """Returns what `optimizer.apply` does with `gradients`. It is the same on all ranks that have the same gradients."""
    planner, count, last = _Planner(gradients, settings), settings.accumulation_steps, [*map(Then, settings.afterwards)]
    if not count:
        return StepPlan([], 0, planner.whole_step(), last)
    if not settings.accumulates_partial_sums:
        return StepPlan(planner.reductions(), count, planner.updates(), last)
    first = planner.unscaled(planner.everything)
    planner = _Planner(gradients, dataclasses.replace(settings, is_unscaled=False))
    return StepPlan(first, count, planner.whole_step(), last)


def plan_reduction(gradients: Sequence[Gradient], settings: Settings) -> list[Action]:
    """Returns how `gradients` are reduced where they are wanted for something else than a step."""
    return _Planner(gradients, settings).reductions()


def buckets_of(gradients: Sequence[Gradient], bucket_bytes: int) -> list[tuple[int, ...]]:
    """Returns the gradients that leave the tape in full, in the messages in which they are reduced: the last ones first."""
    full = [place for place, gradient in enumerate(gradients) if not gradient.is_sharded]
    return _messages(gradients, full[::-1], bucket_bytes)


def whole_of_shards(gradients: Sequence[Gradient], bucket_bytes: int) -> list[tuple[int, ...]]:
    """Returns, in the same way, those of sharded parameters that are no sums yet: a tape's are, but not the program's own."""
    whole = [place for place, gradient in enumerate(gradients) if gradient.is_sharded and not gradient.is_reduced]
    return _messages(gradients, whole[::-1], bucket_bytes)


def _messages(gradients: Sequence[Gradient], places: Sequence[int], bucket_bytes: int) -> list[tuple[int, ...]]:
    sizes = [gradients[place].elements * gradients[place].itemsize for place in places]
    return _bucketed(places, sizes, bucket_bytes, [gradients[place].dtype for place in places])


class _Planner:
    def __init__(self, gradients: Sequence[Gradient], settings: Settings):
        self._gradients = gradients
        self._settings = settings
        self.everything = tuple(range(len(gradients)))
        self._sharded = tuple(place for place in self.everything if gradients[place].is_sharded)
        self._buckets = buckets_of(gradients, settings.bucket_bytes)

    def whole_step(self) -> list[Action]:
        """Returns reductions and updates, bucket by bucket where the stage shards gradients and none waits for all others."""
        settings = self._settings
        waits_for_all = settings.norm is not None or any(gradient.owner is not None for gradient in self._gradients)
        if waits_for_all or not (isinstance(settings.placements.gradient, Shard) or settings.gathers_soon):
            return [*self.reductions(), *self.updates()]
        actions = [*self._reductions_of_shards(), *self._update(self._sharded)]
        # Two reductions stand before each gather: while they travel its shards are updated, and the link does not wait for that.
        ahead = 1 if settings.in_flight == 1 or settings.gathers_soon else 2
        for bucket in range(ahead):
            actions += self._reduction(bucket)
        for bucket in range(len(self._buckets)):
            actions += [*self._reduction(bucket + ahead), *self._update_of_bucket(bucket)]
            if settings.in_flight == 1:
                actions += self._holding_back(bucket + 2)
        return actions

    def reductions(self) -> list[Action]:
        """Returns the reductions of all gradients."""
        buckets = range(len(self._buckets))
        return [*self._reductions_of_shards(), *(action for bucket in buckets for action in self._reduction(bucket))]

    def updates(self) -> list[Action]:
        """Returns what follows when all gradients are reduced."""
        settings = self._settings
        actions: list[Action] = [Clip(settings.norm, self.everything)] if settings.norm else []
        if isinstance(settings.placements.optimizer_state, Shard):
            actions += self._update(self._sharded)
            for bucket in range(len(self._buckets)):
                actions += self._update_of_bucket(bucket)
        else:
            full = [place for bucket in self._buckets for place in bucket]
            actions += self._update([*self._sharded, *full])
        return actions + self._updates_by_owners()

    def unscaled(self, members: tuple[int, ...]) -> list[Action]:
        return [Unscale(members)] if members and self._settings.is_unscaled else []

    def _reductions_of_shards(self) -> list[Action]:
        """The tape hands out sums of sharded parameters' gradients. Those that the program has made itself are summed here."""
        together = whole_of_shards(self._gradients, self._settings.bucket_bytes)
        return [*(Reduce(None, members) for members in together), *self.unscaled(self._sharded)]

    def _reduction(self, bucket: int) -> list[Action]:
        members = self._buckets[bucket] if bucket < len(self._buckets) else ()
        missing = tuple(place for place in members if not self._gradients[place].is_reduced)
        actions: list[Action] = [Reduce(bucket, missing)] if missing else []
        if missing and self._settings.in_flight is not None:
            actions += self._holding_back(bucket + self._settings.in_flight)
        return actions + self.unscaled(members)

    def _holding_back(self, bucket: int) -> list[Action]:
        return [HoldBack(bucket)] if bucket < len(self._buckets) else []

    def _update_of_bucket(self, bucket: int) -> list[Action]:
        """Stages 1 and 2: the ranks step on shards of whole parameters."""
        members = self._without_owner(self._buckets[bucket])
        return self._update(members) + ([Gather(bucket, members)] if members else [])

    def _update(self, members: Sequence[int]) -> list[Action]:
        """Every rank steps on its part; at stages 0 and 3 on what it stores."""
        members = self._without_owner(members)
        return [*self._clipped(members), Update(self._vectors(members))] if members else []

    def _clipped(self, members: tuple[int, ...]) -> list[Action]:
        return [Clip("clipvalue", members)] if self._settings.clipping == "clipvalue" else []

    def _updates_by_owners(self) -> list[Action]:
        owned = [place for place in self.everything if self._gradients[place].owner is not None]
        sizes = [self._gradients[place].global_elements * self._gradients[place].itemsize for place in owned]
        dtypes = [self._gradients[place].dtype for place in owned]
        actions: list[Action] = []
        for number, members in enumerate(_bucketed(owned, sizes, self._settings.bucket_bytes, dtypes)):
            actions += [*self._clipped(members), Complete(number, members)]
            for owner in sorted({owner for place in members if (owner := self._gradients[place].owner) is not None}):
                own = tuple(place for place in members if self._gradients[place].owner == owner)
                actions += [UpdateWhole(owner, own), Broadcast(number, owner, own)]
        return actions

    def _vectors(self, members: Sequence[int]) -> tuple[Vector, ...]:
        if not self._settings.is_shareable:
            return tuple(Vector((place,)) for place in members)
        stepped = [gradient.stepped for gradient in self._gradients]
        large = [place for place in members if stepped[place] >= LARGE_ELEMENTS]
        small = [place for place in members if stepped[place] < LARGE_ELEMENTS]
        kinds = [(self._gradients[place].kind, self._gradients[place].dtype) for place in small]
        joint = _bucketed(small, [stepped[place] for place in small], JOINT_ELEMENTS, kinds)
        return (*(Vector((place,), self._trace(place)) for place in large), *map(Vector, joint))

    def _trace(self, place: int) -> Trace:
        in_all = [self._gradients[other].stepped for other in self._without_owner(self.everything)]
        pays = sum(in_all) >= COMPILER_PAYS_IN_ALL or max(in_all) >= COMPILER_PAYS_IN_ONE
        is_compiled = self._settings.may_compile and pays and self._gradients[place].stepped >= COMPILED_ELEMENTS
        return Trace.COMPILED if is_compiled else Trace.SHARED

    def _without_owner(self, members: Sequence[int]) -> tuple[int, ...]:
        return tuple(place for place in members if self._gradients[place].owner is None)


def _bucketed(places: Sequence[int], sizes: Sequence[int], most: int, kinds: Sequence[Any]) -> list[tuple[int, ...]]:
    """Returns `places` in buckets of about `most`, each of one kind; `sizes` and `kinds` are theirs."""
    return [tuple(places[number] for number in bucket) for bucket in assign_buckets(sizes, most, kinds)]
