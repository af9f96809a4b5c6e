"""Phi (1, 1.5, 2): partial rotary embedding, biases everywhere, the output projection is called `dense`."""

from __future__ import annotations

from typing import Any

from transformers import PhiConfig, PhiForCausalLM

from attention.families import Family, _separate
from attention.geometry import HeadGeometry


def geometry(config: Any) -> HeadGeometry:
    return _separate.geometry(config, family="phi", qkv_bias=True, output_bias=True, qk_norm=bool(config.qk_layernorm))


FAMILY = Family(
    name="phi",
    config_class=PhiConfig,
    model_class=PhiForCausalLM,
    geometry=geometry,
    attention_modules=_separate.attention_modules,
    read=_separate.read,
    reshape=_separate.reshape,
    write=_separate.write,
    plain_config=_separate.plain_config,
    query_norm="q_layernorm",
)
