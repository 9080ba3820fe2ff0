"""One rank of the gpt or the mlp under DeepSpeed. Imported where it takes part only: DS_ACCELERATOR must be set before."""

from __future__ import annotations

from typing import Any

import deepspeed
import torch
from torch import nn

from benchmarks.cases import DEEPSPEED_STAGES, Case
from benchmarks.torch_data import ADAMW, DataLoop, build_model
from benchmarks.torch_gpt import assign_initial_weights, keras_array

_BUCKET = 10_000_000  # elements


def configuration(case: Case) -> dict[str, Any]:
    """Returns DeepSpeed's configuration: float32, no clipping, PyTorch's own AdamW, blocking communication."""
    return {
        "train_micro_batch_size_per_gpu": case.global_batch_size // case.devices,
        "gradient_accumulation_steps": 1,
        "gradient_clipping": 0.0,  # 1.0 unless told otherwise
        "zero_allow_untested_optimizer": True,
        "zero_force_ds_cpu_optimizer": False,
        "steps_per_print": 10**9,
        "zero_optimization": {
            "stage": DEEPSPEED_STAGES[case.contender],
            "overlap_comm": False,
            "contiguous_gradients": True,
            "reduce_bucket_size": _BUCKET,
            "allgather_bucket_size": _BUCKET,
            "stage3_prefetch_bucket_size": _BUCKET,
            "stage3_param_persistence_threshold": 2048,  # elements: smaller parameters stay whole
            "stage3_max_live_parameters": _BUCKET,
            "stage3_max_reuse_distance": _BUCKET,
        },
    }


def _build_sharded(case: Case) -> nn.Module:
    """Builds the model of stage 3 a parameter at a time, so that no rank ever has the whole."""
    with deepspeed.zero.Init(config_dict_or_path=configuration(case)):
        model = build_model(case)
    for name, parameter in model.named_parameters():
        with deepspeed.zero.GatheredParameters(parameter, modifier_rank=0), torch.no_grad():
            if torch.distributed.get_rank() == 0:
                parameter.copy_(keras_array(name, parameter.shape, case))
    return model


class DeepSpeedLoop(DataLoop):
    def _build(self, case: Case) -> tuple[nn.Module, Any]:
        deepspeed.init_distributed("gloo")  # takes the group that there is
        if DEEPSPEED_STAGES[case.contender] == 3:
            model = _build_sharded(case)
        else:
            model = build_model(case)
            assign_initial_weights(model, case)
        optimizer = torch.optim.AdamW(model.parameters(), **ADAMW)
        engine, optimizer, *_ = deepspeed.initialize(model=model, optimizer=optimizer, config=configuration(case))
        return engine, optimizer

    def _sizes(self) -> list[int]:
        return [getattr(parameter, "ds_numel", parameter.numel()) for parameter in self.model.parameters()]

    def _update(self, loss: torch.Tensor) -> None:
        self.model.backward(loss)
        self.model.step()
