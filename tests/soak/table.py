"""The table: every fault, the jobs to which it is done, and what must come of it."""

from __future__ import annotations

import dataclasses
import signal

from tests.soak.faults import (
    NOTHING,
    Fault,
    around,
    at_mark,
    before_the_end,
    both,
    cut,
    in_second_attempt,
    in_training,
    inside,
    kills,
    outside,
    wrong_config,
)
from tests.soak.jobs import Job, grid

# Without a launcher nobody knows of a worker that ends before it connects, for as long as others wait for it.
_SHORT = {"launch": "fork", "rendezvous_timeout_seconds": 10.0}
_FORKS = [Job(launch="fork"), Job("tensor", launch="fork"), Job("pipeline", launch="fork"), Job(workers=3, launch="fork")]
_OWN = [Job(loop="own", launch="fork"), Job("tensor", loop="own", launch="fork")]
_VARIANTS = [
    Job(save_freq=4),
    Job(launch="fork", steps_per_execution=3),
    Job(launch="fork", steps_per_execution=2, save_freq=4),
    Job(launch="fork", data="parts"),
    Job(launch="fork", data="from_generator"),
    Job(launch="fork", callbacks="plateau"),
    Job("pipeline", launch="fork", save_freq=4),
    Job("tensor", launch="fork", save_freq=4),
]
_ONCE = [Job(max_restarts=0), Job(workers=3, launch="plain", max_restarts=0)]  # what is said, and when all have ended
_ONCE_OF_ALL = [*_ONCE, Job("tensor", workers=3, launch="fork", max_restarts=0), Job("pipeline", launch="fork", max_restarts=0)]
_STOPPED = [
    dataclasses.replace(job, rendezvous_timeout_seconds=20.0)
    for job in (Job(launch="plain", max_restarts=0), *_ONCE_OF_ALL[1:])  # the launcher wakes who is stopped
]
_HOSTS = [Job(launch="hosts", max_restarts=0)]
_HOSTS_OF_ALL = [*_HOSTS, Job("pipeline", workers=3, launch="hosts", max_restarts=0)]
_OF_GENERATOR = [Job(launch="fork", data=data, max_restarts=0) for data in ("from_generator", "generator")]
_LONELY = [Job(launch="plain", max_restarts=0, rendezvous_timeout_seconds=10)]
_NAMED = r"tfdist: Worker \d, {victim} "  # who it was
_SPOILT = "raised ValueError: the data of this worker are spoilt"

FAULTS = [
    # What costs nothing but time.
    Fault("nothing", "nothing", NOTHING, [*grid(launch="fork"), Job(data="parts", launch="fork")], needs_strike=False),
    Fault("kill", "SIGKILL", outside("kill"), [*grid(**_SHORT), *grid(), *_OWN, Job(save_freq=4)]),
    Fault(
        "kill_twice",
        "SIGKILL, and again",
        both(outside("kill", in_training), in_second_attempt(outside("kill", in_training), "epoch 2")),
        [*_FORKS, *_OWN, Job(launch="fork", save_freq=4)],
    ),
    Fault(
        "kill_4_times",
        "SIGKILL, four times",
        kills(4),
        [*grid(**_SHORT, max_restarts=6), *grid(max_restarts=6), *grid(**_SHORT, max_restarts=6, save_freq=4)],
    ),
    Fault(
        "kill_all", "SIGKILL of all", outside("kill_all"), [Job(**_SHORT), Job(launch="plain", rendezvous_timeout_seconds=20.0)]
    ),
    Fault("kill_in_step", "SIGKILL between two steps", inside("kill", "step", steps=(0, 23)), [*_FORKS, *_OWN, *_VARIANTS]),
    Fault("kill_after_fit", "SIGKILL behind `fit`", inside("kill", "trained"), [Job(), Job("pipeline")], repeats=0),
    Fault("kill_after_fit_alone", "SIGKILL behind `fit`, without a launcher", inside("kill", "trained"), [Job(launch="fork")]),
    Fault("crash", "SIGSEGV", inside("kill", "step", number=int(signal.SIGSEGV)), [Job()]),
    Fault("exit_3", "exit code 3", inside("exit", "step", code=3), [Job()]),
    Fault("terminate", "SIGTERM to one worker", outside("terminate", in_training), [Job(), Job(launch="plain")]),
    Fault("interrupt", "SIGINT to one worker", outside("interrupt", in_training), [Job(), Job(launch="plain")]),
    Fault("stop_for_5_s", "SIGSTOP for 5 s", outside("stop", seconds=5), [*_FORKS, *_OWN]),
    Fault("stop_for_15_s", "SIGSTOP for 15 s", outside("stop", in_training, seconds=15), [Job(launch="fork")]),
    Fault("stop_under_the_launcher", "SIGSTOP for ever", outside("stop", seconds=None), [Job(), Job("pipeline", workers=3)]),
    Fault("slow_start", "a worker that starts 15 s late", inside("sleep", "start", seconds=15), [Job()]),
    Fault("slow_data", "a worker that waits 15 s for data", inside("sleep", "step", seconds=15), [Job()]),
    Fault(
        "empty_backup",
        "SIGKILL; the backup is empty",
        both(inside("kill", "step", steps=(13, 23)), in_second_attempt(inside("spoil_backup", "start", worker=0, keep=0.0))),
        [Job(), Job(launch="fork", save_freq=4)],
    ),
    Fault(
        "torn_backup",
        "SIGKILL; the backup is torn",
        both(inside("kill", "step", steps=(13, 23)), in_second_attempt(inside("spoil_backup", "start", worker=0, keep=0.6))),
        [Job(), Job(launch="fork", save_freq=4)],
    ),
    Fault(
        "full_disk_then_room",
        "a full disk, with room in the next attempt",
        both(outside("full_disk", in_training), in_second_attempt(outside("room_on_disk", at_mark("start")), "start")),
        [Job()],
        needs_root=True,
    ),
    Fault("short_cut", "a cable pulled for 5 s", cut("pull", seconds=5), [Job(launch="hosts")]),
    # What ends the job: it is not started again.
    Fault("killed", "SIGKILL", outside("kill", in_training), _ONCE_OF_ALL, "fails", says=_NAMED + ".*died"),
    Fault(
        "stop",
        "SIGSTOP for ever",
        outside("stop", before_the_end),
        _STOPPED,
        "fails",
        says=_NAMED + r"|did not come|{victim} \S+ cannot be reached",
    ),
    Fault(
        "hang",
        "a worker hangs in Python",
        inside("hang", "step"),
        [
            Job(max_restarts=0, step_timeout_seconds=12),
            Job(launch="plain", max_restarts=0, step_timeout_seconds=12),
            Job("pipeline", workers=3, launch="fork", max_restarts=0, step_timeout_seconds=12),
            Job("tensor", launch="fork", max_restarts=0, step_timeout_seconds=12),
        ],
        "fails",
        says=_NAMED,
    ),
    Fault(
        "raise_in_callback",
        "an exception in a callback",
        inside("raise", "step"),
        _ONCE_OF_ALL,
        "fails",
        1,
        _NAMED + f".*{_SPOILT}",
    ),
    Fault(
        "raise_in_data",
        "an exception in a generator",
        inside("raise", "data", steps=(1, 5)),
        _OF_GENERATOR,
        "fails",
        says=f"{_NAMED}.*{_SPOILT}",
    ),
    Fault(
        "raise_before_it_connects",
        "an exception before the strategy",
        inside("raise", "start", worker=1),
        [Job(max_restarts=0)],
        "fails",
        says="{victim} ",
    ),
    Fault(
        "raise_when_connected",
        "an exception in building",
        inside("raise", "connected"),
        _ONCE,
        "fails",
        says=f"{_NAMED}.*{_SPOILT}",
    ),
    Fault(
        "raise_in_step",
        "a label that is out of range",
        inside("label", "rows", worker=None),
        _ONCE,
        "fails",
        says="99 is not in",
        needs_strike=False,
    ),
    Fault("leave", "a program that ends early", inside("exit", "step"), _ONCE, "fails", says=_NAMED + ".*ended its program"),
    Fault(
        "data_ends",
        "a generator that ends early",
        inside("ends", "data ends", steps=(3, 5)),
        _OF_GENERATOR,
        "fails",
        says="{victim}",
    ),
    Fault(
        "other_data",
        "a generator that yields other rows",
        inside("other", "other data"),
        _OF_GENERATOR,
        "fails",
        says="Workers read different data: batch 0 .*{victim}",
    ),
    Fault(
        "save_on_one",
        "a callback that saves on one worker",
        inside("save", "save"),
        [Job(max_restarts=0), *_ONCE_OF_ALL[2:]],
        "fails",
        says="{victim} .* waits at a point where all workers must meet, save",
        seconds=20.0,
    ),
    Fault(
        "nan",
        "NaN with `TerminateOnNaN`",
        inside("nan", "rows", worker=None),
        [Job(callbacks="nan")],
        "stops",
        0,
        launcher_says="succeeded, but training was stopped at a loss of NaN",
        needs_strike=False,
    ),
    Fault(
        "full_disk",
        "a full disk",
        outside("full_disk", in_training),
        [Job(max_restarts=0)],
        "fails",
        says="No space left on",
        needs_root=True,
    ),
    Fault(
        "read_only_disk",
        "a disk that becomes read-only",
        outside("read_only_disk", in_training),
        [Job(max_restarts=0)],
        "fails",
        says="[Rr]ead-only file system",
        needs_root=True,
    ),
    # Signals to the launcher.
    Fault("launcher_interrupt", "Ctrl-C", outside("launcher", number=int(signal.SIGINT)), [Job()], "fails", 130),
    Fault(
        "launcher_terminate", "SIGTERM to the launcher", outside("launcher", number=int(signal.SIGTERM)), [Job()], "fails", 143
    ),
    Fault("launcher_kill", "SIGKILL of the launcher", outside("launcher", number=int(signal.SIGKILL)), [Job()], "fails", -9),
    # The network.
    *[
        Fault(f"cut_{do}", words, cut(do), _HOSTS_OF_ALL, "fails", says="tfdist: ")
        for do, words in (("pull", "a cable pulled"), ("lose", "one direction lost"), ("take_down", "an interface down"))
    ],
    *[
        Fault(
            f"cut_at_{mark}",
            f"a cable pulled {words}",
            cut("pull", at_mark(mark, seconds)),
            jobs,
            "fails",
            says="tfdist: |Error: ",
        )
        for mark, seconds, words, jobs in (
            ("start", 4.0, "while workers connect", [Job(launch="hosts", max_restarts=0, rendezvous_timeout_seconds=15)]),
            ("connected", 0.5, "while the model is built", _HOSTS),
            ("built", 1.0, "before the first step", _HOSTS),
        )
    ],
    # Wrong settings.
    Fault(
        "no_json", "TF_CONFIG is no JSON", wrong_config(text="{"), _LONELY, "fails", says_itself="TF_CONFIG", needs_strike=False
    ),
    Fault(
        "no_task",
        "TF_CONFIG without a task",
        wrong_config(drop=["task"]),
        _LONELY,
        "fails",
        says_itself="task",
        needs_strike=False,
    ),
    Fault(
        "no_such_task",
        "a task that the cluster has not",
        wrong_config(set={"task/index": 7}),
        _LONELY,
        "fails",
        needs_strike=False,
    ),
    Fault(
        "absent",
        "a worker that never starts",
        around("absent"),
        _LONELY,
        "fails",
        says="worker 1 .*did not come",
        needs_strike=False,
    ),
    Fault("port_in_use", "a port in use", around("port_in_use"), _LONELY, "fails", says="port|worker 1", needs_strike=False),
    Fault(
        "unknown_host",
        "a host that nobody knows",
        wrong_config(None, set={"cluster/worker/1": "no-such-host.invalid:2222"}),
        [*_LONELY],
        "fails",
        says="no-such-host.invalid",
        needs_strike=False,
    ),
]
