"""Qwen3: q and k pass an RMS norm after projection, so keys cannot be rotated."""

from __future__ import annotations

from typing import Any

from transformers import Qwen3Config, Qwen3ForCausalLM

from attention.families import _separate
from attention.geometry import HeadGeometry


def geometry(config: Any) -> HeadGeometry:
    return _separate.geometry(
        config,
        family="qwen3",
        qkv_bias=bool(config.attention_bias),
        output_bias=bool(config.attention_bias),
        qk_norm=True,
    )


FAMILY = _separate.family("qwen3", Qwen3Config, Qwen3ForCausalLM, geometry)
