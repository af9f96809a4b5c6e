"""Llama: biases are one switch for all four projections."""

from __future__ import annotations

from transformers import LlamaConfig, LlamaForCausalLM

from attention.families import _separate

FAMILY = _separate.family("llama", LlamaConfig, LlamaForCausalLM)
