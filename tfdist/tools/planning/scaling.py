"""Scaling laws: how many operations a training takes, how many tokens a model wants, and how long that is.

    operations   C = 6 N D + 12 L h s D      N parameters, D tokens; L layers, heads of together h, sequences of s tokens
    tokens       D = 20 N                    what is optimal for C = 6 N D operations: N = sqrt(C / 120)

Source: Kaplan et al. 2020, *Scaling Laws for Neural Language Models*, for 6 N D; Hoffmann et al. 2022, *Training Compute-Optimal
Large Language Models* (Chinchilla), for the tokens: some 20 for each parameter, by its approaches 1 and 2.
"""

import dataclasses
import math
from typing import Any

from tfdist import errors

TOKENS_PER_PARAMETER = 20
_SECONDS_PER_DAY = 24 * 3600


def optimal_tokens(parameters: float) -> float:
    """Returns how many tokens are optimal for so many parameters: 20 each. Raises ValueError when they are not positive."""
    _check_positive(parameters=parameters)
    return float(TOKENS_PER_PARAMETER * parameters)


def optimal_parameters(flops: float) -> float:
    """Returns how many parameters are optimal for so many operations: sqrt(C / 120), trained on 20 tokens each.

    Raises:
        ValueError: `flops` is not positive.
    """
    _check_positive(flops=flops)
    return math.sqrt(flops / (6 * TOKENS_PER_PARAMETER))


@dataclasses.dataclass(frozen=True)
class Training:
    """A training from beginning to end. Prints as a few lines.

    Attributes:
        parameters: N.
        tokens: D.
        flops: what it takes, with attention's where they are known.
        days: how long it takes at the throughput that was given; None: there was none.
    """

    parameters: float
    tokens: float
    flops: float
    days: float | None = None

    def __str__(self) -> str:
        best, optimal = optimal_parameters(self.flops), optimal_tokens(self.parameters)
        time = ""
        if self.days is not None:
            time = f", {self.days:,.1f} days" if self.days >= 1 else f", {24 * self.days:,.2g} hours"
        lines = [
            f"{count_text(self.parameters)} parameters, {count_text(self.tokens)} tokens: {self.flops:.3g} FLOPs{time}",
            f"{self.tokens / self.parameters:.3g} tokens for each parameter; {TOKENS_PER_PARAMETER} are optimal (Chinchilla): "
            f"{count_text(optimal)}",
            f"optimal for {self.flops:.3g} FLOPs: {count_text(best)} parameters, {count_text(optimal_tokens(best))} tokens",
        ]
        return "\n".join(lines)


def training(
    parameters: float,
    *,
    tokens: float | None = None,
    flops: float | None = None,
    attention_flops_per_token: float = 0.0,
    flops_per_second: float | None = None,
) -> Training:
    """Returns what a training takes, given either its tokens or its operations.

    Args:
        parameters: N.
        tokens: D, all that are seen, repeated ones too; None where `flops` are given, or for the optimal number.
        flops: the operations that there are.
        attention_flops_per_token: 12 L h s of forward and backward; 0 leaves them out, as it is usually done.
        flops_per_second: of all devices together, as they are used; None: no time is told.

    Raises:
        ValueError: `tokens` and `flops` are both given, or a number is not positive.
    """
    if tokens is not None and flops is not None:
        raise errors.value_error("`tokens` or `flops` must be None: one follows from the other.", tokens=tokens, flops=flops)
    given = {"tokens": tokens, "flops": flops, "flops_per_second": flops_per_second}
    _check_positive(parameters=parameters, **{name: value for name, value in given.items() if value is not None})
    per_token = 6.0 * parameters + attention_flops_per_token
    if tokens is None:
        tokens = optimal_tokens(parameters) if flops is None else flops / per_token
    total = per_token * tokens
    return Training(parameters, tokens, total, total / flops_per_second / _SECONDS_PER_DAY if flops_per_second else None)


def count_text(count: float) -> str:
    """Returns "70.6 B" for a number of parameters or tokens."""
    for unit, scale in (("T", 1e12), ("B", 1e9), ("M", 1e6), ("k", 1e3)):
        if count >= scale:
            return f"{count / scale:.3g} {unit}"
    return f"{count:.3g}"


def _check_positive(**numbers: Any) -> None:
    for name, value in numbers.items():
        if isinstance(value, bool) or not isinstance(value, int | float) or not 0 < value < math.inf:
            raise errors.value_error(f"`{name}` must be a positive number.", **{name: value})
