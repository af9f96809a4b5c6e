"""A family of models: Arcee, laid out as Llama. Its place: attention/families/arcee.py."""

from __future__ import annotations

from typing import Any

from transformers import ArceeConfig, ArceeForCausalLM

from attention.families import Family, _separate
from attention.geometry import HeadGeometry


def geometry(config: Any) -> HeadGeometry:
    """What the config says about the heads: one switch for the biases of all four projections, no norms of q and k."""
    biases = bool(config.attention_bias)
    return _separate.geometry(config, family="arcee", qkv_bias=biases, output_bias=biases)


FAMILY = Family(
    name="arcee",
    config_class=ArceeConfig,
    model_class=ArceeForCausalLM,
    geometry=geometry,
    attention_modules=_separate.attention_modules,
    read=_separate.read,
    reshape=_separate.reshape,
    write=_separate.write,
    plain_config=_separate.plain_config,
)
