"""The best plan is dry-run; what the dry run refutes is taken from the plans that fit, and the next best takes its place."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence

from tfdist.planning.candidate import Candidate
from tfdist.planning.dry_run import DryRun
from tfdist.planning.search import Estimated, ranked

# After so many plans that a dry run has refuted the next one stands unconfirmed.
_TRIES = 4


def with_best_confirmed(
    found: Sequence[Estimated], run: Callable[[Candidate, float], DryRun], tell: Callable[[str], object]
) -> list[Estimated]:
    """Returns the plans, the best of which a dry run has confirmed; of those before it, it has been told why they are not.

    `run` makes the dry run of a candidate, for devices of so many bytes; `tell` is given a line for each.
    """
    plans = list(found)
    for _ in range(_TRIES):
        best = plans[0]
        if not best.fits or best.dry_run is not None:
            break
        tell(f"confirming {best.candidate.name()} by a dry run")
        plans = ranked([dataclasses.replace(best, dry_run=run(best.candidate, best.limit)), *plans[1:]])
    return plans
