"""What tfdist costs beside TensorFlow's mirrored strategies and one device, measured. Relative figures only; no tests.

    python -m benchmarks.memory         peak memory, against the stage's formula
    python -m benchmarks.throughput     steps per second, all contenders taking turns in one run

Both with `--devices`, ranks that are logical CPUs of one process, or `--workers`, ranks that are processes of a TF_CONFIG job.

Files, lowest first: `cases` (what is measured, arguments, tables), `job` (the processes that run a case), `resident` (this
process's memory), `training` (strategies, models and loops), `child` (what runs in each process of a job), `memory`,
`throughput`. Only `training` and `child` import TensorFlow.
"""
