"""Gemma (1): the head dim is a field of its own, not width over heads; biases are one switch for all projections.

Gemma 2 is another family: its attention caps the scores, which the attention functions here would ignore.
"""

from __future__ import annotations

from typing import Any

from transformers import GemmaConfig, GemmaForCausalLM

from attention.families import _separate
from attention.geometry import HeadGeometry


def geometry(config: Any) -> HeadGeometry:
    """Raises ValueError for bidirectional attention, which keeps no cache."""
    if config.use_bidirectional_attention:
        raise ValueError("a Gemma with use_bidirectional_attention=true is not supported; expected causal attention")
    return _separate.geometry(config, family="gemma")


FAMILY = _separate.family("gemma", GemmaConfig, GemmaForCausalLM, geometry)
