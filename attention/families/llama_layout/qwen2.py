"""Qwen2: q, k and v have biases, o has none."""

from __future__ import annotations

from functools import partial

from transformers import Qwen2Config, Qwen2ForCausalLM

from attention.families import _separate

_GEOMETRY = partial(_separate.geometry, family="qwen2", qkv_bias=True, output_bias=False)
FAMILY = _separate.family("qwen2", Qwen2Config, Qwen2ForCausalLM, _GEOMETRY)
