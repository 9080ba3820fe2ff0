"""KerasHub's families of models, small, with random weights, and how they are trained.

KerasHub is imported when a family is built: most of the suite runs without it.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import keras
import numpy as np

VOCABULARY, LENGTH, WIDTH, CLASSES = 29, 6, 16, 5
ROWS, BATCH = 24, 4  # six steps
IMAGE = (8, 8, 3)


def hub() -> Any:
    import keras_hub  # noqa: PLC0415

    return keras_hub


def decoder_sizes() -> dict[str, int]:
    return {"vocabulary_size": VOCABULARY, "num_layers": 2, "hidden_dim": WIDTH, "intermediate_dim": 24}


def gpt2_backbone() -> keras.Model:
    return hub().models.GPT2Backbone(**decoder_sizes(), num_heads=4, dropout=0.0, max_sequence_length=LENGTH)


def llama_backbone() -> keras.Model:
    return hub().models.LlamaBackbone(**decoder_sizes(), num_query_heads=4, num_key_value_heads=2)


def gemma_backbone(key_value_heads: int = 1, **options: Any) -> keras.Model:
    sizes = {"num_query_heads": 4, "num_key_value_heads": key_value_heads, "head_dim": 4}
    return hub().models.GemmaBackbone(**decoder_sizes(), **sizes, **options)


def bert_backbone() -> keras.Model:
    return hub().models.BertBackbone(**decoder_sizes(), num_heads=4, dropout=0.0, max_sequence_length=LENGTH)


def t5_backbone() -> keras.Model:
    return hub().models.T5Backbone(**decoder_sizes(), num_heads=4, dropout=0.0)


def vit_backbone() -> keras.Model:
    sizes = {"num_layers": 2, "num_heads": 4, "hidden_dim": WIDTH, "mlp_dim": 24}
    return hub().models.ViTBackbone(image_shape=IMAGE, patch_size=4, **sizes)


def gpt2() -> keras.Model:
    return hub().models.GPT2CausalLM(gpt2_backbone(), preprocessor=None)


def llama() -> keras.Model:
    return hub().models.LlamaCausalLM(llama_backbone(), preprocessor=None)


def gemma() -> keras.Model:
    return hub().models.GemmaCausalLM(gemma_backbone(), preprocessor=None)


def bert() -> keras.Model:
    return hub().models.BertTextClassifier(bert_backbone(), num_classes=CLASSES, preprocessor=None, dropout=0.0)


def t5() -> keras.Model:
    backbone = t5_backbone()
    logits = backbone.token_embedding(backbone.output["decoder_sequence_output"], reverse=True)
    return keras.Model(backbone.input, logits, name="t5")


def vit() -> keras.Model:
    return hub().models.ViTImageClassifier(vit_backbone(), num_classes=CLASSES, preprocessor=None)


FAMILIES: Mapping[str, Callable[[], keras.Model]] = {
    "GPT-2": gpt2,
    "Llama": llama,
    "Gemma": gemma,
    "BERT": bert,
    "T5": t5,
    "ViT": vit,
}


def backbone_of(model: keras.Model) -> keras.Model:
    return getattr(model, "backbone", model)


def data(family: str, rows: int = ROWS) -> tuple[Any, np.ndarray, np.ndarray | None]:
    """Inputs, labels and the weights of the examples or positions: the last positions of some examples are padding."""
    rng = np.random.default_rng(13)
    if family == "ViT":
        return rng.normal(size=(rows, *IMAGE)).astype("float32"), rng.integers(0, CLASSES, rows), None
    tokens = rng.integers(1, VOCABULARY, (rows, LENGTH)).astype("int32")
    mask = np.ones((rows, LENGTH), "int32")
    mask[::3, -2:] = 0
    tokens *= mask
    if family == "T5":
        inputs = {"encoder_token_ids": tokens, "encoder_padding_mask": mask}
        inputs |= {"decoder_token_ids": np.roll(tokens, 1, axis=0), "decoder_padding_mask": np.ones_like(mask)}
        return inputs, tokens, mask.astype("float32")
    inputs = {"token_ids": tokens, "padding_mask": mask}
    if family == "BERT":
        return {**inputs, "segment_ids": (tokens > 9).astype("int32")}, rng.integers(0, CLASSES, rows), None
    return inputs, np.roll(tokens, -1, axis=1), mask.astype("float32")


def optimizer(family: str) -> keras.optimizers.Optimizer:
    if family in ("Llama", "BERT"):  # whose tables only look up: Keras's Adam squares repeated rows one by one on one device
        return keras.optimizers.SGD(0.03, momentum=0.9)
    return keras.optimizers.Adam(0.01, epsilon=1e-3)  # below it is the rounding of gradients that are zero


def loss() -> keras.losses.Loss:
    return keras.losses.SparseCategoricalCrossentropy(from_logits=True)
