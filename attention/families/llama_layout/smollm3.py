"""SmolLM3: Llama's layout; some layers have no rotary embedding."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from transformers import SmolLM3Config, SmolLM3ForCausalLM

from attention.families import _separate
from attention.geometry import HeadGeometry


def geometry(config: Any) -> HeadGeometry:
    # 1: the layer has one.
    rotary_layers = tuple(bool(rotates) for rotates in config.no_rope_layers)
    return replace(_separate.geometry(config, family="smollm3"), rotary_layers=rotary_layers)


FAMILY = _separate.family("smollm3", SmolLM3Config, SmolLM3ForCausalLM, geometry)
