"""The compressors that have a name, and what a user may give in the place of one."""

from typing import Any

from tfdist import errors
from tfdist.extensions.compression.bfloat16 import BFloat16
from tfdist.extensions.compression.blocks import Int4, Int8
from tfdist.extensions.compression.top_k import TopK
from tfdist.sharding.compression import Compressor

NAMES: dict[str, Compressor] = {"bfloat16": BFloat16(), "int8": Int8(), "int4": Int4(), "top_k": TopK()}


def compressor_of(argument: str, value: Any) -> Compressor | None:
    """Returns the compressor that `value`, given as `argument`, means: a name, a compressor, or None.

    Raises:
        ValueError: it is none of these.
    """
    if value is None or isinstance(value, Compressor):
        return value
    if isinstance(value, str) and value in NAMES:
        return NAMES[value]
    names = ", ".join(f'"{name}"' for name in NAMES)
    is_class = isinstance(value, type) and issubclass(value, Compressor)
    fix = f"Make one: `{value.__name__}()`." if is_class else ""
    raise errors.value_error(
        f"`{argument}` must be None, {names}, or a `tfdist.compression.Compressor` such as `tfdist.compression.Int8()`.",
        fix=fix,
        **{argument: value},
    )
