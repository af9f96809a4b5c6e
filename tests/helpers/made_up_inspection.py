"""Made-up measurements of `inspect`: for the page alone."""

from __future__ import annotations

import json
from typing import Any

import numpy as np

from attention.plan import AttentionPlan, LayerPlan


def made_up_inspection(layers: int, heads: int) -> dict[str, Any]:
    """A record of random numbers. `layers`, `heads`: of the model."""
    rng = np.random.default_rng(0)
    counts = [str(2**i) for i in range(heads.bit_length() - 1)]

    def matrices() -> dict[str, Any]:
        return {kind: rng.uniform(-0.5, 0.9, (heads, heads)).round(5).tolist() for kind in ("raw", "aligned")}

    def curve() -> dict[str, float]:
        return {count: float(rng.uniform(-0.001, 2)) for count in counts}

    one = LayerPlan((0,) * (heads // 2) + tuple(range(1, heads // 2 + 1)), (0,) * heads)
    plan = AttentionPlan((one,) * layers, 64)
    budget = {
        "kv_ratio_asked": 0.3, "kv_ratio": plan.kv_ratio, "byte_share": 0.3, "ceiling": "", "kv_bytes_per_token": 2048,
        "sum_of_increases": 0.2,
        "key": [heads // 2 + 1] * layers, "value": [1] * layers, "plan": json.loads(plan.to_json()),
    }  # fmt: skip
    scored = {
        "kv_ratio_asked": 0.3, "kv_ratio": 0.25, "kv_bytes_per_token": 2048, "kl": 0.5, "loss_increase_stderr": 0.002,
        "original_perplexity": 9.03, "seconds": 75.0,
    }  # fmt: skip
    fitted = {
        "loss": 2.199, "perplexity": 9.02, "loss_increase": -0.001, "fit_steps": 720, "fit_steps_of_convert": 720,
    }  # fmt: skip
    return {
        "model": "/models/a <b>name</b>", "family": "llama", "layers": layers, "heads": heads, "kv_heads": heads,
        "head_dim": 64, "qk_norm": False, "rotary_dims": 64, "parameters": 1_000_000, "kv_bytes_per_token": 8192,
        "original_loss": 2.2, "original_perplexity": 9.03, "calibration_data": "docs.jsonl", "calibration_tokens": 512,
        "eval_data": "held_out.jsonl", "eval_documents_left_out": 3, "eval_tokens": 1024, "sequence_length": 128,
        "recipe": {"name": "headfold", "grouping": "exact", "fusion": "least_squares"}, "seed": 0, "dtype": "float32",
        "sensitivity": [{"layer": i, "key": curve(), "value": curve()} for i in range(layers)],
        "similarity": [{"layer": i, "key": matrices(), "value": matrices()} for i in range(layers)],
        "redundancy": [{"layer": i, "query": 0.1, "key": 0.3, "value": 0.2} for i in range(layers)],
        "budgets": [budget],
        "cache_formats": [
            {
                "cache_format": "q4_0", "engines": ["llama.cpp"], "share": 0.28125, "kv_bytes_per_token": 1152,
                "flags": ["--cache-type-k q4_0 --cache-type-v q4_0 --flash-attn on"],
                "loss_increase": 0.0068, "loss_increase_stderr": 0.001,
            },
        ],
        "recipes": [
            {"recipe": "gqa", "loss": 7.5, "perplexity": 1808.04, "loss_increase": 5.3, **scored},
            {"recipe": "headfold", **scored, **fitted},
            {"recipe": "odd", "kv_ratio_asked": 0.3, "why_not": "cannot be", "seconds": 0.1},
        ],
        "agreement": [
            {"layer": i, "side": side, "moves": 12, "spearman": None, "spread": 0.1}
            for i in range(layers)
            for side in ("key", "value")
        ],
        "cache": "/tmp/x", "seconds": {"all": 80.0}, "options": ["--checkpoint", "model"],
    }  # fmt: skip
