"""Granite: Llama's layout.

The config has fields for the scales of the scores, the embedding, the residual stream and the
logits.
"""

from __future__ import annotations

from transformers import GraniteConfig, GraniteForCausalLM

from attention.families import _separate

FAMILY = _separate.family(
    "granite",
    GraniteConfig,
    GraniteForCausalLM,
    residual_scale=lambda config: float(config.residual_multiplier),
)
