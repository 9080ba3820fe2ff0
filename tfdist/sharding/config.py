"""The settings of a strategy, and with the mesh of its devices what a strategy tells the levels below about sharding.

A setting stands here and nowhere else: its name, type, default, check and description.
"""

import dataclasses
import difflib
import functools
import inspect
import math
import textwrap
from collections.abc import Callable, Sequence
from typing import Any

import tensorflow as tf

from tfdist import errors
from tfdist.mesh import DeviceMesh
from tfdist.sharding.compression import COMPRESSION, EXACT, Compressor
from tfdist.sharding.layout import Layout
from tfdist.sharding.placements import Shard
from tfdist.sharding.zero import ZeroPlacements, placements_of

_Check = Callable[[str, Any], Any]
# Vectors, and variables below it, are not compressed: among larger neighbours they would lose more than others.
_COMPRESSED_ELEMENTS = 4096
_SIZES = ("pipeline_parallel_size", "tensor_parallel_size", "sharding_group_size")  # of the mesh
# The line of a docstring in whose place `with_settings_listed` puts the settings.
_LIST = "...: the settings"


def _setting(default: Any, check: _Check, about: str) -> Any:
    """Returns a field of `ShardingConfig`; `check` raises, or returns what is stored; `about` is the field's description."""
    return dataclasses.field(default=default, metadata={"check": check, "about": about})


def _zero_stage(name: str, value: Any) -> int:
    placements_of(value)
    return value


def _at_least(least: int, fix: str = "") -> _Check:
    def check(name: str, value: Any) -> int:
        errors.check_integer(name, value, least, fix=fix)
        return value

    return check


def _or_none(check: _Check) -> _Check:
    return lambda name, value: None if value is None else check(name, value)


def _one_of(*values: Any) -> _Check:
    def check(name: str, value: Any) -> Any:
        if not any(value is one or isinstance(value, str) and value == one for one in values):  # 1 is not True here
            raise errors.value_error(f"`{name}` must be {' or '.join(map(str, values))}.", **{name: value})
        return value

    return check


def _floating_dtype(name: str, value: Any) -> tf.DType:
    try:
        dtype = tf.as_dtype(value)
    except TypeError:
        dtype = None
    if dtype not in (tf.float16, tf.bfloat16, tf.float32, tf.float64):
        raise errors.value_error(f"`{name}` must be a floating dtype or None (the variable's own).", **{name: value})
    return dtype


def _compressor(name: str, value: Any) -> Compressor | None:
    return COMPRESSION.now.compressor_of(name, value)


def with_settings_listed(owner: type) -> type:
    """Class decorator: replaces the line `...: the settings` in the docstring of `owner` by a description of each setting."""
    if owner.__doc__ is None:  # python -OO
        return owner
    lines = inspect.cleandoc(owner.__doc__).splitlines()
    place = lines.index(f"    {_LIST}")
    fill = functools.partial(textwrap.fill, width=124, initial_indent=" " * 4, subsequent_indent=" " * 8, break_on_hyphens=False)
    described = [fill(f"{field.name}: {field.metadata['about']}") for field in dataclasses.fields(ShardingConfig)]
    owner.__doc__ = "\n".join([*lines[:place], *described, *lines[place + 1 :]])
    return owner


@dataclasses.dataclass(frozen=True, kw_only=True)
class ShardingConfig:
    """The settings of a strategy, checked when they are given. They name no devices, so that one object may serve many programs.

    A strategy takes them as one object, as keyword arguments, or both, where a keyword replaces what the object says:

        config = tfdist.ShardingConfig(zero_stage=3, reduce_dtype="bfloat16")
        strategy = tfdist.ShardedStrategy(config=config)
        strategy = tfdist.ShardedStrategy(zero_stage=3, reduce_dtype="bfloat16")  # the same
        strategy = tfdist.ShardedStrategy(config=config, zero_stage=2)

    Args:
        ...: the settings

    Raises:
        ValueError: a setting is out of range.
    """

    zero_stage: int = _setting(
        2,
        _zero_stage,
        "0, 1, 2 or 3: what is sharded over the data ranks: nothing (0), the optimizer's state (1), gradients too (2), "
        "parameters too (3).",
    )
    tensor_parallel_size: int = _setting(
        1,
        _at_least(1, fix="1 turns it off."),
        "how many ranks share each sharded layer: those of `tfdist.layers`, or of a model that `tfdist.parallelize` has sharded. "
        "The batch is divided over `devices / tensor_parallel_size` replicas.",
    )
    pipeline_parallel_size: int = _setting(
        1,
        _at_least(1, fix="1 turns it off."),
        "how many ranks share the layers of a `tfdist.PipelineModel`, which the model to train must then be.",
    )
    sharding_group_size: int | None = _setting(
        None,
        _or_none(_at_least(1, fix="None shards over all data ranks.")),
        "hybrid sharding: over how many consecutive data ranks, such as those of a host, is sharded what the stage shards; each "
        "such group has a copy. Parameters are then gathered within a group only, and gradients are summed within it first: "
        "groups send each other a rank's shard of them, compressed where `gradient_compression` says so. It must divide the "
        "number of data ranks, and be within a host or made of whole hosts. None: over all data ranks.",
    )
    ranks_per_host: int | None = _setting(
        None,
        _or_none(_at_least(1, fix="None finds the hosts.")),
        "how many consecutive ranks, one for each device, share a host: `last_plan` separates what travels between hosts. "
        "None: in one process all ranks do; over several workers those whose addresses in TF_CONFIG name the same host.",
    )
    bucket_bytes: int = _setting(8 * 2**20, _at_least(1), "stages 0-2: gradients travel in messages of about this many bytes.")
    group_bytes: int = _setting(
        2 * 2**20,
        _at_least(0),
        "stage 3: what is gathered, and freed, at once: a layer, or consecutive layers of a model up to this many bytes, because "
        "small messages cost what large ones do; 0: each layer alone.",
    )
    prefetch: int = _setting(
        1, _at_least(0), "stage 3: how many groups are gathered before the one in use is over; each takes memory."
    )
    reshard_after_forward: bool = _setting(
        True,
        _one_of(True, False),
        "stage 3: True frees a gathered layer after forward and gathers it again for backward; False keeps it: a third less "
        "traffic, and all parameters gathered at the end of forward.",
    )
    reduce_dtype: str | tf.DType | None = _setting(
        None,
        _or_none(_floating_dtype),
        'dtype in which gradients travel; None: their own, and half-precision gradients are summed in float32. "bfloat16" is '
        'another name of `gradient_compression="bfloat16"`.',
    )
    gradient_compression: str | Compressor | None = _setting(
        None,
        _compressor,
        'how gradients travel over the data ranks in fewer bytes: "int8", "int4", "top_k" (the largest exactly, the rest in '
        'int8), "bfloat16", or one of `tfdist.compression`, such as `Int8(block_size=128)`. Variables of one dimension or of '
        "fewer than 4,096 elements travel exactly. It pays between machines, not within one: see docs/compression.md. None: "
        "exactly.",
    )
    parameter_compression: str | Compressor | None = _setting(
        None,
        _compressor,
        'stages 1-3: how parameters travel in fewer bytes: "int8", "bfloat16", or one of `tfdist.compression`; at stages 1 and '
        '2, which send what a step has changed, "int4" and "top_k", too. Ranks then compute with rounded weights, and update '
        "exact ones; "
        "variables of one dimension or of fewer than 4,096 elements are exact. None: exactly.",
    )
    kept_bytes: int = _setting(
        2**30,
        _at_least(0),
        "stage 3: a model that is called eagerly, outside replicas, puts its weights together on the first device. Up to this "
        "many bytes of them stay there until they change, or a step begins that may change them. In one process only: see "
        "`gathered`.",
    )
    gather_rows_bytes: int = _setting(
        64 * 2**20,
        _at_least(0),
        "a loss or a layer in which rows of the batch meet (negatives of other rows, neighbours, the hardest row) is computed of "
        "the rows of all devices. They are gathered where a device has at most this many bytes of them (of 1,024 rows, where "
        "their number is not known when the step is traced). 0: never. A loss whose rows are not gathered warns.",
    )
    use_kernels: bool | None = _setting(
        None,
        _one_of(True, False, None),
        "whether GELU, normalization over features, attention, projections of several axes (`EinsumDense`) and cross-entropy of "
        "integer labels are computed by tfdist's kernels, which take less time or memory than Keras's functions and differ by "
        "rounding. None: on CPUs, and Keras's functions on GPUs; True: on GPUs, too, where XLA then compiles updates of large "
        "parameters, as it does on CPUs; False: Keras's functions run.",
    )
    step_losses: str = _setting(
        "mean",
        _one_of("mean", "sum"),
        "what a loss counts as that a `train_step`, `test_step` or `compute_loss` of your own computes of a device's rows: "
        '"mean": the mean over them, as it is written for one device; "sum": a part of a sum that is divided by the global batch '
        "size, as it is written for a loop around `strategy.run`.",
    )
    check_drift_every: int = _setting(
        0,
        _at_least(0),
        "for debugging custom layers: in every so many-th step the weights that all tensor ranks hold are compared, and "
        "the step raises when they differ; 0: never.",
    )

    def __post_init__(self) -> None:
        for field in dataclasses.fields(ShardingConfig):
            object.__setattr__(self, field.name, field.metadata["check"](field.name, getattr(self, field.name)))
        self._check_parameter_compression()
        compressor = _compressor("gradient_compression", self.gradient_compression)
        is_said_twice = self.reduce_dtype == tf.bfloat16 and compressor == _compressor("reduce_dtype", "bfloat16")
        if compressor is not None and self.reduce_dtype is not None and not is_said_twice:
            raise errors.value_error(
                "`gradient_compression` and `reduce_dtype` say different things of how gradients travel.",
                gradient_compression=self.gradient_compression,
                reduce_dtype=self.reduce_dtype,
                fix='Leave one out: `gradient_compression="bfloat16"` is what `reduce_dtype="bfloat16"` is.',
            )

    def _check_parameter_compression(self) -> None:
        given = {"parameter_compression": self.parameter_compression, "zero_stage": self.zero_stage}
        compressor = _compressor("parameter_compression", self.parameter_compression)
        if compressor is None:
            return
        if self.zero_stage == 0:
            raise errors.value_error(
                "`parameter_compression` says how parameters travel, and at stage 0 none do: every rank updates all of them.",
                fix="Use `zero_stage=1`, or leave it out: `gradient_compression` compresses all that travels there.",
                **given,
            )
        if compressor.feedback is not None:
            raise errors.value_error(
                "`parameter_compression` needs no error feedback: what a step's differences lose is sent with those of the next.",
                fix="Leave `error_feedback` out here; `gradient_compression` takes it.",
                **given,
            )
        if self.zero_stage == 3 and not compressor.suits_weights:
            raise errors.value_error(
                '`parameter_compression` must be "int8", "bfloat16", one like these, or None at stage 3: weights lose too much '
                "otherwise.",
                fix="At stages 1 and 2, which send what a step has changed, all are taken, and `gradient_compression` takes all.",
                **given,
            )

    def settings(self) -> dict[str, Any]:
        """Returns the settings by name."""
        return {field.name: getattr(self, field.name) for field in dataclasses.fields(ShardingConfig)}


with_settings_listed(ShardingConfig)


def settings_of(config: ShardingConfig | None, changes: dict[str, Any]) -> ShardingConfig:
    """Returns `config`, or the defaults when it is None, with the settings `changes` in the place of its own.

    Raises:
        TypeError: a name in `changes` is not that of a setting.
        ValueError: `config` is no `ShardingConfig`, or a setting is out of range.
    """
    if config is not None and not isinstance(config, ShardingConfig):
        fix = "Make one: `tfdist.ShardingConfig(zero_stage=3)`."
        raise errors.value_error("`config` must be a `tfdist.ShardingConfig` or None.", config=config, fix=fix)
    known = {field.name for field in dataclasses.fields(ShardingConfig)}
    for name, value in changes.items():
        if name not in known:
            close = difflib.get_close_matches(name, known, 1)
            fix = f"Did you mean `{close[0]}`?" if close else f"The settings are {', '.join(sorted(known))}."
            raise TypeError(errors.message(f"`{name}` is no setting of a strategy.", fix=fix, **{name: value}))
    return ShardingConfig(**{**(config.settings() if config is not None else {}), **changes})


@dataclasses.dataclass(frozen=True, kw_only=True)
class MeshConfig(ShardingConfig):
    """The settings of one strategy together with the mesh of its devices, and what follows from both.

    Attributes:
        mesh: the devices of all workers, one rank each.
    """

    mesh: DeviceMesh

    @classmethod
    def over(cls, devices: Sequence[str], config: ShardingConfig, hosts: Sequence[int] = ()) -> "MeshConfig":
        """Returns the settings `config` on the mesh of `devices`. Raises ValueError when its sizes do not divide their number.

        `hosts` has the number of each one's host, unless `config` says which are on one; empty: all are.
        """
        sizes = {name: getattr(config, name) for name in _SIZES}
        if (each := config.ranks_per_host) is not None:
            if len(devices) % each:
                raise errors.value_error(
                    f"`ranks_per_host` must divide the number of devices, {len(devices)}.",
                    ranks_per_host=each,
                    fix="Leave it out where hosts have different numbers of devices: over several workers they are found.",
                )
            hosts = [rank // each for rank in range(len(devices))]
        return cls(mesh=DeviceMesh(tuple(devices), hosts=tuple(hosts), **sizes), **config.settings())

    @property
    def placements(self) -> ZeroPlacements:
        return placements_of(self.zero_stage)

    def travel_dtype(self, dtype: tf.DType) -> tf.DType:
        """Returns the dtype in which gradients of `dtype` are sent that are not compressed."""
        return dtype if self.reduce_dtype in (None, tf.bfloat16) else self.reduce_dtype

    @property
    def compressor(self) -> Compressor | None:
        """What `gradient_compression`, or the `reduce_dtype` that is another name of it, means; None: nothing is compressed."""
        if self.gradient_compression is None and self.reduce_dtype == tf.bfloat16:
            return _compressor("reduce_dtype", "bfloat16")
        return _compressor("gradient_compression", self.gradient_compression)

    @property
    def compressing_setting(self) -> dict[str, Any]:
        """The setting that compresses gradients, by its name."""
        name = "reduce_dtype" if self.gradient_compression is None else "gradient_compression"
        return {name: getattr(self, name)}

    @property
    def compresses(self) -> bool:
        """Whether gradients are compressed on their way over the data axis."""
        return self.compressor is not None and self.mesh.data_parallel_size > 1

    def compressor_of(self, layout: Layout) -> Compressor:
        """Returns how gradients of variables of `layout` travel: vectors and small ones exactly, which are few of the bytes."""
        return EXACT if travels_exactly(layout.shape) else self.compressor or EXACT

    @property
    def feeds_back(self) -> bool:
        """Whether ranks keep what their compressed gradients lose."""
        return self.compresses and self.compressor is not None and self.compressor.feedback is not None

    def parameter_compressor_of(self, layout: Layout) -> Compressor | None:
        """Returns how a parameter of `layout` travels; None: nothing is compressed."""
        compressor = _compressor("parameter_compression", self.parameter_compression)
        if compressor is None or self.mesh.num_shards == 1:
            return None
        return EXACT if travels_exactly(layout.shape) else compressor

    def rounds_copies(self, layout: Layout, dtype: tf.DType) -> bool:
        """Whether ranks hold rounded copies of parameters of `layout`, and exact shards that they update (stages 1 and 2)."""
        placements = self.placements
        if isinstance(placements.parameter, Shard) or not isinstance(placements.optimizer_state, Shard):
            return False
        return dtype.is_floating and dtype.size <= 4 and self.parameter_compressor_of(layout) not in (None, EXACT)

    def slot_layout(self, parameter: Layout) -> Layout:
        """Returns the layout of an optimizer slot of `parameter`: sharded as it, and flat over data where the stage says so."""
        return dataclasses.replace(parameter, data=self.placements.optimizer_state)


def travels_exactly(shape: Sequence[int]) -> bool:
    """Whether variables of a global `shape` travel exactly, whatever is compressed."""
    return len(shape) < 2 or math.prod(shape) < _COMPRESSED_ELEMENTS


def config_of(strategy: tf.distribute.Strategy) -> "MeshConfig | None":
    """Returns the settings and the mesh of a tfdist strategy, None for every other strategy."""
    return getattr(strategy, "sharding_config", None)
