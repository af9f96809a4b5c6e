"""Gemma (1): the config has a field for the head dim, which is not the width over the heads.

One switch turns the biases of all projections on.
"""

from __future__ import annotations

from typing import Any

from transformers import GemmaConfig, GemmaForCausalLM

from attention.families import _separate
from attention.geometry import HeadGeometry


def geometry(config: Any) -> HeadGeometry:
    """Raise ValueError for bidirectional attention, which keeps no cache."""
    check_causal(config, "Gemma")
    return _separate.geometry(config, family="gemma")


def check_causal(config: Any, name: str) -> None:
    """Raise ValueError for a Gemma with bidirectional attention."""
    if config.use_bidirectional_attention:
        raise ValueError(
            f"a {name} with use_bidirectional_attention=true is not supported; expected causal "
            f"attention"
        )


FAMILY = _separate.family("gemma", GemmaConfig, GemmaForCausalLM, geometry)
