"""Qwen2: q, k and v have biases, o has none."""

from __future__ import annotations

from typing import Any

from transformers import Qwen2Config, Qwen2ForCausalLM

from attention.families import Family, _separate
from attention.geometry import HeadGeometry


def geometry(config: Any) -> HeadGeometry:
    return _separate.geometry(config, family="qwen2", qkv_bias=True, output_bias=False, qk_norm=False)


FAMILY = Family(
    name="qwen2",
    config_class=Qwen2Config,
    model_class=Qwen2ForCausalLM,
    geometry=geometry,
    attention_modules=_separate.attention_modules,
    read=_separate.read,
    reshape=_separate.reshape,
    write=_separate.write,
    plain_config=_separate.plain_config,
)
