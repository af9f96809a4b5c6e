"""Qwen3-MoE: Qwen3's attention; the MLPs are mixtures of experts."""

from __future__ import annotations

from functools import partial

from transformers import Qwen3MoeConfig, Qwen3MoeForCausalLM

from attention.families import _separate

_GEOMETRY = partial(_separate.geometry, family="qwen3_moe", qk_norm=True)
FAMILY = _separate.family("qwen3_moe", Qwen3MoeConfig, Qwen3MoeForCausalLM, _GEOMETRY)
