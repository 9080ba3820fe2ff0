"""How many threads an operation of one rank may use, where several ranks share the cores of a machine.

TensorFlow gives each process a pool of as many threads as there are cores, and cuts every operation in as many parts. With a rank
on every core these parts wait for each other's cores: a pipeline of small operations takes 1.4 to 1.5
times as long on two cores (`docs/notes/benchmarks.md`).
"""

import contextlib
import os

import tensorflow as tf

_set_here: int | None = None


def share_cores(ranks: int) -> None:
    """Gives each of the `ranks` that compute on this machine's CPU its part of the cores, at least one.

    Does nothing where the number of threads has been chosen, by `tf.config.threading.set_intra_op_parallelism_threads` or the
    environment variable TF_NUM_INTRAOP_THREADS, where TensorFlow is already initialised, and for one rank.
    """
    global _set_here
    present = tf.config.threading.get_intra_op_parallelism_threads() or None  # 0: as many as cores
    if ranks < 2 or os.environ.get("TF_NUM_INTRAOP_THREADS", "").strip() or present != _set_here:
        return
    threads = max(1, cores() // ranks)
    with contextlib.suppress(RuntimeError):  # initialised
        tf.config.threading.set_intra_op_parallelism_threads(threads)
        _set_here = threads


def operations_at_once() -> int:
    """Returns how many threads TensorFlow has, or will have, to run the operations of a step side by side."""
    asked = int(os.environ.get("TF_NUM_INTEROP_THREADS") or 0)
    chosen = tf.config.threading.get_inter_op_parallelism_threads() or asked
    return chosen if chosen > 0 else cores()


def cores() -> int:
    """Returns how many cores this process may use."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
