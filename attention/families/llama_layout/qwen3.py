"""Qwen3: q and k pass an RMS norm after projection, so keys cannot be rotated."""

from __future__ import annotations

from functools import partial

from transformers import Qwen3Config, Qwen3ForCausalLM

from attention.families import _separate

_GEOMETRY = partial(_separate.geometry, family="qwen3", qk_norm=True)
FAMILY = _separate.family("qwen3", Qwen3Config, Qwen3ForCausalLM, _GEOMETRY)
