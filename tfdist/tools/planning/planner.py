"""`tfdist.plan`: will it fit, how fast, and which way."""

import functools
import os
import pathlib
import re
from collections.abc import Callable, Sequence
from typing import Any

import keras

from tfdist import errors
from tfdist.extensions.compression import compressor_of
from tfdist.sharding import ShardingConfig
from tfdist.tools.planning.data_sheets import from_sheet
from tfdist.tools.planning.dry_run import dry_run_of
from tfdist.tools.planning.estimates import Estimates
from tfdist.tools.planning.hardware import Hardware, from_file
from tfdist.tools.planning.memory import memory_of
from tfdist.tools.planning.plans import Plans
from tfdist.tools.planning.rank_trace import Job
from tfdist.tools.planning.scaling import Training, training
from tfdist.tools.planning.search import Choices, Estimated, divisors, search, with_best_confirmed
from tfdist.tools.planning.sizes import bytes_of, count_of
from tfdist.tools.planning.traced_model import trace

_DEFAULT_HARDWARE = "h100"
# Of a model that is dry-run by default.
_FEW_WEIGHTS = 400


def plan(
    build: Callable[[], keras.Model],
    *,
    devices: int,
    memory_per_device: float | str,
    batch_size: int,
    optimizer: keras.optimizers.Optimizer | str | None = None,
    hosts: int = 1,
    hardware: Hardware | str | os.PathLike[str] | None = None,
    sequence_length: int | None = None,
    zero_stages: Sequence[int] = (0, 1, 2, 3),
    gradient_compressions: Sequence[str | None] = (None,),
    parameter_compressions: Sequence[str | None] = (None,),
    tokens: float | str | None = None,
    flops: float | str | None = None,
    dry_run: bool | None = None,
    shown: int = 5,
    progress: Callable[[str], Any] | None = None,
) -> Plans:
    """Says whether a model fits on some devices, how fast a step is, and which way to spread it is best, without running it.

    The training step of the model is traced, without data and without memory for its weights: a model of hundreds of gigabytes is
    planned on a laptop. Each way to spread it is then a matter of arithmetic: what the fullest device holds, and how long a step
    takes. What fits comes first, the fastest first of all; of those within 5 % of it, the one with the fewest means.

        plans = tfdist.plan(build, devices=16, memory_per_device="80 GB", batch_size=256)
        print(plans)         # a table, the line of Python that runs the best one, and what was assumed
        plans.best.memory    # bytes of parameters, gradients, optimizer state, activations, buffers of the fullest device

    What it costs: traces of the model and of its parts, seconds for a small one and minutes for decoders of many blocks, and
    memory for the graphs.

    Args:
        build: a function without arguments that returns a built Keras model, compiled or not.
        devices: how many there are.
        memory_per_device: bytes that each has for TensorFlow: 8e10, "80 GB" or "80GiB".
        batch_size: examples of a step, all devices together.
        optimizer: a Keras optimizer or its name; None: that which the model is compiled with, else "adam".
        hosts: on how many machines the devices are, as many on each.
        hardware: what times are estimated for: a data sheet by its name ("v100", "a100", "h100", "h200", "l40s"), the file that
            `python -m tfdist calibrate` wrote, or a `Hardware`. None: "h100".
        sequence_length: the size of axes that the model's inputs leave open, besides the batch.
        zero_stages: which stages to consider.
        gradient_compressions: which of "int8", "int4", "top_k", "bfloat16", and None, to consider. They are not exact.
        parameter_compressions: which of "int8", "bfloat16", and None, to consider for the parameters that stage 3 gathers.
        tokens: of a whole training (1.4e12, "1.4T"): adds what it takes.
        flops: of a whole training: adds how many tokens these are.
        dry_run: whether the best plan is confirmed by a dry run: one rank of its strategy (of a pipeline one for each stage) is
            traced with the other ranks absent, without memory for its weights, and its graph says what it holds and sends. That
            decides: if the plan does not fit, the next one is tried. It takes seconds for a small model, minutes for one of 80
            blocks. None: for models of up to 400 weights.
        shown: how many plans the table shows.
        progress: is given a line for each thing that takes time; None: nothing is reported.

    Returns:
        The `Plans`.

    Raises:
        ValueError: `build` fails, needs data or the values of weights, or returns no built Keras model; no plan divides the
            batch. Or an argument is out of range, or there is no such optimizer, data sheet or file.
    """
    sizes = {"devices": devices, "hosts": hosts, "batch_size": batch_size, "shown": shown}
    for name, number in sizes.items() if sequence_length is None else (*sizes.items(), ("sequence_length", sequence_length)):
        errors.check_integer(name, number, 1)
    if isinstance(zero_stages, int) or not zero_stages:
        raise errors.value_error("`zero_stages` must be some of 0, 1, 2 and 3.", zero_stages=zero_stages, fix="Write (0, 3).")
    compressions = {"gradient_compressions": gradient_compressions, "parameter_compressions": parameter_compressions}
    for name, given in compressions.items():
        if isinstance(given, str):
            expected = f"`{name}` must be several names, None among them to consider exact messages, too."
            raise errors.value_error(expected, fix=f'Write (None, "{given}").', **{name: given})
    if devices % hosts:
        raise errors.value_error("`hosts` must divide `devices`: each has as many.", devices=devices, hosts=hosts)
    for name in gradient_compressions:
        compressor_of("gradient_compressions", name)
    for name in parameter_compressions:
        ShardingConfig(zero_stage=3, parameter_compression=name)  # which says what it takes
    limit = bytes_of("memory_per_device", memory_per_device)
    known = hardware_of(hardware)
    tell = progress or (lambda line: None)
    tell("tracing the model")
    traced = trace(build, optimizer, sequence_length=sequence_length)
    estimates = Estimates(traced, batch_size, known, devices // hosts)
    choices = Choices(
        devices=devices,
        batch_size=batch_size,
        zero_stages=zero_stages,
        tensor_sizes=estimates.tensor_sizes(devices // hosts),
        pipeline_sizes=divisors(devices),
        recompute=traced.block_pattern is not None,
        sharding_group_sizes=(devices // hosts,) if hosts > 1 else (),
        gradient_compressions=gradient_compressions,
        parameter_compressions=parameter_compressions,
        most_stages=estimates.most_stages,
    )
    tell("estimating what each plan takes")
    memory = functools.partial(memory_of, traced, batch_size=batch_size, on_gpu=known.is_gpu)
    found = search(choices, limit, memory, estimates.time)
    if dry_run or dry_run is None and len(traced.weights) <= _FEW_WEIGHTS:
        kind = "GPU" if known.is_gpu else "CPU"
        run = functools.partial(dry_run_of, Job(build, traced, batch_size, optimizer, hosts, kind))
        found = with_best_confirmed(found, run, tell)
    return Plans(
        model=traced.model.name,
        parameters=traced.parameters,
        devices=devices,
        hosts=hosts,
        memory_per_device=limit,
        batch_size=batch_size,
        optimizer=traced.optimizer,
        candidates=found,
        hardware=known,
        blocks=traced.block_pattern or "",
        assumed=(*traced.assumed, *estimates.assumed),
        is_lower_bound=traced.is_lower_bound,
        training=_training(estimates, found, tokens, flops),
        shown=shown,
    )


def _training(
    estimates: Estimates, found: Sequence[Estimated], tokens: float | str | None, flops: float | str | None
) -> Training | None:
    """Returns what a whole training takes at the speed of the best plan; None where it is not asked for."""
    if tokens is None and flops is None:
        return None
    parameters, per_example = float(estimates.traced.parameters), estimates.tokens_per_example
    beyond = max(0.0, estimates.flops_per_example / per_example - 6 * parameters)
    best = found[0].time
    speed = None
    if best is not None:
        speed = (6 * parameters + beyond) * per_example * estimates.batch_size / best.together
    return training(
        parameters,
        tokens=None if tokens is None else count_of("tokens", tokens),
        flops=None if flops is None else count_of("flops", flops),
        attention_flops_per_token=beyond,
        flops_per_second=speed,
    )


def hardware_of(given: Hardware | str | os.PathLike[str] | None) -> Hardware:
    """Returns a `Hardware` from what a user gives as one. Raises ValueError when there is no such data sheet or file."""
    if isinstance(given, Hardware):
        return given
    if given is None:
        return from_sheet(_DEFAULT_HARDWARE)
    if not isinstance(given, str | os.PathLike):
        expected = "`hardware` must be the name of a data sheet, a file of `python -m tfdist calibrate`, or a `Hardware`."
        raise errors.value_error(expected, hardware=given)
    if isinstance(given, os.PathLike) or re.search(r"[./\\]", given) or pathlib.Path(given).exists():
        return from_file(pathlib.Path(given))
    return from_sheet(given)
