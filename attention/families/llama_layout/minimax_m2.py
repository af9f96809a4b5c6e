"""MiniMax-M2: OLMo 2's norms over all heads; half of each head is rotated.

The MLPs are mixtures of experts.
"""

from __future__ import annotations

from transformers import MiniMaxM2Config, MiniMaxM2ForCausalLM

from attention.families import _whole_norm

FAMILY = _whole_norm.family("minimax_m2", MiniMaxM2Config, MiniMaxM2ForCausalLM)
