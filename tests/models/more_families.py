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
MELS = 8  # bands of a spectrogram
SIGHT = {"image_shape": IMAGE, "patch_size": 8, "num_layers": 2, "num_heads": 4, "hidden_dim": 16, "intermediate_dim": 24}
_ELECTRA = {key: value for key, value in TEXT.items() if key != "vocabulary_size"} | {"vocab_size": VOCABULARY}

BACKBONES: Mapping[str, dict[str, Any]] = {
    "Albert": {**TEXT, **SHORT, "num_heads": 4, "embedding_dim": 8},
    "Bart": {**TEXT, **SHORT, "num_heads": 4},
    "Bloom": {**TEXT, "num_heads": 4},
    "DebertaV3": {**TEXT, **SHORT, "num_heads": 4, "bucket_size": 4},
    "DenseNet": {"stackwise_num_repeats": [2, 2], "image_shape": IMAGE, "growth_rate": 4},
    "DINOV2": {**SIGHT, "position_embedding_shape": IMAGE, "use_mask_token": False},
    "DINOV3": {**SIGHT, "use_mask_token": False},
    "DeiT": SIGHT,
    "DistilBert": {**TEXT, **SHORT, "num_heads": 4},
    "Electra": {**_ELECTRA, **SHORT, "num_heads": 4, "embedding_dim": 8},
    "ESM": {**TEXT, **SHORT, "num_heads": 4},
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
    "MobileNet": {
        "stackwise_expansion": [[8], [16, 16]],
        "stackwise_num_blocks": [1, 2],
        "stackwise_num_filters": [[8], [16, 16]],
        "stackwise_kernel_size": [[3], [3, 3]],
        "stackwise_num_strides": [[2], [2, 1]],
        "stackwise_se_ratio": [[0.25], [None, None]],
        "stackwise_activation": [["relu"], ["hard_swish", "hard_swish"]],
        "stackwise_padding": [[1], [1, 1]],
        "output_num_filters": 16,
        "depthwise_filters": 8,
        "depthwise_stride": 2,
        "depthwise_residual": False,
        "last_layer_filter": 16,
        "squeeze_and_excite": 0.5,
        "image_shape": IMAGE,
        "input_num_filters": 8,
    },
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
    "RWKV7": {
        "hidden_size": 16,
        "head_size": 4,
        "num_layers": 2,
        "vocabulary_size": VOCABULARY,
        "intermediate_dim": 24,
        "gate_lora": 4,
        "mv_lora": 4,
        "aaa_lora": 4,
        "decay_lora": 4,
    },
    "Roberta": {**TEXT, **SHORT, "num_heads": 4},
    "RoformerV2": {**TEXT, "dropout": 0.0, "num_heads": 4, "head_size": 4},
    "SmolLM3": {
        **TEXT,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "attention_bias": False,
        "attention_dropout": 0.0,
        "rope_layer_enabled_list": [True, False],
        "layer_types": ["full_attention"] * 2,
        "mlp_bias": False,
        "layer_norm_epsilon": 1e-6,
        "max_position_embeddings": LENGTH,
        "rope_theta": 1e4,
        "partial_rotary_factor": 1.0,
    },
    "SwinTransformer": {
        "image_shape": IMAGE,
        "embed_dim": 8,
        "depths": [1, 1],
        "num_heads": [2, 4],
        "window_size": 4,
        "drop_path": 0.0,
    },
    "VGG": {"stackwise_num_repeats": [1, 2], "stackwise_num_filters": [4, 8], "image_shape": IMAGE},
    "ViTDet": {
        "hidden_size": 16,
        "num_layers": 2,
        "intermediate_dim": 24,
        "num_heads": 4,
        "global_attention_layer_indices": [1],
        "image_shape": IMAGE,
        "patch_size": 8,
        "num_output_channels": 8,
        "window_size": 2,
    },
    "Whisper": {**TEXT, "num_heads": 4, "num_mels": MELS, "max_encoder_sequence_length": 2 * LENGTH}
    | {"max_decoder_sequence_length": LENGTH},
    "XLMRoberta": {**TEXT, **SHORT, "num_heads": 4},
    "Xception": {
        "stackwise_conv_filters": [[4, 8], [8, 8]],
        "stackwise_pooling": [True, False],
        "image_shape": IMAGE,
    },
}
OF_IMAGES = "DINOV2 DINOV3 DeiT DenseNet MobileNet ResNet SwinTransformer VGG ViTDet Xception".split()


def build(name: str) -> keras.Model:
    backbone = getattr(hub().models, f"{name}Backbone")(**BACKBONES[name])
    output = backbone.output
    if isinstance(output, dict):
        output = next(output[key] for key in ("sequence_output", "decoder_sequence_output") if key in output)
    if name in OF_IMAGES:
        pooling = keras.layers.GlobalAveragePooling2D if len(output.shape) == 4 else keras.layers.GlobalAveragePooling1D
        output = pooling()(output)
    model = keras.Model(backbone.input, keras.layers.Dense(CLASSES, name="classes")(output), name=name.lower())
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
    inputs["features"] = rng.normal(size=(ROWS, 2 * LENGTH, MELS)).astype("float32")
    inputs |= {f"{side}_{key}": value for side in ("encoder", "decoder") for key, value in inputs.items()}
    return inputs, rng.integers(0, CLASSES, (ROWS, LENGTH))


def fitting_inputs(model: keras.Model, inputs: Any) -> Any:
    """Returns those of the inputs that the model takes."""
    if not isinstance(model.input, dict):
        return inputs["token_ids"] if isinstance(inputs, dict) else inputs
    return {name: inputs[name] if isinstance(inputs, dict) else inputs for name in model.input}


__all__ = ["BACKBONES", "BATCH", "build", "data", "fitting_inputs"]
