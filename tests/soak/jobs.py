"""The jobs that are disturbed: what they train, and how they are started. Without TensorFlow."""

from __future__ import annotations

import dataclasses
import itertools

KINDS = ("data", "tensor", "pipeline")


@dataclasses.dataclass(frozen=True)
class Job:
    """One job; its name says all of it: `data-3-2-fit-run`, or with what is not the default `data-3-2-fit-run-save_freq=2`.

    Attributes:
        kind: which ranks there are: "data", "tensor" (a plan that shards every layer) or "pipeline".
        zero_stage: that of the strategy.
        workers: processes, of one rank each.
        loop: "fit", with `BackupAndRestore`; "own", a loop with `strategy.run` that saves weights itself.
        launch: "run": by `python -m tfdist run`; "plain": processes with TF_CONFIG; "fork": the same, as forks of a process that
            has imported TensorFlow, which is quicker and has no teardown of the interpreter; "hosts": plain, on two hosts.
        data: "shuffled": shuffled anew each epoch; "generator": of Python, without an end; "from_generator": a dataset of one;
            "parts": each worker reads its own.
        save_freq: of `BackupAndRestore`, 0 for "epoch"; a loop of one's own saves as often.
    """

    kind: str = "data"
    zero_stage: int = 3
    workers: int = 2
    loop: str = "fit"
    launch: str = "run"
    data: str = "shuffled"
    save_freq: int = 0
    epochs: int = 4
    steps_per_execution: int = 1
    step_timeout_seconds: float = 600.0
    rendezvous_timeout_seconds: float = 300.0
    max_restarts: int = 3
    callbacks: str = ""  # "nan": with `TerminateOnNaN`; "plateau": with `ReduceLROnPlateau` and `EarlyStopping`

    @property
    def name(self) -> str:
        fields = dataclasses.fields(self)
        extras = [f"{f.name}={getattr(self, f.name)}" for f in fields[5:] if getattr(self, f.name) != f.default]
        return "-".join([self.kind, str(self.zero_stage), str(self.workers), self.loop, self.launch, *extras])

    @classmethod
    def from_name(cls, name: str) -> Job:
        kind, stage, workers, loop, launch, *extras = name.split("-")
        types = {field.name: type(field.default) for field in dataclasses.fields(cls)}
        settings = dict(extra.split("=", 1) for extra in extras)
        more = {key: types[key](value) for key, value in settings.items()}
        return cls(kind, int(stage), int(workers), loop, launch, **more)

    @property
    def reference(self) -> Job:
        """The job whose undisturbed run this one is compared with: time-outs and restarts change no number."""
        defaults = {field.name: field.default for field in dataclasses.fields(self)}
        kept = ("step_timeout_seconds", "rendezvous_timeout_seconds", "max_restarts")
        return dataclasses.replace(self, **{name: defaults[name] for name in kept})


def grid(**fixed: object) -> list[Job]:
    """Returns the jobs of the issue's grid: kinds x stages 1 and 3 x 2 and 3 workers."""
    return [Job(kind, stage, workers, **fixed) for kind, stage, workers in itertools.product(KINDS, (1, 3), (2, 3))]
