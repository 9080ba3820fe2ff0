"""Python's garbage collector in processes that trace graphs: some 100,000 objects each, few of them garbage."""

import gc


def collect_seldom() -> None:
    """With Python's own thresholds a graph would be looked through again and again while it is traced."""
    gc.set_threshold(100_000, 20, 100)


def leave_alone_what_is_there() -> None:
    """Takes all that is alive out of the collector's sight."""
    gc.collect()
    gc.freeze()
