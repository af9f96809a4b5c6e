"""Families with Llama's layout in which one RMS norm spans all heads of a projection.

There is one for queries and one for keys. What a token's keys are divided by is one number for all
heads. In a converted layer it is taken over the keys as the query heads read them: a kept head
counts once for each query head that reads it. So a model with kept heads repeated divides by the
same, and equal groups divide as the stock norm does.

Legend: G^K key heads, d head dim.
"""

from __future__ import annotations

from dataclasses import replace
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from transformers import PretrainedConfig, PreTrainedModel

from attention.base.constants import DeviceConstant
from attention.families import Family, _separate
from attention.geometry import HeadGeometry
from attention.heads import LayerHeads
from attention.plan import LayerPlan


class WeighedRMSNorm(nn.Module):
    """An RMS norm over `[..., G^K d]` in which the squares of head g count `counts[g]` times."""

    def __init__(self, counts: tuple[int, ...], head_dim: int, eps: float, like: Tensor) -> None:
        super().__init__()
        each = torch.tensor(counts, dtype=torch.float32, device="cpu")
        self.counts = DeviceConstant(each.repeat_interleave(head_dim))
        self.total = sum(counts) * head_dim
        self.variance_epsilon = eps
        self.weight = nn.Parameter(
            torch.ones(len(counts) * head_dim, device=like.device, dtype=like.dtype)
        )

    def forward(self, hidden_states: Tensor) -> Tensor:
        x = hidden_states.float()
        square = (x.square() * self.counts.on(x.device)).sum(-1, keepdim=True) / self.total
        return (self.weight * (x * torch.rsqrt(square + self.variance_epsilon))).to(
            hidden_states.dtype
        )


def key_norm(module: Any, geometry: HeadGeometry, plan: LayerPlan) -> None:
    """Keep the stock norm where all key heads count alike, else weigh them by their query heads."""
    old = module.k_norm
    counts = tuple(map(len, plan.key_groups))
    if len(set(counts)) > 1:
        module.k_norm = WeighedRMSNorm(counts, geometry.head_dim, old.variance_epsilon, old.weight)
    elif plan.key_heads * geometry.head_dim != len(old.weight):
        norm = type(module.q_norm)(plan.key_heads * geometry.head_dim, eps=old.variance_epsilon)
        module.k_norm = norm.to(device=old.weight.device, dtype=old.weight.dtype)


def reshape(module: Any, geometry: HeadGeometry, plan: LayerPlan) -> None:
    _separate.reshape(module, geometry, plan)
    key_norm(module, geometry, plan)


def read(module: Any, geometry: HeadGeometry) -> LayerHeads:
    q_norm, k_norm = (
        n.weight.detach().unflatten(0, (-1, geometry.head_dim))
        for n in (module.q_norm, module.k_norm)
    )
    return replace(_separate.read(module, geometry), q_norm=q_norm, k_norm=k_norm)


@torch.no_grad()
def write(module: Any, heads: LayerHeads) -> None:
    _separate.write(module, heads)
    for norm, weight in ((module.q_norm, heads.q_norm), (module.k_norm, heads.k_norm)):
        if weight is not None:
            norm.weight.copy_(weight.flatten())


def geometry(config: Any, family: str) -> HeadGeometry:
    """Raise ValueError for projections that are clipped, which no fusion can follow."""
    if getattr(config, "clip_qkv", None) is not None:
        raise ValueError(
            f"an {family} with clip_qkv={config.clip_qkv} is not supported: clipped keys and "
            f"values are no linear "
            "function of their input; expected clip_qkv=null"
        )
    return replace(_separate.geometry(config, family=family, qk_norm=True), whole_norm=True)


def family(
    name: str,
    config_class: type[PretrainedConfig],
    model_class: type[PreTrainedModel],
    **others: Any,
) -> Family:
    """Return a family of this kind. `others`: the fields of `Family` in which it differs."""
    hooks: dict[str, Any] = {"read": read, "reshape": reshape, "write": write, "key_norm": key_norm}
    hooks["pads_queries"] = False  # the norm would count zero heads too
    hooks["query_norm"] = lambda module, queries: module.q_norm(queries.flatten(1)).view_as(queries)
    return _separate.family(
        name, config_class, model_class, partial(geometry, family=name), **hooks, **others
    )
