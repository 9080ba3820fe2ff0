"""One rank of the gpt under `torch.distributed.pipelining`: what `benchmarks.pipeline_training` is to tfdist."""

from __future__ import annotations

import time

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.pipelining import PipelineStage, Schedule1F1B, ScheduleGPipe, ScheduleInterleaved1F1B

from benchmarks.cases import Case
from benchmarks.gpt_arrays import EPSILON, LEARNING_RATE, WEIGHT_DECAY, token_batch
from benchmarks.torch_devices import device_of
from benchmarks.torch_gpt import GPT, assign_initial_weights, cross_entropy

ONE_STAGE = {"gpipe": ScheduleGPipe, "1f1b": Schedule1F1B}


class PipelineLoop:
    """Stages go around the ranks, as tfdist's do."""

    def __init__(self, case: Case):
        device = device_of(case)
        rank, last = dist.get_rank(), case.num_stages - 1
        self._device = device
        indices = range(rank, case.num_stages, case.devices)
        self.model = nn.ModuleDict({f"stage_{index}": GPT(case, case.blocks_of(index)).to(device) for index in indices})
        for module in self.model.values():
            assign_initial_weights(module, case)
        stages = [
            PipelineStage(module, index, case.num_stages, device)
            for index, module in zip(indices, self.model.values(), strict=True)
        ]
        if case.schedule == "interleaved":
            self.schedule = ScheduleInterleaved1F1B(stages, case.num_microbatches, loss_fn=cross_entropy)
        else:
            self.schedule = ONE_STAGE[case.schedule](stages[0], case.num_microbatches, loss_fn=cross_entropy)
        self.optimizer = torch.optim.AdamW(
            self.model.parameters(), lr=LEARNING_RATE, eps=EPSILON, weight_decay=WEIGHT_DECAY, fused=True
        )
        inputs, targets = (torch.from_numpy(array.copy()).to(device) for array in token_batch(case))
        self.inputs = (inputs,) if 0 in indices else ()
        self.targets = targets if last in indices else None

    def run(self, steps: int) -> tuple[float, float]:
        """Runs `steps` steps; returns seconds and the last loss, which all ranks are told."""
        dist.barrier()
        start = time.perf_counter()
        for _ in range(steps):
            losses: list[torch.Tensor] = []
            self.schedule.step(*self.inputs, target=self.targets, losses=losses, return_outputs=False)
            self.optimizer.step()
            self.optimizer.zero_grad(set_to_none=True)
        last = torch.stack(losses).detach().mean() if losses else torch.zeros((), device=self._device)
        dist.all_reduce(last)  # only the last stage has one
        return time.perf_counter() - start, float(last)
