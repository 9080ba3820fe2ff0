"""What tfdist costs beside `MirroredStrategy` and one device, measured. Relative figures only; nothing here is a test.

    python -m benchmarks.memory         peak memory of all ranks together, against the stage's formula
    python -m benchmarks.throughput     steps per second, all contenders taking turns in one run

Files, lowest first: `cases` (what is measured, child processes, tables; imports no TensorFlow), `resident` (this
process's memory), `child` (what runs in a child process; the only one that imports TensorFlow), `memory`, `throughput`.
"""
