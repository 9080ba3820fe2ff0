"""Steps of all ranks of a mesh, traced in one process as processes with GPUs trace their parts: with NCCL between them."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any
from unittest import mock

import keras
import tensorflow as tf

import tfdist
from tests.pretended_gpus import pretended_gpus
from tfdist.collectives import NCCL, CollectivePlan, point_to_point

WIDTH = 8
SCHEDULES = ("gpipe", "1f1b", "zero_bubble", "interleaved")


@contextlib.contextmanager
def processes(ranks_per_process: int) -> Iterator[None]:
    """Within it each process has so many of the ranks, one after the other."""

    def is_one_process(*ranks: int) -> bool:
        return len({rank // ranks_per_process for rank in ranks}) == 1

    def transport(program: Any, other: int) -> Any:
        return original(program, other) if is_one_process(program.rank, other) else NCCL.messages

    original = point_to_point.message_transport
    exchanges = mock.patch.object(type(NCCL), "exchanges", lambda self, program, ranks: is_one_process(*ranks))
    with pretended_gpus(are_whole=True), exchanges, mock.patch.object(point_to_point, "message_transport", transport):
        yield


def model_of(pairs: int, tensor_parallel_size: int) -> keras.Model:
    parallel = tfdist.layers
    stack = [keras.Input((WIDTH,))]
    for _ in range(pairs):
        if tensor_parallel_size == 1:
            stack += [keras.layers.Dense(5, "tanh"), keras.layers.Dense(WIDTH)]
        else:
            stack.append(parallel.ColumnParallelDense(2 * tensor_parallel_size, gather_output=False))
            stack.append(parallel.RowParallelDense(WIDTH, input_is_parallel=True))
    return keras.Sequential(stack)


def plan_of(devices: list[str], mesh: tuple[int, int, int], stage: int, schedule: str, ranks_per_process: int) -> CollectivePlan:
    """Traces a training step on a mesh (data, pipe, tensor), and runs nothing.

    Raises:
        RuntimeError: ranks would wait for each other.
    """
    data, pipe, tensor = mesh
    rounds = 2 if schedule == "interleaved" and pipe > 1 else 1
    microbatches = 2 * pipe
    with processes(ranks_per_process):
        strategy = tfdist.ShardedStrategy(
            devices[: data * pipe * tensor], zero_stage=stage, pipeline_parallel_size=pipe, tensor_parallel_size=tensor
        )
        with strategy.scope():
            model = model_of(max(pipe * rounds, 2), tensor)
            if pipe > 1:
                model = tfdist.PipelineModel(model, num_microbatches=microbatches, schedule=schedule, stages_per_rank=rounds)
            model.compile(keras.optimizers.AdamW(global_clipnorm=1.0), "mse", auto_scale_loss=False)
        model.optimizer.build(model.trainable_variables)
        rows = strategy.experimental_distribute_values_from_function(lambda _: tf.zeros([microbatches, WIDTH]))

        @tf.function(autograph=False)
        def step(x: Any, y: Any) -> Any:
            return strategy.run(lambda x, y: model.train_step((x, y)), (x, y))

        step.get_concrete_function(rows, rows)
    return strategy.last_plan


def cases(size: int) -> list[tuple[tuple[int, int, int], int, str, int]]:
    """Returns (mesh, stage, schedule, ranks per process) of all meshes of `size` ranks.

    Up to four ranks each stage where there is no pipeline, and each schedule where there is one; above, two of them, in turn.
    """
    divisors = [number for number in range(1, size + 1) if size % number == 0]
    meshes = [(size // pipe // tensor, pipe, tensor) for pipe in divisors for tensor in divisors if size % (pipe * tensor) == 0]
    found = []
    for number, mesh in enumerate(meshes):
        for turn in range(4) if size <= 4 else range(number % 2, 4, 2):
            each = divisors[(number + turn) % (len(divisors) - 1)]  # not all of them in one process
            found.append((mesh, (number + turn) % 4, SCHEDULES[turn], each))
    return found


def trace_all(size: int) -> dict[str, int]:
    """Traces all cases of `size` ranks; returns how many collectives each has, and how many are messages between processes."""
    devices = tfdist.use_logical_cpus(9)[1:]
    found = {}
    for case in cases(size):
        plan = plan_of(devices, *case)
        found[case] = [sum(map(len, plan.records)), sum(one.op == "send" for chain in plan.records for one in chain)]
    return found
