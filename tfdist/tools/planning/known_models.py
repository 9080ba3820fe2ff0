"""Published decoders as data: their sizes, and their parameters by arithmetic. Nothing here imports TensorFlow.

`decoder.py` makes the Keras model of a configuration. A block with width h, q query heads and k key-value heads of size d, and an
MLP of width f has

    attention   h d (2 q + 2 k)              of which the last h d q are the output's projection
    MLP         2 h f, gated 3 h f
    norms       2 h (one, where attention and MLP run side by side), twice that with a bias

parameters, and with biases d (q + 2 k) + h + f + h (gated + f) more.
"""

import dataclasses
from typing import Any

from tfdist import errors


@dataclasses.dataclass(frozen=True, kw_only=True)
class DecoderConfig:
    """The sizes of a decoder-only Transformer.

    Attributes:
        name: as it is called on the command line.
        num_layers: blocks.
        width: of the residual stream.
        num_heads: query heads.
        num_key_value_heads: heads of keys and values; fewer than `num_heads` is grouped-query attention, 1 multi-query.
        head_size: of each head.
        mlp_width: of the hidden layer of the MLP.
        vocabulary_size: tokens.
        max_sequence_length: what the model was published with, in tokens.
        is_gated: whether the MLP's hidden layer is multiplied with a gate, a third matrix (SwiGLU).
        activation: of the MLP or of its gate.
        normalization: "layer" or "rms".
        has_bias: whether projections and normalizations have one.
        is_parallel: whether attention and MLP of a block run side by side on one normalization.
        has_positions: whether positions are embedded by a table; if not, they are rotations, which have no parameters.
        is_tied: whether the head is the table of the embedding.
        published_parameters: the figure of the source.
        source: where the sizes are from.
    """

    name: str
    num_layers: int
    width: int
    num_heads: int
    num_key_value_heads: int
    head_size: int
    mlp_width: int
    vocabulary_size: int
    max_sequence_length: int
    is_gated: bool = True
    activation: str = "silu"
    normalization: str = "rms"
    has_bias: bool = False
    is_parallel: bool = False
    has_positions: bool = False
    is_tied: bool = False
    published_parameters: float
    source: str

    @property
    def block_parameters(self) -> int:
        """Parameters of one block."""
        width, queries = self.width, self.num_heads * self.head_size
        projected = queries + 2 * self.num_key_value_heads * self.head_size
        hidden = (2 if self.is_gated else 1) * self.mlp_width
        weights = width * (projected + queries) + width * (hidden + self.mlp_width)
        biases = projected + width + hidden + width if self.has_bias else 0
        return weights + biases + (1 if self.is_parallel else 2) * self._norm_parameters

    @property
    def _norm_parameters(self) -> int:
        return self.width * (2 if self.normalization == "layer" and self.has_bias else 1)

    @property
    def embedding_parameters(self) -> int:
        """Parameters of the tables of tokens and positions, and of the head where it has its own."""
        tables = self.vocabulary_size * (1 if self.is_tied else 2) + (self.max_sequence_length if self.has_positions else 0)
        return tables * self.width

    @property
    def parameters(self) -> int:
        """All parameters."""
        return self.num_layers * self.block_parameters + self.embedding_parameters + self._norm_parameters


def _llama3(name: str, **sizes: Any) -> DecoderConfig:
    return DecoderConfig(
        name=name,
        num_key_value_heads=8,
        head_size=128,
        vocabulary_size=128256,
        max_sequence_length=8192,
        source="The Llama 3 Herd of Models, 2024, table 3",
        **sizes,
    )


def _gpt(name: str, width: int, num_heads: int, **sizes: Any) -> DecoderConfig:
    return DecoderConfig(
        name=name,
        width=width,
        num_heads=num_heads,
        num_key_value_heads=num_heads,
        head_size=width // num_heads,
        mlp_width=4 * width,
        vocabulary_size=50257,
        is_gated=False,
        activation="gelu",
        normalization="layer",
        has_bias=True,
        has_positions=True,
        is_tied=True,
        **sizes,
    )


_GPT2 = "Radford et al. 2019, Language Models are Unsupervised Multitask Learners, table 2"
_GPT3 = "Brown et al. 2020, Language Models are Few-Shot Learners, table 2.1"
KNOWN_MODELS = {
    config.name: config
    for config in (
        _gpt("gpt2-xl", 1600, 25, num_layers=48, max_sequence_length=1024, published_parameters=1.5e9, source=_GPT2),
        _gpt("gpt3-175b", 12288, 96, num_layers=96, max_sequence_length=2048, published_parameters=175e9, source=_GPT3),
        DecoderConfig(
            name="palm-540b",
            num_layers=118,
            width=18432,
            num_heads=48,
            num_key_value_heads=1,
            head_size=256,
            mlp_width=73728,
            vocabulary_size=256000,
            max_sequence_length=2048,
            normalization="layer",
            is_parallel=True,
            is_tied=True,
            published_parameters=540.35e9,
            source="Chowdhery et al. 2022, PaLM: Scaling Language Modeling with Pathways, table 1",
        ),
        _llama3("llama3-8b", num_layers=32, width=4096, num_heads=32, mlp_width=14336, published_parameters=8.03e9),
        _llama3("llama3-70b", num_layers=80, width=8192, num_heads=64, mlp_width=28672, published_parameters=70.6e9),
        _llama3("llama3-405b", num_layers=126, width=16384, num_heads=128, mlp_width=53248, published_parameters=405e9),
    )
}


def known_model(name: str) -> DecoderConfig:
    """Returns the configuration called `name`, in upper or lower case. Raises ValueError when there is none."""
    found = KNOWN_MODELS.get(name.lower()) if isinstance(name, str) else None
    if found is None:
        raise errors.value_error(f"`config` must be one of {', '.join(KNOWN_MODELS)}.", config=name)
    return found
