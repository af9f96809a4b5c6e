"""Keys of DeepSpeed's configuration that `train.deepspeed` may have.

DeepSpeed itself is not loaded.

A key that Headfold decides itself is refused with the setting to use instead: the loop, the
schedule and what reports say depend on it.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from attention.base.messages import did_you_mean

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

KeyTree = Mapping[str, Any]
OF_ADAM = {
    "torch_adam": bool, "fused": bool, "foreach": bool, "amsgrad": bool, "bias_correction": bool,
    "eps": float, "fp32_optimizer_states": bool,
}  # fmt: skip
_KEYS: KeyTree = {
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


def check_keys(keys: Mapping[str, Any], known_keys: KeyTree | None = _KEYS, path: str = "") -> None:
    """Raise ValueError for a key that Headfold sets, that is unknown, or of another type."""
    for key, value in keys.items():
        name = f"{path}{key}"
        if name in DECIDED:
            raise ValueError(f"{name} is decided by Headfold; {DECIDED[name]}")
        if known_keys is not None and key not in known_keys:
            raise ValueError(
                f"{name}: unknown key{did_you_mean(key, known_keys)}; allowed here: "
                f"{', '.join(sorted(known_keys))}"
            )
        kind = known_keys[key] if known_keys is not None else Any
        if kind is None or isinstance(kind, Mapping):
            if not isinstance(value, Mapping):
                raise ValueError(f"{name}: expected keys and values, got {value!r}")
            check_keys(value, kind, f"{name}.")
        elif (
            kind is not Any
            and type(value) is not kind
            and not (kind is float and type(value) is int)
        ):
            raise ValueError(f"{name}: expected {kind.__name__}, got {value!r}")
