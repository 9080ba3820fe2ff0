"""The table of what tfdist changes in Keras and TensorFlow, and how it is installed.

Keras has no hook for much of what a sharded step needs: its optimizers, losses and callbacks assume that every device has a copy
of everything. What tfdist replaces stands here, a row each; every replacement looks at the strategy first and calls the
original, untouched, for all but tfdist's.

    import tfdist                     the table is filled; Keras and TensorFlow are as they were
    the first tfdist strategy         every row is checked against what is installed; then all are replaced, at once
    every further strategy            nothing
"""

import dataclasses
import functools
import inspect
import pkgutil
import threading
from collections.abc import Callable, Sequence
from typing import Any

import keras
import tensorflow as tf

from tfdist import errors

# What the suite was run with, as setup.py has it; of Keras 3.16 only `make test-nightly` was.
SUPPORTED = ("tensorflow>=2.21,<2.22", "keras>=3.15,<3.16")
ORIGINAL = "_tfdist_original"

# Owners that Keras 3.16 has moved.
BACKEND_NN = ("keras.src.backend.tensorflow.nn", "keras.src.backend.tensorflow.ops.nn")
BACKEND_NUMPY = ("keras.src.backend.tensorflow.numpy", "keras.src.backend.tensorflow.ops.numpy")
TRAINER = ("keras.src.trainers.trainer.Trainer", "keras.src.trainers.trainer.BaseTrainer")
TENSORFLOW_TRAINER = ("keras.src.backend.tensorflow.trainer.TensorFlowTrainer", "keras.src.backend.tensorflow.trainer.Trainer")


@dataclasses.dataclass(frozen=True)
class Replacement:
    """One function, method or value of Keras or TensorFlow that tfdist replaces.

    Args:
        owners: the dotted name of the module or class that has it; several, where versions of Keras have it in different places:
            the first that exists is meant.
        name: the attribute.
        signatures: the parameters of the functions that the replacement was written for, one of each version of Keras, as in
            "(self, grads, learning_rate=None)"; none for a value that is no function.
        why: what goes wrong without it, and so why there is no other way.
        binding: `binding(original, *args, **kwargs)` is called instead of the function; for a value, `binding(original)` is
            what replaces it.
    """

    owners: tuple[str, ...]
    name: str
    signatures: tuple[str, ...]
    why: str
    binding: Callable[..., Any]

    @property
    def owner(self) -> str:
        """The dotted name of the owner in the versions that are installed; the first of `owners` if none exists."""
        return next((name for name in self.owners if resolve(name) is not None), self.owners[0])

    def found(self) -> tuple[Any, Any]:
        """Returns the owner and the present attribute."""
        owner = resolve(self.owner)
        return owner, getattr(owner, self.name)

    def misfit(self) -> str:
        """Returns in what the row differs from the installed packages, in a few words; "" if in nothing."""
        if not hasattr(resolve(self.owner), self.name):
            return f"{self.owner}.{self.name} does not exist"
        if self.signatures and (signature := signature_of(self.found()[1])) not in self.signatures:
            return f"{self.owner}.{self.name} has the parameters {signature}, not {' or '.join(self.signatures)}"
        return ""

    def replacing(self, original: Any) -> Any:
        """Returns what stands in the place of `original`."""
        if not self.signatures:
            return self.binding(original)

        @functools.wraps(original)
        def replacing(*args: Any, **kwargs: Any) -> Any:
            return self.binding(original, *args, **kwargs)

        setattr(replacing, ORIGINAL, original)
        return replacing


class Table:
    """Rows that are installed together, once."""

    def __init__(self) -> None:
        self.rows: list[Replacement] = []
        self._is_installed = False
        self._lock = threading.Lock()

    def replaces(
        self, owner: str | Sequence[str], name: str, *, signature: str | Sequence[str] = (), why: str = ""
    ) -> Callable[..., Any]:
        """A decorator that adds a row; the decorated function stays as it is. See `Replacement` for the arguments.

        By default `signature` is the parameters of the decorated function after `original`, and `why` is its docstring. A
        function without such parameters replaces a value.
        """

        def add(binding: Callable[..., Any]) -> Callable[..., Any]:
            own = signature_of(binding, skipped=1)
            signatures = _tuple(signature or (() if own == "()" else own))
            reason = " ".join((why or binding.__doc__ or "").split())
            self.rows.append(Replacement(_tuple(owner), name, signatures, reason, binding))
            return binding

        return add

    def install(self) -> None:
        """Replaces what the rows name, all at once; does nothing when called again.

        Raises:
            NotImplementedError: a row is not true of the installed Keras or TensorFlow; nothing has been changed then.
        """
        with self._lock:
            if self._is_installed:
                return
            misfits = [misfit for row in self.rows if (misfit := row.misfit())]
            if misfits:
                raise errors.not_implemented(
                    f"tfdist was not written for these versions of Keras and TensorFlow: {'; '.join(misfits)}.",
                    versions=f"Keras {keras.__version__}, TensorFlow {tf.__version__}",
                    fix=f"Install what it was written for: {' '.join(SUPPORTED)}.",
                )
            found = [(row, *row.found()) for row in self.rows]
            for row, owner, original in found:
                setattr(owner, row.name, row.replacing(original))
            self._is_installed = True


def is_users(function: Any) -> bool:
    """Whether the user has written `function`, and no library."""
    return not (getattr(function, "__module__", None) or "").startswith(("keras.", "tensorflow.", "tfdist."))


def _tuple(names: str | Sequence[str]) -> tuple[str, ...]:
    return (names,) if isinstance(names, str) else tuple(names)


def resolve(name: str) -> Any:
    """Returns the module or class of a dotted name, None if there is none."""
    try:
        return pkgutil.resolve_name(name)
    except (ImportError, AttributeError):
        return None


def signature_of(function: Any, skipped: int = 0) -> str:
    """Returns the parameters of a function after the first `skipped`, without annotations."""
    parameters = list(inspect.signature(function).parameters.values())[skipped:]
    return str(inspect.Signature([parameter.replace(annotation=inspect.Parameter.empty) for parameter in parameters]))


TABLE = Table()
replaces, install = TABLE.replaces, TABLE.install
