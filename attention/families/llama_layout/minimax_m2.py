"""MiniMax-M2: OLMo 2's norms over all heads; half of each head is rotated.

The MLPs are mixtures of experts.
"""

from __future__ import annotations

from functools import wraps
from typing import Any

from torch import nn
from transformers import MiniMaxM2Config, MiniMaxM2ForCausalLM
from transformers.models.minimax_m2.modeling_minimax_m2 import MiniMaxM2SparseMoeBlock

from attention.families import _whole_norm

_init = MiniMaxM2SparseMoeBlock.__init__


@wraps(_init)
def _with_bias_in_float32(self: Any, *args: Any, **kwargs: Any) -> None:
    _init(self, *args, **kwargs)
    self.e_score_correction_bias = nn.Buffer(self.e_score_correction_bias.float())


# The bias that chooses experts is in the model's dtype in transformers 5, which rounds it when the
# model is loaded in 16 bits. It is stored in float32, and vLLM and the other families read it so.
MiniMaxM2SparseMoeBlock.__init__ = _with_bias_in_float32

FAMILY = _whole_norm.family("minimax_m2", MiniMaxM2Config, MiniMaxM2ForCausalLM)
