"""Part e: what a plan says of a model, in memory and in time, beside what the model takes.

Times are estimated twice: from the card's data sheet, and from a calibration of the first part of the card, the first row. The
planner is told nothing of the models beside that. Of a model over several parts only memory is compared: parts share the card's
processors, and their messages take other ways than those of cards.
"""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import gc
import time
from collections.abc import Callable, Iterator
from typing import Any

import keras
import tensorflow as tf

import tfdist
from benchmarks.devices import allocators_of, wait
from benchmarks.one_card.card import Card
from benchmarks.one_card.rows import Part, Row
from benchmarks.planning_memory import application, batch_of, compiled, lstm, transformer
from tfdist.mesh.device_details import details_of
from tfdist.tools.doctor.calibration import calibration_checks, hardware_of
from tfdist.tools.doctor.check import Check, Finding, LeftOutError, Outcome, Result, Status
from tfdist.tools.doctor.session import Session
from tfdist.tools.planning import Candidate
from tfdist.tools.planning.data_sheets import DATA_SHEETS, from_sheet
from tfdist.tools.planning.estimates import Estimates
from tfdist.tools.planning.hardware import Hardware
from tfdist.tools.planning.memory import memory_of
from tfdist.tools.planning.traced_model import trace

CALIBRATION = "calibration"
_RANKS = 4
_WARM_UP, _STEPS = 4, 20
_MIB = 2**20


@dataclasses.dataclass(frozen=True)
class Planned:
    """A model, the examples of a device's batch, and how it is spread over parts of the card.

    Attributes:
        build: makes the compiled model.
        examples: of the batch of one device.
    """

    build: Callable[[], keras.Model]
    examples: int
    candidate: Candidate = Candidate(0, data=1)
    policy: str = "float32"


def _mlp(width: int) -> keras.Model:
    layers = [keras.layers.Dense(width, "relu") for _ in range(8)]
    return compiled(keras.Sequential([keras.Input((width,)), *layers, keras.layers.Dense(10)]))


def _gpt() -> keras.Model:
    return transformer(blocks=12, width=1024, length=512, vocabulary=32768)


def _resnet() -> keras.Model:
    made = keras.applications.ResNet50(weights=None, classes=10, classifier_activation=None)
    return compiled(made)


MODELS: dict[str, Planned] = {
    "gpt": Planned(_gpt, 8),
    "gpt, mixed_bfloat16": Planned(_gpt, 8, policy="mixed_bfloat16"),
    "mlp": Planned(functools.partial(_mlp, 4096), 8192),
    "resnet50": Planned(_resnet, 64),
    "lstm": Planned(lstm, 256),
    **{f"gpt, stage {stage} on 4": Planned(_gpt, 4, Candidate(stage, data=_RANKS)) for stage in (3, 2, 1, 0)},
    "mlp, stage 3 on 4": Planned(functools.partial(_mlp, 4096), 2048, Candidate(3, data=_RANKS)),
    "gpt, stage 3 on 4, recompute": Planned(_gpt, 4, Candidate(3, data=_RANKS, recompute=True)),
    "resnet50, stage 3 on 4": Planned(_resnet, 16, Candidate(3, data=_RANKS)),
}
_SMALL = {
    "mlp": Planned(functools.partial(_mlp, 256), 64),
    "mobilenet_v2": Planned(application("MobileNetV2"), 4),
    "mlp, stage 3 on 4": Planned(functools.partial(_mlp, 256), 64, Candidate(3, data=_RANKS)),
}


def part(card: Card) -> Part:
    """Returns the rows; they share the calibration, and so a process."""
    models = MODELS if card.is_gpu and not card.is_quick else _SMALL
    known: list[Hardware] = []
    return Part(
        name="plans",
        rows=[
            Row(CALIBRATION, functools.partial(_calibrate, known)),
            *(Row(name, functools.partial(_compare, planned, known)) for name, planned in models.items()),
        ],
        shares_process=True,
        columns={
            "planned MiB": lambda x: f"{x['planned_bytes'] / _MIB:,.0f}" if "planned_bytes" in x else None,
            "peak MiB": lambda x: f"{x['peak_bytes'] / _MIB:,.0f}" if "peak_bytes" in x else None,
            "off": lambda x: f"{x['planned_bytes'] / x['peak_bytes'] - 1:+.0%}" if "peak_bytes" in x else None,
            "data sheet ms": functools.partial(_milliseconds, "sheet_seconds"),
            "calibrated ms": functools.partial(_milliseconds, "calibrated_seconds"),
            "step ms": functools.partial(_milliseconds, "step_seconds"),
        },
        text="The planner's estimate beside the allocator's peak in some steps, and their time. Adam; float32 is multiplied in "
        "TensorFloat-32 on GPUs that have it." + ("" if card.is_gpu else " Logical CPUs share an allocator: peaks are of all."),
        seconds=150,
        row_seconds=90,
    )


def _milliseconds(field: str, record: dict[str, Any]) -> str | None:
    return f"{1e3 * record[field]:.2f}" if record.get(field) is not None else None


class _FirstPart(Session):
    """The doctor's session, on the first part of the card."""

    def __init__(self, card: Card):
        super().__init__(1, is_quick=card.is_quick, timeout_seconds=60.0)
        self._devices = card.devices(_RANKS)[:1]


def _calibrate(known: list[Hardware], card: Card) -> Finding:
    session = _FirstPart(card)
    hardware = hardware_of([Outcome((_result(check, session),)) for check in calibration_checks()])
    known.append(hardware)
    return Finding(f"{hardware.name}, up to {hardware.matmul['float32'][-1][1] / 1e12:.3g} TFLOP/s", dataclasses.asdict(hardware))


def _result(check: Check, session: Session) -> Result:
    try:
        finding = check.run(session)
    except LeftOutError as error:
        return Result(check.name, Status.LEFT_OUT, str(error), 0.0)
    return Result(check.name, Status.HOLDS, finding.summary, 0.0, finding.data)


def _sheet_of(device: str) -> Hardware | None:
    """Returns the data sheet of the card by its name; None where there is none."""
    card = details_of([device])[0].card
    return next((from_sheet(name) for name in DATA_SHEETS if name.upper() in card.upper()), None)


@contextlib.contextmanager
def _policy(name: str) -> Iterator[None]:
    before = keras.config.dtype_policy()
    keras.config.set_dtype_policy(name)
    try:
        yield
    finally:
        keras.config.set_dtype_policy(before)


def _compare(planned: Planned, known: list[Hardware], card: Card) -> Finding:
    candidate, devices = planned.candidate, card.devices(_RANKS)[: planned.candidate.devices]
    gc.collect()  # the model of the row before, whose memory would be freed while this one's is counted
    with _policy(planned.policy):
        start = time.perf_counter()
        traced = trace(planned.build)
        rows = planned.examples * candidate.data
        memory = memory_of(traced, candidate, rows, on_gpu=card.is_gpu)
        data: dict[str, Any] = {"ranks": len(devices), "planned_bytes": memory.together}
        if len(devices) == 1:
            for name, hardware in (("sheet", _sheet_of(devices[0])), ("calibrated", known[-1] if known else None)):
                if hardware is not None:
                    data[f"{name}_seconds"] = Estimates(traced, rows, hardware, 1).time(candidate).together
        data["planning_seconds"] = time.perf_counter() - start
        data |= _trained(planned, devices, traced.block_pattern)
    told = f"planned {data['planned_bytes'] / _MIB:,.0f} MiB, peak {data['peak_bytes'] / _MIB:,.0f}"
    return Finding(told, data)


def _trained(planned: Planned, devices: list[str], blocks: str | None) -> dict[str, Any]:
    allocators = allocators_of(devices)
    before = allocators.current()
    # Without tfdist's kernels for CPUs, also on CPUs: plans are for GPUs.
    strategy = tfdist.ShardedStrategy(devices, zero_stage=planned.candidate.zero_stage, use_kernels=False)
    with strategy.scope():
        model = planned.build()
        x, y = batch_of(model, planned.examples * planned.candidate.data)
        if planned.candidate.recompute:
            tfdist.recompute(model, blocks)
    batches = tf.data.Dataset.from_tensors((x, y)).repeat()
    model.fit(batches, steps_per_epoch=_WARM_UP, verbose=0)
    wait()
    with allocators.peak() as peak:
        began = _Began()
        model.fit(batches, steps_per_epoch=_STEPS + 1, verbose=0, callbacks=[began])
        wait()
        seconds = (time.perf_counter() - began.seconds) / _STEPS
    grown = [most - then for most, then in zip(peak.by_device, before, strict=True)]
    return {"peak_bytes": max(grown), "peak_bytes_by_rank": grown, "step_seconds": seconds if len(devices) == 1 else None}


class _Began(keras.callbacks.Callback):
    """When the first step was over: those behind it are timed."""

    def on_train_batch_end(self, batch: int, logs: Any = None) -> None:
        if batch == 0:
            wait()
            self.seconds = time.perf_counter()
