"""One rank of the gpt or the mlp under PyTorch's data parallelism: what `benchmarks.training` is to tfdist."""

from __future__ import annotations

import time
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.algorithms.ddp_comm_hooks import default_hooks, powerSGD_hook
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.optim import ZeroRedundancyOptimizer
from torch.nn.parallel import DistributedDataParallel

from benchmarks.cases import DDP, DDP_BF16, DDP_POWERSGD, FSDP2, TORCH_SINGLE, ZERO_REDUNDANCY, Case
from benchmarks.gpt_arrays import EPSILON, LEARNING_RATE, WEIGHT_DECAY, make_batch
from benchmarks.torch_devices import device_of, wait
from benchmarks.torch_gpt import GPT, assign_initial_weights, cross_entropy

ADAMW = {"lr": LEARNING_RATE, "eps": EPSILON, "weight_decay": WEIGHT_DECAY, "fused": True}


class MLP(nn.Module):
    """The stack of `benchmarks.training`, its layers under the same names."""

    def __init__(self, case: Case):
        super().__init__()
        for i in range(case.layers):
            self.add_module(f"dense_{i}", nn.Linear(case.width, case.width))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        *hidden, last = self.children()
        for layer in hidden:
            x = nn.functional.relu(layer(x))
        return last(x)


def build_model(case: Case) -> nn.Module:
    return {"gpt": GPT, "mlp": MLP}[case.model](case)


def _build_whole(case: Case) -> nn.Module:
    model = build_model(case)
    assign_initial_weights(model, case)
    return model.to(device_of(case))


# Contenders: the model as it is trained, and its optimizer


def _single(case: Case) -> tuple[nn.Module, Any]:
    model = _build_whole(case)
    return model, torch.optim.AdamW(model.parameters(), **ADAMW)


def _ddp(case: Case, **settings: Any) -> tuple[nn.Module, Any]:
    model = DistributedDataParallel(_build_whole(case), gradient_as_bucket_view=True, **settings)
    return model, torch.optim.AdamW(model.parameters(), **ADAMW)


def _ddp_bf16(case: Case) -> tuple[nn.Module, Any]:
    model, optimizer = _ddp(case)
    # In a function of another name: DDP refuses this one without a GPU, though gloo can send bfloat16.
    model.register_comm_hook(None, lambda state, bucket: default_hooks.bf16_compress_hook(state, bucket))
    return model, optimizer


def _ddp_powersgd(case: Case) -> tuple[nn.Module, Any]:
    """Rank 4, from the third step on: the first two, which it needs to start from, are among those that warm up.

    All in one bucket: of several, gloo mixes up the messages, which follow upon each other in callbacks, and ends the process.
    """
    model, optimizer = _ddp(case, bucket_cap_mb=10_000)
    state = powerSGD_hook.PowerSGDState(None, matrix_approximation_rank=4, start_powerSGD_iter=2)
    model.register_comm_hook(state, powerSGD_hook.powerSGD_hook)
    return model, optimizer


def _zero_redundancy(case: Case) -> tuple[nn.Module, Any]:
    model = DistributedDataParallel(_build_whole(case), gradient_as_bucket_view=True)
    return model, ZeroRedundancyOptimizer(model.parameters(), torch.optim.AdamW, **ADAMW)


def _fsdp2(case: Case) -> tuple[nn.Module, Any]:
    """One group per block or layer; the embedding, and the head with its norm, on their own. No rank ever has the whole model."""
    device = device_of(case)
    mesh = init_device_mesh(device.type, (case.devices,))
    with torch.device("meta"):
        model = build_model(case)
    parts: list[Any] = [module for name, module in model.named_children() if name not in ("final_norm", "logits")]
    parts += [[model.final_norm, model.logits]] if case.model == "gpt" else []
    for part in [*parts, model]:
        fully_shard(part, mesh=mesh, reshard_after_forward=True)
    model.to_empty(device=device)
    assign_initial_weights(model, case)
    return model, torch.optim.AdamW(model.parameters(), **ADAMW)


BUILDERS = {
    TORCH_SINGLE: _single,
    DDP: _ddp,
    DDP_BF16: _ddp_bf16,
    DDP_POWERSGD: _ddp_powersgd,
    ZERO_REDUNDANCY: _zero_redundancy,
    FSDP2: _fsdp2,
}


class DataLoop:
    """Forward, backward, the optimizer's step. The rank's rows of the batch lie in memory."""

    def __init__(self, case: Case):
        self._case = case
        self.model, self.optimizer = self._build(case)
        self.parameters = sum(self._sizes())
        self._loss_of = cross_entropy if case.model == "gpt" else nn.functional.mse_loss
        ranks = range(case.num_ranks)
        rows = case.global_batch_size // len(ranks)
        mine = slice(dist.get_rank() * rows, (dist.get_rank() + 1) * rows)
        batch = (torch.from_numpy(array[mine].copy()).to(device_of(case)) for array in make_batch(case))
        self._inputs, self._targets = (array.long() if case.model == "gpt" else array for array in batch)

    def _build(self, case: Case) -> tuple[nn.Module, Any]:
        return BUILDERS[case.contender](case)

    def _sizes(self) -> list[int]:
        return [parameter.numel() for parameter in self.model.parameters()]  # a DTensor's is that of the whole

    def _update(self, loss: torch.Tensor) -> None:
        loss.backward()
        self.optimizer.step()
        self.optimizer.zero_grad(set_to_none=True)

    def run(self, steps: int) -> tuple[float, float]:
        """Runs `steps` steps; returns seconds, until the device is done, and the last loss, the mean over the ranks."""
        start = time.perf_counter()
        for _ in range(steps):
            loss = self._step()
        wait(self._case)
        return time.perf_counter() - start, self._mean(loss)

    def time_steps(self, steps: int) -> tuple[list[float], float]:
        """Runs `steps` steps; returns the seconds of each and the last loss, the mean over the ranks."""
        seconds = []
        for _ in range(steps):
            start = time.perf_counter()
            loss = self._step()
            wait(self._case)
            seconds.append(time.perf_counter() - start)
        return seconds, self._mean(loss)

    def _step(self) -> torch.Tensor:
        loss = self._loss_of(self.model(self._inputs), self._targets)
        self._update(loss)
        return loss

    @staticmethod
    def _mean(loss: torch.Tensor) -> float:
        last = loss.detach().clone()
        dist.all_reduce(last)
        return float(last) / dist.get_world_size()
