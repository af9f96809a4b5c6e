"""DeepSpeed's configuration: what Headfold decides, and beside it what `train.deepspeed` adds. DeepSpeed is not loaded.

A key that Headfold decides itself is refused with the setting to use instead: the loop, the schedule and what reports
say depend on it.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from attention.messages import near

if TYPE_CHECKING:
    from trainers.settings import TrainSettings

DECIDED = {
    "train_batch_size": "set train.batch_size",
    "train_micro_batch_size_per_gpu": "set train.micro_batch_size",
    "gradient_accumulation_steps": "set train.batch_size and train.micro_batch_size",
    "gradient_clipping": "set train.max_grad_norm",
    "zero_optimization.stage": "set train.zero_stage",
    "bf16.enabled": "set train.dtype",
    "fp16": "train.dtype is float32 or bfloat16",
    "torch_autocast": "set train.dtype",
    "scheduler": "set train.learning_rate, train.warmup_fraction and train.min_lr_ratio",
    "activation_checkpointing": "set train.activation_checkpointing",
    "optimizer.type": "it is AdamW",
    "optimizer.params.lr": "set train.learning_rate",
    "optimizer.params.weight_decay": "set train.weight_decay",
    "optimizer.params.betas": "set train.beta1 and train.beta2",
}
"""Keys that are Headfold's, and what to do instead."""

Known = Mapping[str, Any]
OF_ADAM = {
    "torch_adam": bool, "fused": bool, "foreach": bool, "amsgrad": bool, "bias_correction": bool, "eps": float,
    "fp32_optimizer_states": bool,
}  # fmt: skip
KEYS: Known = {
    "zero_optimization": None,
    "optimizer": {"params": OF_ADAM},
    "bf16": None,
    "aio": None,
    "comms_logger": None,
    "data_types": {"grad_accum_dtype": str},
    "communication_data_type": str,
    "prescale_gradients": bool,
    "gradient_predivide_factor": float,
    "zero_force_ds_cpu_optimizer": bool,
    "wall_clock_breakdown": bool,
    "memory_breakdown": bool,
    "steps_per_print": int,
}
"""Keys that may be set, with the type of a value; None: a section that DeepSpeed checks itself."""

WRITTEN = {
    "zero_optimization": (
        "sub_group_size", "round_robin_gradients", "parameter_alignment", "legacy_stage1", "offload_optimizer",
        "offload_param", "zero_quantized_nontrainable_weights",
    ),
    "bf16": (),
    "optimizer": (),
    "data_types": (),
}  # fmt: skip
"""What changes the files of a training checkpoint: whole sections (), or these keys of one."""


def check_keys(given: Mapping[str, Any], known: Known | None = KEYS, path: str = "") -> None:
    """Raise ValueError for a key that Headfold decides, that there is not, or whose value is of another type."""
    for key, value in given.items():
        name = f"{path}{key}"
        if name in DECIDED:
            raise ValueError(f"{name} is decided by Headfold; {DECIDED[name]}")
        if known is not None and key not in known:
            raise ValueError(f"{name}: unknown key{near(key, known)}; allowed here: {', '.join(sorted(known))}")
        kind = known[key] if known is not None else Any
        if kind is None or isinstance(kind, Mapping):
            if not isinstance(value, Mapping):
                raise ValueError(f"{name}: expected keys and values, got {value!r}")
            check_keys(value, kind, f"{name}.")
        elif kind is not Any and type(value) is not kind and not (kind is float and type(value) is int):
            raise ValueError(f"{name}: expected {kind.__name__}, got {value!r}")


def config_of(settings: TrainSettings) -> dict[str, Any]:
    """The whole configuration that DeepSpeed is given.

    Adam is torch's, since DeepSpeed would compile its own; on a GPU it is DeepSpeed's own where the optimiser lies in
    CPU memory or NVMe, or where `optimizer.params.torch_adam` is false.
    """
    import torch

    compiled = _offloads(settings) and torch.cuda.is_available()
    optimizer: dict[str, Any] = {"lr": settings.learning_rate, "weight_decay": settings.weight_decay}
    optimizer |= {"betas": [settings.beta1, settings.beta2], "torch_adam": not compiled}
    own = {
        "train_batch_size": settings.batch_size,
        "train_micro_batch_size_per_gpu": settings.device_batch_size,
        "gradient_accumulation_steps": settings.gradient_accumulation_steps,
        "gradient_clipping": settings.max_grad_norm,
        "zero_optimization": {"stage": settings.zero_stage},
        "bf16": {"enabled": settings.dtype == "bfloat16"},
        "optimizer": {"type": "AdamW", "params": optimizer},
        "zero_force_ds_cpu_optimizer": False,  # else torch's Adam is refused where the optimiser lies in CPU memory
        "steps_per_print": 10**9,
    }
    return _merged(own, settings.deepspeed)


def layout_of(settings: TrainSettings) -> dict[str, Any]:
    """What the files of a training checkpoint depend on: only one of the same layout can be gone on with."""
    layout = {"num_workers": settings.num_workers, "zero_stage": settings.zero_stage, "dtype": settings.dtype}
    lora = {"tuning": "lora", "lora_rank": settings.lora_rank, "lora_alpha": settings.lora_alpha}
    layout |= lora if settings.tuning == "lora" else {}
    return layout | ({"deepspeed": given} if (given := _written_by(settings)) else {})


def _written_by(settings: TrainSettings) -> dict[str, Any]:
    """What of `train.deepspeed` changes the files of a training checkpoint; empty where nothing does."""
    found: dict[str, Any] = {}
    for section, keys in WRITTEN.items():
        given: Any = settings.deepspeed.get(section, {})
        if kept := {key: value for key, value in given.items() if not keys or key in keys}:
            found[section] = kept
    return found


def _offloads(settings: TrainSettings) -> bool:
    zero: Any = settings.deepspeed.get("zero_optimization", {})
    return (zero.get("offload_optimizer") or {}).get("device", "none") != "none"


def _merged(own: Mapping[str, Any], given: Mapping[str, Any]) -> dict[str, Any]:
    """`own` with what is `given` in its place, section by section."""
    result = dict(own)
    for key, value in given.items():
        both = isinstance(value, Mapping) and isinstance(result.get(key), Mapping)
        result[key] = _merged(result[key], value) if both else value
    return result
