"""A family of models: Arcee, laid out as Llama. Its place: attention/families/arcee.py."""

from __future__ import annotations

from typing import Any

from transformers import ArceeConfig, ArceeForCausalLM

from attention.families import _separate
from attention.geometry import HeadGeometry


def geometry(config: Any) -> HeadGeometry:
    """What the config says about the heads: one switch for the biases of all four projections, no norms of q and k."""
    biases = bool(config.attention_bias)
    return _separate.geometry(config, family="arcee", qkv_bias=biases, output_bias=biases)


FAMILY = _separate.family("arcee", ArceeConfig, ArceeForCausalLM, geometry)
