"""A family of models: Arcee, laid out as Llama. Its place: attention/families/arcee.py."""

from __future__ import annotations

from transformers import ArceeConfig, ArceeForCausalLM

from attention.families import _separate

# One switch for the biases of all four projections, no norms of queries and keys: what `family` takes by default.
FAMILY = _separate.family("arcee", ArceeConfig, ArceeForCausalLM)
