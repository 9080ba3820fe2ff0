"""The best that a device could do with a step's products and messages: what needs what, and the schedule that follows from it.

A device computes one product at a time and is in one message at a time. Both go on side by side, as far as they do not need each
other:

    a product of forward      the gather of its layer's parameters (stage 3), activations of the layers before (tensor ranks)
    a product of backward     the second gather (for the gradient of its input), activations of the layers behind
    a gather of stage 3       that no more than `prefetch + 1` groups of parameters exist
    a reduction               the products of its layers' gradients
    a gather of new values    its own reduction, and the update, which stands on the stream of the products: so the end of one
                              (stages 1 and 2)

Products keep their order, and take as long as they did. Of messages that could begin, activations go first, then gathers that
products need, then reductions. On a chain, between processes, they keep the order in which they were sent, and each begins at
the end of a product: when the one before it is over, TensorFlow lets it wait for the product that runs.

Nobody waits for the host there, and kernels other than products take no time: no order of emission could be faster.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence

Span = tuple[float, float]  # from, to; microseconds


@dataclasses.dataclass(frozen=True)
class Product:
    """A product that takes `us`, `gap_us` after the one before at the earliest, when the messages `after` are over."""

    us: float
    after: tuple[int, ...] = ()
    gap_us: float = 0.0


@dataclasses.dataclass(frozen=True)
class Sent:
    """A message that takes `us`, when the first `after_products` products are over, and what reads the message `updated_by`.

    Of two that could begin the one of the smaller `rank` does.
    """

    us: float
    after_products: int = 0
    updated_by: int | None = None
    rank: int = 0


def schedule(products: Sequence[Product], messages: Sequence[Sent], *, is_chain: bool = False) -> tuple[list[Span], list[Span]]:
    """Returns when products and messages would run. Times begin at 0.

    Raises:
        ValueError: they wait for each other.
    """
    computed: list[Span] = []
    sent: dict[int, Span] = {}

    def at_end(time: float) -> float:
        """The end of the product that runs at `time`."""
        return next((end for begin, end in computed if begin < time < end), time)

    def begin_of_product() -> float | None:
        if len(computed) == len(products) or not all(place in sent for place in products[len(computed)].after):
            return None
        product = products[len(computed)]
        free = computed[-1][1] if computed else 0.0
        return max(free + product.gap_us, *(sent[place][1] for place in product.after), 0.0)

    def begin_of_message(place: int) -> float | None:
        message = messages[place]
        if message.after_products > len(computed) or (message.updated_by is not None and message.updated_by not in sent):
            return None
        ready = computed[message.after_products - 1][1] if message.after_products else 0.0
        if message.updated_by is not None:
            ready = max(ready, at_end(sent[message.updated_by][1]))
        begin = max(ready, *(end for _, end in sent.values()), 0.0)
        return at_end(begin) if is_chain else begin

    while len(computed) < len(products) or len(sent) < len(messages):
        waiting = [place for place in range(len(messages)) if place not in sent]
        begins = [(begin_of_message(place), messages[place].rank, place) for place in (waiting[:1] if is_chain else waiting)]
        possible = sorted((begin, rank, place) for begin, rank, place in begins if begin is not None)
        product = begin_of_product()
        if product is not None and (not possible or product < possible[0][0] or (is_chain and product <= possible[0][0])):
            computed.append((product, product + products[len(computed)].us))
        elif possible:
            begin, _, place = possible[0]
            sent[place] = (begin, begin + messages[place].us)
        else:
            raise ValueError(f"They wait for each other: {len(computed)} products and messages {sorted(sent)} are over.")
    return computed, [sent[place] for place in range(len(messages))]


@dataclasses.dataclass(frozen=True)
class Model:
    """Dense layers of equal size, on one device of a mesh.

    Attributes:
        layers: those of the device.
        zero_stage: of the strategy; 0 as well for TensorFlow's own.
        prefetch: of stage 3.
        tensor: whether the layers are tensor-parallel, in pairs.
        microbatches: of a pipeline under 1F1B, on its first rank; 0: none.
    """

    layers: int
    zero_stage: int = 0
    prefetch: int = 1
    tensor: bool = False
    microbatches: int = 0

    @property
    def before(self) -> int:
        """How many products come before those that gradients pass behind: those of the last backward."""
        if not self.microbatches:
            return self.layers
        return self.microbatches * (3 * self.layers - 1) - (2 * self.layers - 1)  # nobody asks for the first input's gradient

    def backward(self) -> list[tuple[str, int]]:
        """Returns the products of the last backward: gradients of inputs ("x") and of weights ("w") of each layer."""
        order: list[tuple[str, int]] = []
        if self.tensor:  # a pair's activations are sent behind the gradients of its inputs
            for column in range(self.layers - 2, -1, -2):
                inputs = [("x", column + 1), ("x", column)] if column else [("x", 1)]
                order += [*inputs, ("w", column + 1), ("w", column)]
            return order
        for layer in reversed(range(self.layers)):
            order += [("w", layer), ("x", layer)] if layer else [("w", 0)]
        return order

    def needs(self, reductions: int, gathers: int, activations: int) -> tuple[list[set[str]], dict[str, tuple[int, str | None]]]:
        """Returns what products need, and what messages need: see `Product` and `Sent`.

        Messages are named "r0" (a reduction), "g0" (a gather) and "a0" (activations), each kind in the order of its sending.

        Raises:
            ValueError: there are not as many messages as such a step has.
        """
        ends = {(kind, layer): self.before + place for place, (kind, layer) in enumerate(self.backward())}
        number_of_products = self.before + len(ends)
        of_products: list[set[str]] = [set() for _ in range(number_of_products)]
        of_messages: dict[str, tuple[int, str | None]] = {}
        each = self._layers_each(reductions, "reductions")
        for number in range(reductions):
            layers = range(self.layers - (number + 1) * each, self.layers - number * each)
            of_messages[f"r{number}"] = (1 + max(ends["w", layer] for layer in layers), None)
        if self.zero_stage == 3:
            self._add_gathers(gathers, ends, of_products, of_messages)
        else:
            if gathers not in (0, reductions):
                raise ValueError(f"{reductions} reductions, but {gathers} gathers of new parameters.")
            of_messages |= {f"g{number}": (of_messages[f"r{number}"][0], f"r{number}") for number in range(gathers)}
        if activations or self.tensor:
            self._add_activations(activations, ends, of_products, of_messages)
        return of_products, of_messages

    def _layers_each(self, number: int, what: str) -> int:
        if not number or self.layers % number:
            raise ValueError(f"{number} {what} of {self.layers} layers.")
        return self.layers // number

    def _add_gathers(self, gathers, ends, of_products, of_messages) -> None:
        groups = gathers if self.microbatches else (gathers + 1) // 2  # the last is kept for backward
        each = self._layers_each(groups, "groups")
        for group in range(groups):
            layers, freed = range(group * each, (group + 1) * each), group - self.prefetch - 1
            of_messages[f"g{group}"] = (0 if self.microbatches or freed < 0 else (freed + 1) * each, None)
            for layer in layers:
                of_products[layer].add(f"g{group}")
        for number, group in enumerate(reversed(range(gathers - groups)), groups):
            freed = group + self.prefetch + 1
            last = ends["x", freed * each] + 1 if freed < groups else self.before
            of_messages[f"g{number}"] = (last, None)
            for layer in range(max(1, group * each), (group + 1) * each):
                of_products[ends["x", layer]].add(f"g{number}")

    def _add_activations(self, activations, ends, of_products, of_messages) -> None:
        pairs = self.layers // 2
        if activations != 2 * pairs - 1:
            raise ValueError(f"{activations} messages of activations of {pairs} pairs of layers.")
        for pair in range(pairs):
            of_messages[f"a{pair}"] = (2 * pair + 2, None)
            of_products[min(2 * pair + 2, self.before)].add(f"a{pair}")
        for number, pair in enumerate(range(pairs - 1, 0, -1), pairs):
            of_messages[f"a{number}"] = (ends["x", 2 * pair] + 1, None)
            of_products[min(ends["x", 2 * pair - 1], ends["w", 2 * pair - 1])].add(f"a{number}")
