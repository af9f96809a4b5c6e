"""Mixtral: Mistral's attention; the MLPs are mixtures of experts."""

from __future__ import annotations

from transformers import MixtralConfig, MixtralForCausalLM

from attention.families import _separate

FAMILY = _separate.family("mixtral", MixtralConfig, MixtralForCausalLM)
