"""OLMo 2.

Llama's layout, and one RMS norm over all query heads and one over all key heads of a token.
"""

from __future__ import annotations

from transformers import Olmo2Config, Olmo2ForCausalLM

from attention.families import _whole_norm

FAMILY = _whole_norm.family("olmo2", Olmo2Config, Olmo2ForCausalLM)
