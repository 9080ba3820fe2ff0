"""A rank of PyTorch's FSDP2 for `benchmarks.recompute`, its blocks in `checkpoint_wrapper` or not."""

from __future__ import annotations

import json

import torch
import torch.distributed as dist
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import checkpoint_wrapper
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard

from benchmarks.gpt_arrays import make_batch
from benchmarks.recompute import answer, case_of, parse_args
from benchmarks.torch_devices import device_of, join, memory_of
from benchmarks.torch_gpt import GPT, cross_entropy


def main() -> None:
    args = parse_args()
    _, is_recomputed = json.loads(args.child)
    case = case_of(args, "fsdp2")
    join(case)
    device = device_of(case)
    mesh = init_device_mesh(device.type, (case.devices,))
    torch.manual_seed(1)
    model = GPT(case).to(device)
    torch.nn.init.zeros_(model.position_embedding)
    for i in model.blocks:
        block = getattr(model, f"block_{i}")
        if is_recomputed:
            setattr(model, f"block_{i}", checkpoint_wrapper(block))
        fully_shard(getattr(model, f"block_{i}"), mesh=mesh, reshard_after_forward=True)
    for part in (model.token_embedding, [model.final_norm, model.logits], model):
        fully_shard(part, mesh=mesh, reshard_after_forward=True)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4, fused=True)
    rows = case.global_batch_size // case.devices
    mine = slice(dist.get_rank() * rows, (dist.get_rank() + 1) * rows)
    inputs, targets = (torch.from_numpy(array[mine].copy()).long().to(device) for array in make_batch(case))

    def step() -> float:
        loss = cross_entropy(model(inputs), targets)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        return loss.item()

    answer(step, args.steps, memory_of(case))
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
