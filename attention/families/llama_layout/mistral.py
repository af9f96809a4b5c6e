"""Mistral: no biases; head_dim may be set apart from hidden_size."""

from __future__ import annotations

from transformers import MistralConfig, MistralForCausalLM

from attention.families import _separate

FAMILY = _separate.family("mistral", MistralConfig, MistralForCausalLM)
