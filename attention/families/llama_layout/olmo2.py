"""OLMo 2.

Llama's layout, and one RMS norm over all query heads and one over all key heads of a token.
Attention is added to the stream after a norm.
"""

from __future__ import annotations

from transformers import Olmo2Config, Olmo2ForCausalLM

from attention.families import _whole_norm, no_residual_scale

FAMILY = _whole_norm.family(
    "olmo2", Olmo2Config, Olmo2ForCausalLM, residual_scale=no_residual_scale
)
