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
        products: when it computed products, in order.
        messages: its collectives of the axis "data", in order.
        activations: those of other axes. In forward what comes next waits for them; in backward gradients of weights do not.
        before: how many of the products come before those that gradients pass behind: all of forward, and in a pipeline all
            before the backward of the last microbatch.
        is_pipeline: whether products wait for those of other devices; how long is not what is asked here.
    """

    products: Sequence[Span]
    messages: Sequence[Message]
    activations: Sequence[Message] = ()
    before: int = 0
    is_pipeline: bool = False

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
        """Returns how much of what could be hidden passes behind products."""
        return overlap(self.products, (message.span for message in (*self.messages, *self._activations(is_after=True))))

    @property
    def cannot_hide_us(self) -> float:
        """Returns what no order could hide: the gather that the first product needs, and what needs the last gradient.

        That is the last reduction, and the gathers of parameters that follow it at stages 1 and 2.
        """
        is_first, last = self._bounds()
        return length(message.span for message in (*self.messages[:is_first], *self.messages[last:]))

    @property
    def can_hide_us(self) -> float:
        """Returns what could be hidden: all but that, as far as there are products to hide it behind.

        Of the axis "data" that are gathers of forward, behind its products; and what is sent in backward, behind those of
        backward. Activations of forward cannot be hidden; those of backward can.
        """
        return sum(min(sent, computed) for sent, computed in self._halves())

    @property
    def ideal_us(self) -> float:
        waited = length(message.span for message in self._activations(is_after=False))
        return sum(map(max, self._halves())) + self.cannot_hide_us + waited + (self._bubble_us if self.is_pipeline else 0.0)

    @property
    def hidden_share(self) -> float:
        """Returns how much of what could be hidden is, 0 to 1; 1 where there is nothing."""
        return min(1.0, self.hidden_us / self.can_hide_us) if self.can_hide_us > 0 else 1.0

    @property
    def _turn(self) -> float:
        """When the products begin that gradients pass behind."""
        return self.products[self.before][0] if self.before < len(self.products) else float("inf")

    def _bounds(self) -> tuple[bool, int]:
        """Returns whether the first message cannot be hidden, and the place of the first of those at the end that cannot."""
        last = max(
            (place for place, message in enumerate(self.messages) if message.reduces_gradients), default=len(self.messages)
        )
        return bool(self.messages) and self.messages[0].op == "AllGather", last

    def _activations(self, *, is_after: bool) -> list[Message]:
        return [message for message in self.activations if (message.span[0] >= self._turn) == is_after]

    def _halves(self) -> list[tuple[float, float]]:
        """Returns for how long messages that can be hidden pass, and products are computed, before the turn and after it."""
        is_first, last = self._bounds()
        sent = [message.span for message in self.messages[is_first:last]]
        before, after = [span for span in sent if span[0] < self._turn], [span for span in sent if span[0] >= self._turn]
        after += [message.span for message in self._activations(is_after=True)]
        place = min(self.before, len(self.products))
        return [(length(before), length(self.products[:place])), (length(after), length(self.products[place:]))]

    @property
    def _bubble_us(self) -> float:
        """For how long there was no product, once the first had begun, before the turn; nor a message of the axis "data"."""
        begin, end = self.products[0][0], min(self._turn, self.products[-1][1])
        inside = [(max(begin, a), min(end, b)) for a, b in (*self.products, *(message.span for message in self.messages))]
        return end - begin - length((a, b) for a, b in inside if a < b)

    def waits(self, least_us: float) -> int:
        """Returns for how many gathers after the first no product ran for at least `least_us` of their time."""
        gathers = [message for message in self.messages if message.op == "AllGather"][1:]
        last = max((end for _, end in self.products), default=0.0)
        exposed = [length([gather.span]) - overlap([gather.span], self.products) for gather in gathers if gather.span[0] < last]
        return sum(one >= least_us for one in exposed)
