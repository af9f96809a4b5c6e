"""GLM-4 MoE (4.5, 4.6): half of each head is rotated, q, k and v have biases, o has none.

With `use_qk_norm` q and k pass an RMS norm after projection. The MLPs are mixtures of experts, but
for those of the first layers.
"""

from __future__ import annotations

from typing import Any

from transformers import Glm4MoeConfig, Glm4MoeForCausalLM

from attention.families import _separate
from attention.geometry import HeadGeometry


def geometry(config: Any) -> HeadGeometry:
    """Return the geometry of a config, whose switches are biases and norms."""
    norms = bool(config.use_qk_norm)
    return _separate.geometry(config, family="glm4_moe", output_bias=False, qk_norm=norms)


FAMILY = _separate.family("glm4_moe", Glm4MoeConfig, Glm4MoeForCausalLM, geometry)
