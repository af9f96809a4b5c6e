"""Llama: biases are one switch for all four projections."""

from __future__ import annotations

from typing import Any

from transformers import LlamaConfig, LlamaForCausalLM

from attention.families import _separate
from attention.geometry import HeadGeometry


def geometry(config: Any) -> HeadGeometry:
    return _separate.geometry(
        config,
        family="llama",
        qkv_bias=bool(config.attention_bias),
        output_bias=bool(config.attention_bias),
        qk_norm=False,
    )


FAMILY = _separate.family("llama", LlamaConfig, LlamaForCausalLM, geometry)
