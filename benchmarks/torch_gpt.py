"""The gpt in PyTorch, whole or in parts, with the weights that it has in Keras."""

from __future__ import annotations

import torch
from torch import nn
from torch.distributed.tensor import DTensor, distribute_tensor

from benchmarks.cases import Case
from benchmarks.gpt_arrays import initial_weight

NORM_EPSILON = 1e-3  # Keras's, of a LayerNormalization


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


class Block(nn.Module):
    def __init__(self, width: int, heads: int):
        super().__init__()
        self.attention_norm = nn.LayerNorm(width, NORM_EPSILON)
        self.attention = Attention(width, width // heads)
        self.mlp_norm = nn.LayerNorm(width, NORM_EPSILON)
        self.mlp_in = nn.Linear(width, 4 * width)
        self.mlp_out = nn.Linear(4 * width, width)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = x + self.attention(self.attention_norm(x))
        return x + self.mlp_out(nn.functional.gelu(self.mlp_in(self.mlp_norm(x))))


class GPT(nn.Module):
    """The decoder of `benchmarks.training`, its parts under the same names but that a block is a module here.

    Args:
        case: its sizes.
        blocks: those of a pipeline's stage; None: all. What stands before the first block, and behind the last, goes with it.
    """

    def __init__(self, case: Case, blocks: range | None = None):
        super().__init__()
        width = case.width
        self.blocks = range(case.layers) if blocks is None else blocks
        self.is_first, self.is_last = self.blocks.start == 0, self.blocks.stop == case.layers
        if self.is_first:
            self.token_embedding = nn.Embedding(case.vocabulary, width)
            self.position_embedding = nn.Parameter(torch.empty(case.sequence_length, width))
        for i in self.blocks:
            self.add_module(f"block_{i}", Block(width, case.heads))
        if self.is_last:
            self.final_norm = nn.LayerNorm(width, NORM_EPSILON)
            self.logits = nn.Linear(width, case.vocabulary)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if self.is_first:
            x = self.token_embedding(x) + self.position_embedding
        for i in self.blocks:
            x = self.get_submodule(f"block_{i}")(x)
        return self.logits(self.final_norm(x)) if self.is_last else x


def cross_entropy(logits: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
    return nn.functional.cross_entropy(logits.flatten(0, 1), targets.flatten())


def keras_array(name: str, shape: torch.Size, case: Case) -> torch.Tensor:
    """Returns the initial value of a parameter: of the Keras weight that it is, in PyTorch's layout."""
    module, _, kind = name.rpartition(".")
    module = module.replace(".", "_", 1) if module.startswith("block_") else module
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


@torch.no_grad()
def assign_initial_weights(model: nn.Module, case: Case) -> None:
    for name, parameter in model.named_parameters():
        whole = keras_array(name, parameter.shape, case).contiguous().to(parameter.device)
        if isinstance(parameter, DTensor):
            whole = distribute_tensor(whole, parameter.device_mesh, parameter.placements)
        parameter.copy_(whole)
