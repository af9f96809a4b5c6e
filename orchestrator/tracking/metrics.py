"""What MLflow calls the numbers of a run: the one table of metric names, and no other file spells one."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

METRICS = {
    "loss": "eval_loss",
    "loss_increase": "eval_loss_delta",
    "kl": "eval_kl",
    "train_loss": "train_loss",
    "batch_loss": "train_loss_step",
    "tokens": "train_tokens",
    "tokens_per_second": "tokens_per_second",
    "learning_rate": "learning_rate",
    "gradient_norm": "grad_norm",
    "mfu": "mfu",
    "cpu_percent": "system/cpu_utilization_percentage",
    "memory_megabytes": "system/system_memory_usage_megabytes",
    "gpu_memory_megabytes": "system/gpu_0_memory_usage_megabytes",
    "kv_bytes_per_token": "kv_bytes_per_token",
    "cache_bytes_measured": "cache_bytes_measured",
    "actual_kv_ratio": "actual_kv_ratio",
    "decode_seconds_per_token": "decode_seconds_per_token",
    "parameters": "parameters",
    "remaining_distance": "remaining_distance",
    "best_loss": "best_eval_loss",
    "best_step": "best_step",
    "last_loss": "last_eval_loss",
    "untrained_loss": "untrained_eval_loss",
    "baseline_loss": "baseline_eval_loss",
    "baseline_step": "baseline_step",
    "original_loss": "original_eval_loss",
    "original_kv_bytes_per_token": "original_kv_bytes_per_token",
}
"""By the name of the value in reports and records. Losses are held out, in nats per token, but for `train_loss` (mean
since the last evaluation) and `train_loss_step` (of one batch); `eval_loss_delta` is over the original model."""
OPEN = ("task_", "recall_at_", "similarity_", "relaxation_", "engine_", "loss_last_positions")
"""What the names begin with of values of which there are as many as somebody asks for."""
PERPLEXITY = "perplexity"
"""Of every point with a held-out loss: e to the power of it."""


def point(values: Mapping[str, Any], step: int, time: float) -> dict[str, Any]:
    """A point of MLflow's series at a training step, `time` in seconds since 1970: the numbers among some values that
    the table knows, under their names there."""
    known = {
        METRICS.get(key, key): value
        for key, value in values.items()
        if (key in METRICS or key.startswith(OPEN)) and _is_number(value)
    }
    if (loss := values.get("loss")) is not None and math.isfinite(loss) and loss < math.log(1e300):
        known[PERPLEXITY] = math.exp(loss)
    return known | {"step": step, "time": time}


def best_point(losses: Mapping[float, float], original: float, step: int, time: float) -> dict[str, Any]:
    """The lowest held-out loss at each KV ratio so far: `best_eval_loss_kv25`, `best_eval_loss_delta_kv25`."""
    named = {}
    for ratio, loss in losses.items():
        named[f"best_{METRICS['loss']}_kv{100 * ratio:.4g}"] = loss
        named[f"best_{METRICS['loss_increase']}_kv{100 * ratio:.4g}"] = loss - original
    return named | {"step": step, "time": time}


def _is_number(value: Any) -> bool:
    return isinstance(value, (int, float)) and not isinstance(value, bool)
