"""Llama: biases are one switch for all four projections."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from transformers import LlamaConfig, LlamaForCausalLM

from attention.families import _separate
from attention.geometry import HeadGeometry


def geometry(config: Any) -> HeadGeometry:
    """With biases no padding: Mistral, which takes any number of query heads, has none."""
    return replace(
        _separate.geometry(config, family="llama"),
        pads_queries=not (config.attention_bias or config.mlp_bias),
    )


FAMILY = _separate.family("llama", LlamaConfig, LlamaForCausalLM, geometry)
