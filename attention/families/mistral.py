"""Mistral: no biases; head_dim may be set apart from hidden_size."""

from __future__ import annotations

from typing import Any

from transformers import MistralConfig, MistralForCausalLM

from attention.families import _separate
from attention.geometry import HeadGeometry


def geometry(config: Any) -> HeadGeometry:
    return _separate.geometry(config, family="mistral", qkv_bias=False, output_bias=False, qk_norm=False)


FAMILY = _separate.family("mistral", MistralConfig, MistralForCausalLM, geometry)
