"""Mistral: no biases; head_dim may be set apart from hidden_size."""

from __future__ import annotations

from typing import Any

from transformers import MistralConfig, MistralForCausalLM

from attention.families import Family, _separate
from attention.geometry import HeadGeometry


def geometry(config: Any) -> HeadGeometry:
    return _separate.geometry(config, family="mistral", qkv_bias=False, output_bias=False, qk_norm=False)


FAMILY = Family(
    name="mistral",
    config_class=MistralConfig,
    model_class=MistralForCausalLM,
    geometry=geometry,
    attention_modules=_separate.attention_modules,
    read=_separate.read,
    reshape=_separate.reshape,
    write=_separate.write,
    plain_config=_separate.plain_config,
)
