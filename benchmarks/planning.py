"""How exact planned times are: steps of `fit` beside the plan, and what the chosen plan loses to the fastest measured one.

    python -m benchmarks.planning time                        five models under seven plans
    python -m benchmarks.planning time mlp cnn --ranks workers
    python -m benchmarks.planning regret                      every plan that fits, of two models under two limits of memory
    python -m benchmarks.planning time --keep FILE            keep what was measured; `--kept FILE` plans it again

Four ranks are the four logical CPUs of a process (`--ranks devices`) or four worker processes of a TF_CONFIG job (`--ranks
workers`). One job has all models: it compiles them, trains a few steps of each, and waits. `python -m tfdist calibrate` then
measures such ranks, all at work at once, and the job goes on to time its steps. No model has a part in the calibration.

    planned    `together` of the plan, in ms
    measured   the median of the steps of `fit`, from the end of one to the end of the next, the least and the most of them
    processor  seconds of all threads of all ranks, for a step: what a machine that is busy with other things changes least
    regret     how much longer the step of the chosen plan takes than that of the fastest measured one

For a machine that does other things as well: `--wait FILE` waits until that file exists before anything is measured, and
`--processor` compares seconds of the processor, of all threads over all cores, by which the devices are calibrated, too. They are
the seconds of the clock where ranks keep all cores busy; what a rank waits for another is not in them.
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import math
import os
import pathlib
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from typing import Any

os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "3")

import keras
import tensorflow as tf
from keras import layers

import tfdist
from benchmarks.planning_memory import batch_of, cnn, compiled, mlp, transformer, vit
from benchmarks.processor_clock import calibrated_by_processor
from tfdist.tools.planning import Candidate, DeviceMemory
from tfdist.tools.planning.estimates import Estimates
from tfdist.tools.planning.hardware import Hardware, from_file
from tfdist.tools.planning.memory import memory_of
from tfdist.tools.planning.rank_trace import spread
from tfdist.tools.planning.search import Estimated, ranked
from tfdist.tools.planning.sizes import bytes_of
from tfdist.tools.planning.step_time import StepTime
from tfdist.tools.planning.traced_model import TracedModel, trace

RANKS = 4
ROUNDS, SECONDS = 4, 1.0  # how often each case is timed, and for how long, of three steps at least
_ROOT = pathlib.Path(__file__).resolve().parent.parent


def keras_hub_gpt() -> keras.Model:
    """A GPT-2 of KerasHub, small, of its own layers."""
    import keras_hub

    backbone = keras_hub.models.GPT2Backbone(
        vocabulary_size=2000, num_layers=4, num_heads=4, hidden_dim=128, intermediate_dim=512, max_sequence_length=64, dropout=0.0
    )
    tokens = keras.Input((64,), dtype="int32")
    x = backbone({"token_ids": tokens, "padding_mask": keras.ops.ones_like(tokens)})
    return compiled(keras.Model(tokens, layers.Dense(2000)(x)))


# The model, and the examples of a step, of all ranks together.
MODELS: dict[str, tuple[Callable[[], keras.Model], int]] = {
    "mlp": (mlp, 512),
    "gpt": (lambda: transformer(blocks=4, width=128, length=64, vocabulary=2000), 32),
    "cnn": (cnn, 32),
    "vit": (vit, 32),
    "keras_hub_gpt2": (keras_hub_gpt, 32),
}
PLANS = {
    "zero 0": Candidate(0, data=4),
    "zero 2": Candidate(2, data=4),
    "zero 3": Candidate(3, data=4),
    "tensor 2": Candidate(0, data=2, tensor=2),
    "1f1b": Candidate(0, data=2, pipeline=2, schedule="1f1b", microbatches=4),
    "gpipe": Candidate(0, data=2, pipeline=2, schedule="gpipe", microbatches=4),
    "recompute": Candidate(0, data=4, recompute=True),
}
# Of regret: the model and its batch, of few divisors; the stages; and limits of memory.
REGRET = {
    "mlp": ((0, 1, 2, 3), 508, ("1 GB", "60 MB")),
    "gpt": ((0,), 68, ("1 GB", "60 MB")),
}


@dataclasses.dataclass(frozen=True)
class Case:
    """A model of `MODELS`, the examples of a step, and how it is spread."""

    model: str
    batch_size: int
    candidate: Candidate


class Times(keras.callbacks.Callback):
    """The times between the ends of steps, of at least three, and of some until a second is over."""

    def on_train_begin(self, logs=None):
        self.ends, self.processor = [], time.process_time()

    def on_train_batch_end(self, batch, logs=None):
        self.ends.append(time.perf_counter())


class Trained:
    """A case that has been compiled, and has trained some steps."""

    def __init__(self, case: Case, strategy: Any, blocks: str):
        with strategy.scope():
            model = MODELS[case.model][0]()
            x, y = batch_of(model, case.batch_size)
            self.model = spread(model, case.candidate, blocks)
            if self.model is not model:  # a pipeline's model is compiled itself
                self.model.compile("adam", model.loss)
        self.data = tf.data.Dataset.from_tensors((x, y)).repeat()
        self.steps = 3
        self.fit(3)
        start = time.perf_counter()
        self.fit(3)
        self.once = (time.perf_counter() - start) / 3

    def fit(self, steps: int) -> tuple[list[float], float]:
        """Trains; returns the seconds of each step but the first, and of this process's threads for each."""
        times = Times()
        self.model.fit(self.data, steps_per_epoch=steps, epochs=1, verbose=0, callbacks=[times])
        processor = (time.process_time() - times.processor) / steps
        return [after - before for before, after in zip(times.ends, times.ends[1:], strict=False)], processor


def child(cases: Sequence[tuple[Case, str]], ranks: str, folder: pathlib.Path, by_processor: bool) -> None:
    """What each process of a job does."""
    devices = tfdist.use_logical_cpus(RANKS) if ranks == "devices" else None

    def strategy_of(candidate: Candidate) -> Any:
        sizes = {"tensor_parallel_size": candidate.tensor, "pipeline_parallel_size": candidate.pipeline}
        # As on GPUs, which plans are for: on CPUs tfdist's kernels save a seventh of a Transformer's step by default.
        settings = {"zero_stage": candidate.zero_stage, "use_kernels": False, **sizes}
        if devices is not None:
            return tfdist.ShardedStrategy(devices, **settings)
        return tfdist.MultiWorkerShardedStrategy(step_timeout_seconds=900, **settings)

    trained, first = [], None
    for case, blocks in cases:
        strategy = strategy_of(case.candidate)
        first = first or strategy
        start = time.perf_counter()
        trained.append(Trained(case, strategy, blocks))
        print(f"MADE {case.model} {case.candidate.name()} {time.perf_counter() - start:.1f} s", flush=True)
    is_first = first.extended.communicator.local_ranks[0] == 0
    print("READY", flush=True)
    while not (folder / "go").exists():
        time.sleep(0.2)
    if by_processor:
        hardware = calibrated_by_processor(RANKS, ranks_of(ranks))
        if is_first:
            hardware.to_file(folder / "hardware")
    for _ in range(ROUNDS):
        for place, one in enumerate(trained):
            steps = int(first.share("benchmark: steps", str(1 + max(3, min(20, math.ceil(SECONDS / one.once))))))
            first.barrier("benchmark: a case")
            seconds, processor = one.fit(steps)
            one.once = statistics.median(seconds)
            told = {"case": place, "seconds": seconds if is_first else [], "processor": processor}
            print("RESULT", json.dumps(told), flush=True)


def lines_of(process: subprocess.Popen[str]) -> Iterator[str]:
    for line in process.stdout:
        if "MADE" in line:
            print(line.rstrip(), file=sys.stderr)
        yield line


def command_of(ranks: str, *arguments: str) -> list[str]:
    if ranks == "devices":
        return [sys.executable, *arguments]
    return [sys.executable, "-m", "tfdist", "run", "--workers", str(RANKS), "--cpu", *arguments]


def measured(cases: Sequence[tuple[Case, str]], ranks: str, wait: pathlib.Path | None, by_processor: bool) -> dict[str, Any]:
    """Returns what was measured of the cases, by their places, and of the ranks."""
    environment = {**os.environ, "PYTHONPATH": str(_ROOT), "CUDA_VISIBLE_DEVICES": "-1"}
    with tempfile.TemporaryDirectory() as name:
        folder = pathlib.Path(name)
        (folder / "cases").write_text(json.dumps([(dataclasses.asdict(case), blocks) for case, blocks in cases]))
        command = command_of(ranks, "-m", "benchmarks.planning", "child", "--ranks", ranks, "--folder", name)
        command += ["--processor"] if by_processor else []
        process = subprocess.Popen(
            command, cwd=_ROOT, env=environment, text=True, stdout=subprocess.PIPE, stderr=(folder / "errors").open("w")
        )
        try:
            lines = lines_of(process)
            ready = 0
            for line in lines:
                ready += "READY" in line
                if ready == ranks_of(ranks):
                    break
            else:
                raise RuntimeError(f"The job failed: {(folder / 'errors').read_text()[-3000:]}")
            while wait is not None and not wait.exists() and process.poll() is None:
                time.sleep(0.2)
            extra = ["--devices", str(RANKS)] if ranks == "devices" else []
            calibrate = command_of(ranks, "-m", "tfdist", "calibrate", "--out", str(folder / "hardware"), *extra)
            start = time.perf_counter()
            if not by_processor:
                subprocess.run(calibrate, cwd=_ROOT, env=environment, check=True, timeout=600, stdout=subprocess.DEVNULL)
            calibrated = time.perf_counter() - start
            loads = [os.getloadavg()[0]]
            (folder / "go").touch()
            found: dict[int, dict[str, list[float]]] = {}
            for line in lines:
                if "RESULT " in line:
                    one = json.loads(line.partition("RESULT ")[2])
                    kept = found.setdefault(one["case"], {"seconds": [], "processor": []})
                    kept["seconds"] += one["seconds"]
                    kept["processor"].append(one["processor"])
            if process.wait():
                raise RuntimeError(f"The job failed: {(folder / 'errors').read_text()[-3000:]}")
            hardware = json.loads((folder / "hardware").read_text())
        finally:
            if process.poll() is None:
                process.terminate()
                process.wait()
    for one in found.values():
        one["processor"] = statistics.mean(one["processor"]) * ranks_of(ranks)
    steps = [found[place] for place in range(len(cases))]
    return {"ranks": ranks, "hardware": hardware, "steps": steps, "calibrated": calibrated, "load": [*loads, os.getloadavg()[0]]}


def ranks_of(ranks: str) -> int:
    """Returns how many processes there are."""
    return 1 if ranks == "devices" else RANKS


def traced_models(names: Sequence[str]) -> dict[str, TracedModel]:
    """Returns what a plan knows of each model."""
    return {name: trace(MODELS[name][0]) for name in dict.fromkeys(names)}


def time_of(traced: TracedModel, case: Case, known: Hardware) -> StepTime:
    return Estimates(traced, case.batch_size, known, RANKS).time(case.candidate)


def cases_of(args: argparse.Namespace, traced: dict[str, TracedModel]) -> list[Case]:
    if args.what == "time":
        plans = [PLANS[name] for name in args.plans]
        return [
            Case(name, MODELS[name][1], candidate)
            for name in args.models
            for candidate in plans
            if not candidate.recompute or traced[name].block_pattern
        ]
    found = []
    for name in args.models:
        stages, batch_size, limits = REGRET[name]
        plans = tfdist.plan(
            MODELS[name][0],
            devices=RANKS,
            memory_per_device=limits[0],
            batch_size=batch_size,
            zero_stages=stages,
            hardware="a100",
            dry_run=False,
        )
        found += [Case(name, batch_size, one.candidate) for one in plans.fitting]
    return found


def main() -> None:
    args = parse_args()
    if args.what == "child":
        given = json.loads((args.folder / "cases").read_text())
        cases = [(Case(one["model"], one["batch_size"], Candidate(**one["candidate"])), blocks) for one, blocks in given]
        child(cases, args.ranks, args.folder, args.processor)
        return
    if args.kept:
        kept = json.loads(args.kept.read_text())
        args.what = kept["what"]
        traced = traced_models([one["model"] for one in kept["cases"]])
        cases = [Case(one["model"], one["batch_size"], Candidate(**one["candidate"])) for one in kept["cases"]]
    else:
        traced = traced_models(args.models)
        cases = cases_of(args, traced)
        blocks = [traced[case.model].block_pattern or "" for case in cases]
        kept = measured(list(zip(cases, blocks, strict=True)), args.ranks, args.wait, args.processor)
        kept |= {"what": args.what, "cases": [dataclasses.asdict(case) for case in cases]}
        kept["by_processor"] = args.processor
        if args.keep:
            args.keep.write_text(json.dumps(kept))
    with tempfile.TemporaryDirectory() as folder:
        path = pathlib.Path(folder) / "hardware"
        path.write_text(json.dumps(kept["hardware"]))
        known = from_file(path)
    print(f"{known.name}, {kept['ranks']}; calibrated in {kept['calibrated']:.0f} s; load {kept['load']}", file=sys.stderr)
    by_processor, cores = kept.get("by_processor", False), os.cpu_count() or 1
    planned = [time_of(traced[case.model], case, known) for case in cases]
    rows = [
        {
            "benchmark": "planning",
            "model": case.model,
            "examples": case.batch_size,
            "plan": case.candidate.name(),
            "ranks": kept["ranks"],
            "planned_ms": 1e3 * time_.together,
            "parts_ms": {name: 1e3 * part for name, part in dataclasses.asdict(time_).items()},
            "measured_ms": 1e3 * (steps["processor"] / cores if by_processor else statistics.median(steps["seconds"])),
            "least_ms": 1e3 * min(steps["seconds"]),
            "most_ms": 1e3 * max(steps["seconds"]),
            "processor_ms": 1e3 * steps["processor"],
            "memory": memory_of(traced[case.model], case.candidate, case.batch_size).together,
        }
        for case, time_, steps in zip(cases, planned, kept["steps"], strict=True)
    ]
    kind = f"processor ms over {cores} cores" if by_processor else "measured ms, median"
    print(f"| model | examples | plan | planned ms | {kind} | clock, least to most | processor ms | error |")
    print("|---|---|---|---|---|---|---|---|")
    for row in rows:
        error = row["planned_ms"] / row["measured_ms"] - 1
        spread_ = f"{row['measured_ms']:.0f} | {row['least_ms']:.0f} to {row['most_ms']:.0f}"
        print(
            f"| {row['model']} | {row['examples']} | {row['plan']} | {row['planned_ms']:.0f} | {spread_} | "
            f"{row['processor_ms']:.0f} | {error:+.0%} |"
        )
    if args.what == "regret":
        print("\n| model | memory | plans that fit | chosen | fastest measured | regret |\n|---|---|---|---|---|---|")
        for name in dict.fromkeys(case.model for case in cases):
            for limit in REGRET[name][2]:
                print(regret_line(name, limit, cases, planned, rows))
    for row in rows:
        print(json.dumps(row))


def regret_line(name: str, limit: str, cases: Sequence[Case], planned: Sequence[StepTime], rows: Sequence[dict[str, Any]]) -> str:
    size, fitting, plans = bytes_of("limit", limit), [], []
    for case, time_, row in zip(cases, planned, rows, strict=True):
        if case.model == name and row["memory"] <= size:
            fitting.append(row)
            plans.append(Estimated(case.candidate, DeviceMemory(row["memory"], 0, 0), size, time_))
    if not fitting:
        return f"| {name} | {limit} | 0 | | | |"
    first = ranked(plans)[0]
    chosen = next(row for one, row in zip(plans, fitting, strict=True) if one is first)
    fastest = min(fitting, key=lambda row: row["measured_ms"])
    lost = chosen["measured_ms"] / fastest["measured_ms"] - 1
    return (
        f"| {name} | {limit} | {len(fitting)} | {chosen['plan']}, {chosen['measured_ms']:.0f} ms | "
        f"{fastest['plan']}, {fastest['measured_ms']:.0f} ms | {lost:.0%} |"
    )


def parse_args() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("what", choices=("time", "regret", "child"))
    parser.add_argument("models", nargs="*", help=", ".join(MODELS))
    parser.add_argument("--ranks", choices=("devices", "workers"), default="devices")
    parser.add_argument("--plans", nargs="*", default=list(PLANS), help=", ".join(PLANS))
    parser.add_argument("--wait", type=pathlib.Path, help="measure when this file exists")
    parser.add_argument("--keep", type=pathlib.Path, help="write what was measured to this file")
    parser.add_argument("--kept", type=pathlib.Path, help="measure nothing: plan again what this file has")
    parser.add_argument("--processor", action="store_true", help="compare seconds of the processor")
    parser.add_argument("--folder", type=pathlib.Path, help=argparse.SUPPRESS)
    args = parser.parse_args()
    args.models = args.models or list(MODELS if args.what == "time" else REGRET)
    return args


if __name__ == "__main__":
    main()
