"""Starts the worker processes of one machine, watches them, and starts them again after a failure.

    cli ──> job (its attempts) ──> worker ──> output
     │       │
    gpus    stops, tasks (TF_CONFIG)

The launcher never touches TensorFlow's devices: they belong to the workers. The other command, `schedule_command`, shows a
pipeline's schedule and starts nothing.
"""
