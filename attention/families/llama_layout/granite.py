"""Granite: Llama's layout.

The scale of the scores is a field of its own, as are those of embedding and logits.
"""

from __future__ import annotations

from transformers import GraniteConfig, GraniteForCausalLM

from attention.families import _separate

FAMILY = _separate.family("granite", GraniteConfig, GraniteForCausalLM)
