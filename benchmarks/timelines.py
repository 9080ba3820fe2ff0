"""What a step's timeline tells: how much of the collectives' time passes behind products, and how much could have."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable, Sequence

Span = tuple[float, float]  # from, to; microseconds
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


@dataclasses.dataclass(frozen=True)
class Message:
    """A collective on one device, from when all of its ranks had come until it was over."""

    op: str
    span: Span
    bytes: int

    @property
    def reduces_gradients(self) -> bool:
        return self.op in ("AllReduce", "ReduceScatter") and self.bytes > _MOST_OF_NUMBERS


@dataclasses.dataclass(frozen=True)
class Timeline:
    """One device's step.

    Attributes:
        products: when it computed products.
        messages: its collectives of the axis "data", in order.
        activations: those of other axes: what comes next needs them, but for gradients of weights.
    """

    products: Sequence[Span]
    messages: Sequence[Message]
    activations: Sequence[Message] = ()

    @property
    def step_us(self) -> float:
        spans = [*self.products, *(message.span for message in (*self.messages, *self.activations))]
        return max(end for _, end in spans) - min(begin for begin, _ in spans)

    @property
    def compute_us(self) -> float:
        return length(self.products)

    @property
    def message_us(self) -> float:
        return length(message.span for message in self.messages)

    @property
    def hidden_us(self) -> float:
        return overlap(self.products, (message.span for message in self.messages))

    @property
    def cannot_hide_us(self) -> float:
        """Returns what no order could hide: the gather that the first product needs, and what needs the last gradient.

        That is the last reduction, and the gathers of parameters that follow it at stages 1 and 2.
        """
        last = max(
            (place for place, message in enumerate(self.messages) if message.reduces_gradients), default=len(self.messages)
        )
        is_first = bool(self.messages) and self.messages[0].op == "AllGather"
        return length(message.span for message in (*self.messages[:is_first], *self.messages[last:]))

    @property
    def can_hide_us(self) -> float:
        """Returns what could be hidden: all but that, as far as there are products to hide it behind."""
        return min(self.message_us - self.cannot_hide_us, self.compute_us)

    @property
    def ideal_us(self) -> float:
        activations = [message.span for message in self.activations]
        waited = length(activations) - overlap(activations, self.products)
        return max(self.compute_us, self.message_us - self.cannot_hide_us) + self.cannot_hide_us + waited

    @property
    def hidden_share(self) -> float:
        """Returns how much of what could be hidden is, 0 to 1; 1 where there is nothing."""
        return min(1.0, self.hidden_us / self.can_hide_us) if self.can_hide_us > 0 else 1.0

    def waits(self, least_us: float) -> int:
        """Returns for how many gathers after the first no product ran for at least `least_us` of their time."""
        gathers = [message for message in self.messages if message.op == "AllGather"][1:]
        last = max((end for _, end in self.products), default=0.0)
        exposed = [length([gather.span]) - overlap([gather.span], self.products) for gather in gathers if gather.span[0] < last]
        return sum(one >= least_us for one in exposed)
