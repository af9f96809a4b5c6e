"""DeepSpeed's configuration: what Headfold decides, and `train.deepspeed` merged into it.

DeepSpeed is not loaded.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any

import torch

from attention.io.precision import DTYPES
from trainers.settings import TrainSettings

ADAM_BYTES = 12  # per trained parameter: a float32 copy and two moments
LAYOUT = "layout.json"
"""File of a training checkpoint: what its other files depend on (`layout_of`)."""
DECAY = "weight_decay_of"  # in a layout: the parameters that decay, where they are a group apart
WRITTEN = {
    "zero_optimization": (
        "sub_group_size", "round_robin_gradients", "parameter_alignment", "legacy_stage1",
        "offload_optimizer", "offload_param", "zero_quantized_nontrainable_weights",
    ),
    "bf16": (),
    "optimizer": (),
    "data_types": (),
}  # fmt: skip
"""Settings that change the files of a training checkpoint: whole sections (), or these keys."""


def bytes_per_trained(settings: TrainSettings) -> int:
    """Return the bytes of a trained parameter in a training checkpoint."""
    if settings.zero_stage == 0:  # whose weights are float32 themselves
        return ADAM_BYTES
    return DTYPES[settings.dtype].itemsize + ADAM_BYTES


def config_of(settings: TrainSettings) -> dict[str, Any]:
    """Return the whole configuration that DeepSpeed is given.

    Adam is torch's, since DeepSpeed would compile its own, and fused on a GPU; there DeepSpeed's is
    used where the optimiser is in CPU memory or NVMe, or where `optimizer.params.torch_adam` is
    false.
    """
    on_gpu = settings.device == "auto" and torch.cuda.is_available()
    compiled = _offloads(settings) and on_gpu
    optimizer: dict[str, Any] = {
        "lr": settings.learning_rate,
        "weight_decay": settings.weight_decay,
    }
    optimizer |= {"betas": [settings.beta1, settings.beta2], "torch_adam": not compiled}
    if on_gpu and not compiled and _is_torch_adam_as_it_is(settings):
        optimizer["fused"] = True
    config: dict[str, Any] = {
        "train_micro_batch_size_per_gpu": settings.device_batch_size,
        "gradient_accumulation_steps": settings.gradient_accumulation_steps,
        "gradient_clipping": settings.max_grad_norm,
        "zero_optimization": {"stage": settings.zero_stage},
        "bf16": {"enabled": settings.dtype == "bfloat16"},
        "optimizer": {"type": "AdamW", "params": optimizer},
        # Otherwise torch's Adam is refused where the optimiser is in CPU memory.
        "zero_force_ds_cpu_optimizer": False,
        "steps_per_print": 10**9,
    }
    if sums_in_float32(settings):
        config["data_types"] = {"grad_accum_dtype": "fp32"}
    return _merged(config, settings.deepspeed)


def sums_in_float32(settings: TrainSettings) -> bool:
    """Whether gradients in bfloat16 are summed over passes in float32.

    Not with ZeRO 1, where DeepSpeed would take another optimiser for it, which holds all of them on
    every worker [0.19], nor where `train.deepspeed` says otherwise.
    """
    if settings.dtype != "bfloat16":
        return False
    data_types: Any = settings.deepspeed.get("data_types", {})
    if (dtype := data_types.get("grad_accum_dtype")) is not None:
        return dtype in ("fp32", "float32", "float", "torch.float32")
    bf16: Any = settings.deepspeed.get("bf16", {})
    return settings.zero_stage > 1 and not bf16.get("bf16_master_weights_and_grads")


def layout_of(settings: TrainSettings) -> dict[str, Any]:
    """Return what the files of a training checkpoint depend on, but for the number of workers.

    This can be changed (`trainers.resharding`): a training can be resumed only from a checkpoint of
    the same layout.
    """
    layout: dict[str, Any] = {"zero_stage": settings.zero_stage, "dtype": settings.dtype}
    if settings.weight_decay:
        layout[DECAY] = "matrices"
    lora = {"tuning": "lora", "lora_rank": settings.lora_rank, "lora_alpha": settings.lora_alpha}
    layout |= (
        lora if settings.tuning == "lora" else {"tuning": "kv"} if settings.tuning == "kv" else {}
    )
    return layout | ({"deepspeed": from_user} if (from_user := _written_by(settings)) else {})


def decays_everything(layout: str | None) -> bool:
    """Whether a training checkpoint with this layout file was written by an optimiser of one group.

    So were all before weight decay left vectors and embeddings alone; None: there is none.
    """
    return layout is not None and DECAY not in json.loads(layout)


def _written_by(settings: TrainSettings) -> dict[str, Any]:
    """Return what of `train.deepspeed` changes the files of a training checkpoint.

    Empty where nothing does.
    """
    result: dict[str, Any] = {}
    for section, keys in WRITTEN.items():
        section_keys: Any = settings.deepspeed.get(section, {})
        if kept_keys := {
            key: value for key, value in section_keys.items() if not keys or key in keys
        }:
            result[section] = kept_keys
    return result


def _is_torch_adam_as_it_is(settings: TrainSettings) -> bool:
    """Whether `train.deepspeed` does not choose which of torch's kernels Adam uses."""
    params: Any = settings.deepspeed.get("optimizer", {})
    params = params.get("params", {})
    return params.get("torch_adam", True) and "foreach" not in params


def _offloads(settings: TrainSettings) -> bool:
    zero: Any = settings.deepspeed.get("zero_optimization", {})
    return (zero.get("offload_optimizer") or {}).get("device", "none") != "none"


def _merged(base: Mapping[str, Any], overrides: Mapping[str, Any]) -> dict[str, Any]:
    """Return `base` updated with `overrides`, section by section."""
    result = dict(base)
    for key, value in overrides.items():
        both = isinstance(value, Mapping) and isinstance(result.get(key), Mapping)
        result[key] = _merged(result[key], value) if both else value
    return result
