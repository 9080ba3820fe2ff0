"""One rank of the gpt under PyTorch's `parallelize_module`: what `benchmarks.tensor_training` is to tfdist."""

from __future__ import annotations

import time
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Replicate
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module

from benchmarks.cases import Case
from benchmarks.gpt_arrays import EPSILON, LEARNING_RATE, token_batch
from benchmarks.torch_devices import device_of
from benchmarks.torch_gpt import GPT, assign_initial_weights, cross_entropy


def build(case: Case) -> GPT:
    model = GPT(case).to(device_of(case))
    if case.devices > 1:
        plan: dict[str, Any] = {"token_embedding": RowwiseParallel(input_layouts=Replicate())}
        for i in range(case.layers):
            plan |= {f"block_{i}.attention.{name}": ColwiseParallel() for name in ("query", "key", "value")}
            plan |= {f"block_{i}.attention.attention_output": RowwiseParallel()}
            plan |= {f"block_{i}.mlp_in": ColwiseParallel(), f"block_{i}.mlp_out": RowwiseParallel()}
        plan["logits"] = ColwiseParallel(output_layouts=Replicate())
        parallelize_module(model, init_device_mesh(device_of(case).type, (case.devices,)), plan)
    assign_initial_weights(model, case)
    return model


def local_bytes(tensor: Any) -> int:
    if isinstance(tensor, DTensor):
        tensor = tensor.to_local()
    return tensor.numel() * tensor.element_size() if isinstance(tensor, torch.Tensor) else 0


class TensorLoop:
    def __init__(self, case: Case):
        self.model = build(case)
        parameters = list(self.model.parameters())
        # A fused step does not mix cut and whole tensors.
        groups = [[p for p in parameters if isinstance(p, DTensor) == is_cut] for is_cut in (True, False)]
        named = [{"params": group} for group in groups if group]
        self.optimizer = torch.optim.Adam(named, lr=LEARNING_RATE, eps=EPSILON, fused=True)
        self.inputs, self.targets = (torch.from_numpy(array.copy()).to(device_of(case)) for array in token_batch(case))

    def run(self, steps: int) -> tuple[float, float]:
        """Runs `steps` steps; returns seconds and the last loss. Gradients are kept after the last, to be counted."""
        dist.barrier()
        start = time.perf_counter()
        for _ in range(steps):
            self.optimizer.zero_grad(set_to_none=True)
            loss = cross_entropy(self.model(self.inputs), self.targets)
            loss.backward()
            self.optimizer.step()
        last = float(loss.detach())
        dist.barrier()
        return time.perf_counter() - start, last

    def state_bytes(self) -> int:
        """Returns the bytes of parameters, gradients and moments that this rank holds."""
        tensors = [tensor for p in self.model.parameters() for tensor in (p, p.grad, *self.optimizer.state[p].values())]
        return sum(map(local_bytes, tensors))
