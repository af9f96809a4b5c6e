"""Names of the metrics of a run in MLflow, spelt in no other file."""

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
    "hfu": "hfu",
    "cpu_percent": "system/cpu_utilization_percentage",
    "memory_megabytes": "system/system_memory_usage_megabytes",
    "gpu_memory_megabytes": "system/gpu_0_memory_usage_megabytes",
    "kv_bytes_per_token": "kv_bytes_per_token",
    "kv_bytes_per_token_per_gpu": "kv_bytes_per_token_per_gpu",
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
    "test_loss": "test_loss",
    "baseline_test_loss": "baseline_test_loss",
    "untrained_test_loss": "untrained_test_loss",
    "original_test_loss": "original_test_loss",
    "loss_difference": "test_loss_below_baseline",
    "loss_difference_stderr": "test_loss_below_baseline_stderr",
    "original_kv_bytes_per_token": "original_kv_bytes_per_token",
}
"""Metrics by the name of the value in reports and records.

Losses are of held-out text, in nats per token, except `train_loss` (mean since the last evaluation)
and `train_loss_step` (of one batch); `eval_loss_delta` is over the original model.
"""
_PREFIXES = (
    "task_",
    "recall_at_",
    "similarity_",
    "relaxation_",
    "engine_",
    "loss_last_positions",
)
"""Prefixes of values whose number depends on the measurement; they keep their names."""

MetricPoint = dict[str, float]
"""Values of metrics by name, with their `step` and `time` (seconds since 1970)."""


def point(values: Mapping[str, Any], step: int, time: float) -> MetricPoint:
    """Return a point of MLflow's series.

    Args:
        values: Values by their names in reports; those that are no numbers or have no name in
            MLflow are left out. A held-out loss gives a perplexity too.
        step: Training steps until then.
        time: Seconds since 1970.
    """
    metrics = {
        METRICS.get(key, key): value
        for key, value in values.items()
        if (key in METRICS or key.startswith(_PREFIXES)) and is_number(value)
    }
    loss = values.get("loss")
    if loss is not None and math.isfinite(loss) and loss < math.log(1e300):
        metrics["perplexity"] = math.exp(loss)
    return metrics | {"step": step, "time": time}


def best_point(
    losses: Mapping[float, float], original: float, step: int, time: float
) -> MetricPoint:
    """Return a point of the lowest loss by KV ratio: `best_eval_loss_kv25` and the like."""
    metrics: MetricPoint = {}
    for ratio, loss in losses.items():
        metrics[f"best_{METRICS['loss']}_kv{100 * ratio:.4g}"] = loss
        metrics[f"best_{METRICS['loss_increase']}_kv{100 * ratio:.4g}"] = loss - original
    return metrics | {"step": step, "time": time}


def is_number(value: Any) -> bool:
    """Return whether a value is an int or a float, but no bool."""
    return isinstance(value, (int, float)) and not isinstance(value, bool)
