"""Gemma 2: scores are softly capped, layers with and without a window alternate.

The config has fields for the head dim and for the scale of the scores.
"""

from __future__ import annotations

from typing import Any

from transformers import Gemma2Config, Gemma2ForCausalLM

from attention.families import _separate, no_residual_scale
from attention.families.llama_layout.gemma import check_causal
from attention.geometry import HeadGeometry


def geometry(config: Any) -> HeadGeometry:
    """Raise ValueError for bidirectional attention."""
    check_causal(config, "Gemma 2")
    return _separate.geometry(config, family="gemma2")


# Its class takes a number of query heads only if that divides the model width
FAMILY = _separate.family(
    "gemma2",
    Gemma2Config,
    Gemma2ForCausalLM,
    geometry,
    pads_queries=False,
    residual_scale=no_residual_scale,
)
