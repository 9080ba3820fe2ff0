"""One rank of the gpt under PyTorch's `parallelize_module`: what `benchmarks.child` is to tfdist.

    python -m benchmarks.torch_child tensor

It needs no TensorFlow, and runs in any environment that has PyTorch and NumPy. The first line on stdin is the case.
"""

from __future__ import annotations

import json
import os
import sys
import time
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Replicate, distribute_tensor
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module

from benchmarks.cases import Case
from benchmarks.gpt_arrays import initial_weight, token_batch

EPSILON = 1e-3  # Keras's, of a LayerNormalization


class Attention(nn.Module):
    def __init__(self, width: int, head_dim: int):
        super().__init__()
        self.head_dim = head_dim
        self.query, self.key, self.value = (nn.Linear(width, width) for _ in range(3))
        self.attention_output = nn.Linear(width, width)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        def heads(projected: torch.Tensor) -> torch.Tensor:  # (batch, heads of this rank, seq, head_dim)
            return projected.unflatten(-1, (-1, self.head_dim)).transpose(1, 2)

        q, k, v = heads(self.query(x)), heads(self.key(x)), heads(self.value(x))
        attended = nn.functional.scaled_dot_product_attention(q, k, v, is_causal=True)
        return self.attention_output(attended.transpose(1, 2).flatten(-2))


class GPT(nn.Module):
    """The decoder of `benchmarks.training`, its parts under the same names."""

    def __init__(self, case: Case):
        super().__init__()
        width = case.width
        self.token_embedding = nn.Embedding(case.vocabulary, width)
        self.position_embedding = nn.Parameter(torch.empty(case.sequence_length, width))
        self.num_layers = case.layers
        for i in range(case.layers):
            self.add_module(f"block_{i}_attention_norm", nn.LayerNorm(width, EPSILON))
            self.add_module(f"block_{i}_attention", Attention(width, width // case.heads))
            self.add_module(f"block_{i}_mlp_norm", nn.LayerNorm(width, EPSILON))
            self.add_module(f"block_{i}_mlp_in", nn.Linear(width, 4 * width))
            self.add_module(f"block_{i}_mlp_out", nn.Linear(4 * width, width))
        self.final_norm = nn.LayerNorm(width, EPSILON)
        self.logits = nn.Linear(width, case.vocabulary)

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        x = self.token_embedding(tokens) + self.position_embedding
        for i in range(self.num_layers):
            norm, attention, mlp_norm, mlp_in, mlp_out = (
                getattr(self, f"block_{i}_{name}") for name in ("attention_norm", "attention", "mlp_norm", "mlp_in", "mlp_out")
            )
            x = x + attention(norm(x))
            x = x + mlp_out(nn.functional.gelu(mlp_in(mlp_norm(x))))
        return self.logits(self.final_norm(x))


def keras_array(name: str, shape: torch.Size, case: Case) -> torch.Tensor:
    """Returns the initial value of a parameter: of the Keras weight that it is, in PyTorch's layout."""
    module, _, kind = name.rpartition(".")
    if name == "position_embedding":
        return torch.from_numpy(initial_weight("position_embedding/vectors", tuple(shape)))
    if module == "token_embedding":
        return torch.from_numpy(initial_weight("token_embedding/embeddings", tuple(shape)))
    path = module.replace(".", "/")
    if "norm" in module:
        return torch.from_numpy(initial_weight(f"{path}/{'gamma' if kind == 'weight' else 'beta'}", tuple(shape)))
    if kind == "bias":
        return torch.from_numpy(initial_weight(f"{path}/bias", tuple(shape)))
    # Keras draws the kernels of an attention as (in, heads, head_dim) and (heads, head_dim, out): in rows of the same order.
    return torch.from_numpy(initial_weight(f"{path}/kernel", tuple(shape)[::-1])).t()


def build(case: Case) -> GPT:
    model = GPT(case)
    if case.devices > 1:
        plan: dict[str, Any] = {"token_embedding": RowwiseParallel(input_layouts=Replicate())}
        for i in range(case.layers):
            plan |= {f"block_{i}_attention.{name}": ColwiseParallel() for name in ("query", "key", "value")}
            plan |= {f"block_{i}_attention.attention_output": RowwiseParallel()}
            plan |= {f"block_{i}_mlp_in": ColwiseParallel(), f"block_{i}_mlp_out": RowwiseParallel()}
        plan["logits"] = ColwiseParallel(output_layouts=Replicate())
        parallelize_module(model, init_device_mesh("cpu", (case.devices,)), plan)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            whole = keras_array(name, parameter.shape, case).contiguous()
            if isinstance(parameter, DTensor):
                whole = distribute_tensor(whole, parameter.device_mesh, parameter.placements)
            parameter.copy_(whole)
    return model


def local_bytes(tensor: Any) -> int:
    if isinstance(tensor, DTensor):
        tensor = tensor.to_local()
    return tensor.numel() * tensor.element_size() if isinstance(tensor, torch.Tensor) else 0


class Loop:
    def __init__(self, case: Case):
        self.model = build(case)
        parameters = list(self.model.parameters())
        # A fused step does not mix cut and whole tensors.
        groups = [[p for p in parameters if isinstance(p, DTensor) == is_cut] for is_cut in (True, False)]
        self.optimizer = torch.optim.Adam([{"params": group} for group in groups if group], lr=1e-4, eps=1e-12, fused=True)
        self.inputs, self.targets = (torch.from_numpy(array.copy()) for array in token_batch(case))

    def run(self, steps: int) -> tuple[float, float]:
        """Runs `steps` steps; returns seconds and the last loss. Gradients are kept after the last, to be counted."""
        dist.barrier()
        start = time.perf_counter()
        for _ in range(steps):
            self.optimizer.zero_grad(set_to_none=True)
            logits = self.model(self.inputs)
            loss = nn.functional.cross_entropy(logits.flatten(0, 1), self.targets.flatten())
            loss.backward()
            self.optimizer.step()
        last = float(loss.detach())
        dist.barrier()
        return time.perf_counter() - start, last

    def state_bytes(self) -> int:
        """Returns the bytes of parameters, gradients and moments that this rank holds."""
        tensors = [tensor for p in self.model.parameters() for tensor in (p, p.grad, *self.optimizer.state[p].values())]
        return sum(map(local_bytes, tensors))


def main() -> None:
    channel = os.fdopen(os.dup(sys.stdout.fileno()), "w")
    os.dup2(sys.stderr.fileno(), sys.stdout.fileno())

    def answer(fields: dict[str, Any]) -> None:
        channel.write(json.dumps(fields) + "\n")
        channel.flush()

    case = Case(**json.loads(sys.stdin.readline()))
    torch.set_num_threads(max(1, (os.cpu_count() or 1) // case.devices))
    torch.set_num_interop_threads(1)
    dist.init_process_group("gloo")
    loop = Loop(case)
    _, loss = loop.run(3)
    parameters = sum(parameter.numel() for parameter in loop.model.parameters())  # a DTensor's count is that of the whole
    answer({"warmup_loss": loss, "parameters": parameters, "state_bytes": loop.state_bytes(), "torch": torch.__version__})
    for line in sys.stdin:
        seconds, loss = loop.run(json.loads(line)["steps"])
        answer({"seconds": seconds, "loss": loss})
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
