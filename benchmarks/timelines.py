"""What a step's timeline tells: how much of the collectives' time passes behind products, and how much could have."""

from __future__ import annotations

import collections
import dataclasses
import functools
import itertools
from collections.abc import Iterable, Sequence

from benchmarks import best_order
from benchmarks.best_order import Span

_MOST_OF_NUMBERS = 1024  # bytes: losses, counts and flags, not gradients


def union(spans: Iterable[Span]) -> list[Span]:
    """Returns the time that any of `spans` covers, as spans that neither touch nor overlap."""
    joined: list[Span] = []
    for begin, end in sorted(spans):
        if joined and begin <= joined[-1][1]:
            joined[-1] = (joined[-1][0], max(joined[-1][1], end))
        else:
            joined.append((begin, end))
    return joined


def length(spans: Iterable[Span]) -> float:
    return sum(end - begin for begin, end in union(spans))


def overlap(one: Iterable[Span], other: Iterable[Span]) -> float:
    """Returns the time that both cover."""
    first, second = union(one), union(other)
    return sum(max(0.0, min(a[1], b[1]) - max(a[0], b[0])) for a in first for b in second)


def extent(spans: Iterable[Span]) -> float:
    """Returns the time from the first beginning to the last end."""
    known = list(spans)
    return max(end for _, end in known) - min(begin for begin, _ in known)


@dataclasses.dataclass(frozen=True)
class Message:
    """A collective on one device, from when all of its ranks had come until it was over."""

    op: str
    span: Span
    bytes: int


@dataclasses.dataclass(frozen=True)
class Timeline:
    """One device's step.

    Attributes:
        products: when it computed products, in order.
        messages: its collectives of the axis "data", in order.
        activations: those of other axes, which products wait for.
        model: what needs what, for the best that could be.
        is_chain: whether each collective begins when the one before it is over.
    """

    products: Sequence[Span]
    messages: Sequence[Message]
    activations: Sequence[Message] = ()
    model: best_order.Model | None = None
    is_chain: bool = False

    @property
    def step_us(self) -> float:
        return extent([*self.products, *(message.span for message in (*self.messages, *self.activations))])

    @property
    def compute_us(self) -> float:
        return length(self.products)

    @property
    def message_us(self) -> float:
        return length(message.span for message in self.messages)

    @property
    def hidden_us(self) -> float:
        """Returns how much of the messages' time passes behind products."""
        return overlap(self.products, (message.span for _, message in self._large()))

    @property
    def can_hide_us(self) -> float:
        """Returns how much of it would in the best order."""
        return overlap(*self.best)

    @property
    def ideal_us(self) -> float:
        """Returns how long the step would take in the best order."""
        products, messages = self.best
        return extent([*products, *messages])

    @property
    def hidden_share(self) -> float:
        """Returns how much of what could be hidden is, 0 to 1; 1 where there is nothing."""
        return min(1.0, self.hidden_us / self.can_hide_us) if self.can_hide_us > 0 else 1.0

    @functools.cached_property
    def best(self) -> tuple[list[Span], list[Span]]:
        """When products and messages would run in the best order: see `benchmarks.best_order`.

        Numbers, such as a loss, are left out: they take no time.
        """
        model = self.model
        assert model is not None
        named = {}
        counts: collections.Counter[str] = collections.Counter()
        for kind, message in sorted(self._large(), key=lambda pair: pair[1].span):
            named[f"{kind}{counts[kind]}"] = message
            counts[kind] += 1
        of_products, of_messages = model.needs(counts["r"], counts["g"], counts["a"])
        if len(of_products) != len(self.products):
            raise ValueError(f"{len(self.products)} products in the place of {len(of_products)}.")
        places = {name: place for place, name in enumerate(named)}
        gaps = self._gaps() if model.microbatches else [0.0] * len(self.products)
        products = [
            best_order.Product(end - begin, tuple(places[name] for name in sorted(names)), gap)
            for (begin, end), names, gap in zip(self.products, of_products, gaps, strict=True)
        ]
        ranks = {"a": 0, "g": 1 if model.zero_stage == 3 else 3, "r": 2}
        messages = []
        for name, message in named.items():
            after, updated_by = of_messages[name]
            place = None if updated_by is None else places[updated_by]
            messages.append(best_order.Sent(message.span[1] - message.span[0], after, place, ranks[name[0]]))
        return best_order.schedule(products, messages, is_chain=self.is_chain)

    def _large(self) -> list[tuple[str, Message]]:
        """Returns the messages that take time, each with its kind: of a reduction, of a gather or of activations.

        Those between stages of a pipeline are not among them: how long stages wait for each other is not what is asked here.
        """
        found = [("g" if message.op == "AllGather" else "r", message) for message in self.messages]
        if self.model is None or not self.model.microbatches:
            found += [("a", message) for message in self.activations]
        return [(kind, message) for kind, message in found if message.bytes > _MOST_OF_NUMBERS]

    def _gaps(self) -> list[float]:
        """Returns, before each product up to the last backward's first, for how long this device waited for another one.

        That is for how long there was no product; nor a message of the axis "data", which is another matter.
        """
        spans = [message.span for message in self.messages]
        gaps = [0.0]
        for (_, end), (begin, _) in itertools.pairwise(self.products):
            gaps.append(max(0.0, begin - end - overlap([(end, begin)], spans)) if len(gaps) <= self.model.before else 0.0)
        return gaps

    def waits(self, least_us: float) -> int:
        """Returns for how many gathers after the first no product ran for at least `least_us` of their time."""
        gathers = [message for message in self.messages if message.op == "AllGather"][1:]
        last = max((end for _, end in self.products), default=0.0)
        exposed = [length([gather.span]) - overlap([gather.span], self.products) for gather in gathers if gather.span[0] < last]
        return sum(one >= least_us for one in exposed)
