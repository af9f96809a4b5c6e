"""OLMoE: OLMo 2's attention; the MLPs are mixtures of experts."""

from __future__ import annotations

from transformers import OlmoeConfig, OlmoeForCausalLM

from attention.families import _whole_norm

FAMILY = _whole_norm.family("olmoe", OlmoeConfig, OlmoeForCausalLM)
