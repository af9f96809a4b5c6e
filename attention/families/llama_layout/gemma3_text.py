"""Gemma 3, the language model alone: q and k pass an RMS norm after projection.

Layers with and without a window alternate; each kind has a separate rotary embedding.
"""

from __future__ import annotations

from typing import Any

from transformers import Gemma3ForCausalLM, Gemma3TextConfig

from attention.families import _separate, no_residual_scale
from attention.families.llama_layout.gemma import check_causal
from attention.geometry import HeadGeometry


def geometry(config: Any) -> HeadGeometry:
    """Raise ValueError for bidirectional attention."""
    check_causal(config, "Gemma 3")
    return _separate.geometry(config, family="gemma3_text", qk_norm=True)


# Its class takes a number of query heads only if that divides the model width
FAMILY = _separate.family(
    "gemma3_text",
    Gemma3TextConfig,
    Gemma3ForCausalLM,
    geometry,
    pads_queries=False,
    residual_scale=no_residual_scale,
)
