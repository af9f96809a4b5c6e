"""Phi-3 and Phi-4.

Fused qkv_proj (all queries, then all keys, then all values), grouped or not, no biases.

Legend: d head dim, D model dim.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from transformers import Phi3Config, Phi3ForCausalLM
from transformers.models.phi3.modeling_phi3 import Phi3Attention, apply_rotary_pos_emb

from attention.families import FUSED_PROJECTIONS, _separate, _uneven
from attention.geometry import HeadGeometry
from attention.heads import LayerHeads
from attention.modeling.growing_cache import take_cache
from attention.plan import LayerPlan

_FUSED = "qkv_proj"


def geometry(config: Any) -> HeadGeometry:
    return _separate.geometry(config, family="phi3", qkv_bias=False, output_bias=False)


class UnevenPhi3Attention(Phi3Attention):
    """Phi-3's attention with separate projections and any number of key and value heads."""

    def forward(
        self,
        hidden_states: Tensor,
        position_embeddings: tuple[Tensor, Tensor],
        attention_mask: Tensor | None,
        **kwargs: Any,
    ) -> tuple[Tensor, Tensor | None]:
        q, k, v = _uneven.project(self, hidden_states, self.head_dim)
        states = (*apply_rotary_pos_emb(q, k, *position_embeddings), v)
        rates = {"scaling": self.scaling, "dropout": self.attention_dropout}
        mixed, weights = _uneven.attend(
            self, states, attention_mask, take_cache(kwargs), **rates, **kwargs
        )
        return self.o_proj(mixed), weights


def read(module: Any, geometry: HeadGeometry) -> LayerHeads:
    if isinstance(module, UnevenPhi3Attention):
        return _separate.read(module, geometry)
    rows = module.qkv_proj.weight.detach().unflatten(0, (-1, geometry.head_dim))
    kv_heads = (len(rows) - geometry.num_heads) // 2
    q, k, v = rows.split([geometry.num_heads, kv_heads, kv_heads])
    o = module.o_proj.weight.detach().unflatten(1, (-1, geometry.head_dim)).permute(1, 0, 2)
    return LayerHeads(q, k, v, o)


def separate(module: Any, geometry: HeadGeometry, plan: LayerPlan) -> None:
    _uneven.separate(_FUSED, UnevenPhi3Attention, module, geometry, plan)


def reshape(module: Any, geometry: HeadGeometry, plan: LayerPlan) -> None:
    """Give the module the plan's counts.

    An identity plan keeps the fused projection, and so does a plan with as many key heads as value
    heads where the config asks for it (`FUSED_PROJECTIONS`).
    """
    equal = plan.key_slices == plan.value_slices == plan.key_heads
    if not plan.is_identity and not (equal and getattr(module.config, FUSED_PROJECTIONS, False)):
        separate(module, geometry, plan)
        return
    rows = (geometry.num_heads + 2 * plan.key_heads) * geometry.head_dim
    _separate.resize(module, _FUSED, rows=rows)
    module.num_key_value_heads = plan.key_heads


@torch.no_grad()
def write(module: Any, heads: LayerHeads) -> None:
    if isinstance(module, UnevenPhi3Attention):
        _separate.write(module, heads)
        return
    module.qkv_proj.weight.copy_(torch.cat([heads.q, heads.k, heads.v]).flatten(0, 1))
    _separate.write_output(module.o_proj, heads)


FAMILY = _separate.family(
    "phi3",
    Phi3Config,
    Phi3ForCausalLM,
    geometry,
    read=read,
    reshape=reshape,
    write=write,
    separate=separate,
)
