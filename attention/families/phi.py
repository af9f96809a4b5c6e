"""Phi (1, 1.5, 2).

Partial rotary embedding, biases everywhere, the output projection is called `dense`.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from transformers import PhiConfig, PhiForCausalLM

from attention.families import _separate
from attention.geometry import HeadGeometry


def geometry(config: Any) -> HeadGeometry:
    norm = bool(config.qk_layernorm)
    result = _separate.geometry(config, family="phi", qkv_bias=True, output_bias=True, qk_norm=norm)
    return replace(result, centred_norm=norm)


FAMILY = _separate.family(
    "phi", PhiConfig, PhiForCausalLM, geometry, query_norm=lambda module, q: module.q_layernorm(q)
)
