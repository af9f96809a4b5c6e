"""Llama: biases are one switch for all four projections."""

from __future__ import annotations

from typing import Any

from transformers import LlamaConfig, LlamaForCausalLM

from attention.families import Family, _separate
from attention.geometry import HeadGeometry


def geometry(config: Any) -> HeadGeometry:
    return _separate.geometry(
        config,
        family="llama",
        qkv_bias=bool(config.attention_bias),
        output_bias=bool(config.attention_bias),
        qk_norm=False,
    )


FAMILY = Family(
    name="llama",
    config_class=LlamaConfig,
    model_class=LlamaForCausalLM,
    geometry=geometry,
    attention_modules=_separate.attention_modules,
    read=_separate.read,
    reshape=_separate.reshape,
    write=_separate.write,
    plain_config=_separate.plain_config,
)
