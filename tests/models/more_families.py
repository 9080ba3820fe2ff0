"""More of KerasHub's models than the table of docs/exactness.md names: a backbone and a Dense on what it returns."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import keras
import numpy as np

from tests.models.families import BATCH, CLASSES, LENGTH, ROWS, VOCABULARY, hub

TEXT = {"vocabulary_size": VOCABULARY, "num_layers": 2, "hidden_dim": 16, "intermediate_dim": 24}
SHORT = {"dropout": 0.0, "max_sequence_length": LENGTH}
SIDE = 32
IMAGE = (SIDE, SIDE, 3)
_ELECTRA = {key: value for key, value in TEXT.items() if key != "vocabulary_size"} | {"vocab_size": VOCABULARY}

BACKBONES: Mapping[str, dict[str, Any]] = {
    "Albert": {**TEXT, **SHORT, "num_heads": 4, "embedding_dim": 8},
    "Bart": {**TEXT, **SHORT, "num_heads": 4},
    "Bloom": {**TEXT, "num_heads": 4},
    "DebertaV3": {**TEXT, **SHORT, "num_heads": 4, "bucket_size": 4},
    "DenseNet": {"stackwise_num_repeats": [2, 2], "image_shape": IMAGE, "growth_rate": 4},
    "DistilBert": {**TEXT, **SHORT, "num_heads": 4},
    "Electra": {**_ELECTRA, **SHORT, "num_heads": 4, "embedding_dim": 8},
    "FNet": {**TEXT, **SHORT},
    "Falcon": {**TEXT, "num_attention_heads": 4},
    "GPTNeoX": {**TEXT, "num_heads": 4, "max_sequence_length": LENGTH, "rotary_percentage": 0.5},
    "Gemma3": {
        **TEXT,
        "image_size": 16,
        "num_query_heads": 4,
        "num_key_value_heads": 2,
        "head_dim": 4,
        "use_sliding_window_attention": True,
        "sliding_window_size": 4,
        "vision_encoder": None,
        "use_query_key_norm": True,
    },
    "Llama3": {**TEXT, "num_query_heads": 4, "num_key_value_heads": 2},
    "Mixtral": {**TEXT, "num_query_heads": 4, "num_key_value_heads": 2, "num_experts": 2},
    "Qwen3": {**TEXT, "num_query_heads": 4, "num_key_value_heads": 2, "head_dim": 4},
    "ResNet": {
        "input_conv_filters": [8],
        "input_conv_kernel_sizes": [3],
        "stackwise_num_filters": [64, 32],
        "stackwise_num_blocks": [1, 1],
        "stackwise_num_strides": [1, 2],
        "block_type": "bottleneck_block",
        "image_shape": IMAGE,
    },
    "Roberta": {**TEXT, **SHORT, "num_heads": 4},
    "VGG": {"stackwise_num_repeats": [1, 2], "stackwise_num_filters": [4, 8], "image_shape": IMAGE},
}
OF_IMAGES = ("DenseNet", "ResNet", "VGG")


def build(name: str) -> keras.Model:
    backbone = getattr(hub().models, f"{name}Backbone")(**BACKBONES[name])
    output = backbone.output
    if isinstance(output, dict):
        output = next(output[key] for key in ("sequence_output", "decoder_sequence_output") if key in output)
    if name in OF_IMAGES:
        output = keras.layers.GlobalAveragePooling2D()(output)
    model = keras.Model(backbone.input, keras.layers.Dense(CLASSES, name="head")(output), name=name.lower())
    for layer in model._flatten_layers():
        if isinstance(layer, keras.layers.BatchNormalization):
            layer.synchronized = True  # else a data rank normalizes by its own examples
    return model


def data(name: str) -> tuple[Any, np.ndarray]:
    rng = np.random.default_rng(13)
    if name in OF_IMAGES:
        return rng.normal(size=(ROWS, *IMAGE)).astype("float32"), rng.integers(0, CLASSES, ROWS)
    tokens = rng.integers(1, VOCABULARY, (ROWS, LENGTH)).astype("int32")
    mask = np.ones((ROWS, LENGTH), "int32")
    mask[::3, -2:] = 0
    inputs = {"token_ids": tokens * mask, "padding_mask": mask, "segment_ids": (tokens > 9).astype("int32")}
    inputs |= {f"{side}_{key}": value for side in ("encoder", "decoder") for key, value in inputs.items()}
    return inputs, rng.integers(0, CLASSES, (ROWS, LENGTH))


def fitting_inputs(model: keras.Model, inputs: Any) -> Any:
    """Returns those of the inputs that the model takes."""
    return {name: inputs[name] for name in model.input} if isinstance(inputs, dict) else inputs


__all__ = ["BACKBONES", "BATCH", "build", "data", "fitting_inputs"]
