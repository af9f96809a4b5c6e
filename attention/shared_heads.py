"""Heads and MLP blocks of later layers that use the weights of earlier ones (paper 004, head-wise sharing).

A shared head takes over query, key and value rows with their biases; its columns of the output projection, norms and
position embedding stay the layer's own. A shared MLP block takes over its neurons: rows of the input projections with
their biases, and columns of the output projection.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

from torch import nn
from transformers import PreTrainedModel

from attention.families import family_of
from attention.mlp import block_size, mlp_sites
from attention.plan import AttentionPlan, HeadShare
from attention.shared_weights import SharedColumns, SharedProjection, SharedRows

PROJECTIONS = ("q_proj", "k_proj", "v_proj")


def by_layer(shares: Iterable[HeadShare]) -> dict[int, dict[int, tuple[int, int]]]:
    """Layer -> shared head -> (source layer, source head), layers ascending, so that lenders come before borrowers."""
    layers: dict[int, dict[int, tuple[int, int]]] = {}
    for share in sorted(shares):
        layers.setdefault(share.layer, {})[share.head] = (share.source_layer, share.source_head)
    return layers


def sharing_layers(plan: AttentionPlan) -> frozenset[int]:
    """Layers whose heads are shared or lent: these need separate query, key and value projections."""
    return frozenset(i for share in plan.shares for i in (share.layer, share.source_layer))


def _replace(
    kind: type[SharedProjection],
    owners: Mapping[int, Any],
    layer: int,
    name: str,
    size: int,
    borrowed: Mapping[int, tuple[int, int]],
    blocks: int,
) -> None:
    """Put a shared projection in the place of projection `name` of `layer`; `owners`: its parent in every layer."""
    lenders = {block: (getattr(owners[m], name), theirs) for block, (m, theirs) in borrowed.items()}
    setattr(owners[layer], name, kind(getattr(owners[layer], name), blocks, size, lenders))


def share(model: PreTrainedModel, plan: AttentionPlan) -> None:
    """Give a freshly built model the shared projections of its plan. Weights are not copied."""
    if plan.shares:
        modules: dict[int, nn.Module] = dict(enumerate(family_of(model.config).attention_modules(model)))
        for layer, borrowed in by_layer(plan.shares).items():
            for name in PROJECTIONS:
                _replace(SharedRows, modules, layer, name, plan.head_dim, borrowed, plan.num_heads)
    if plan.mlp_shares:
        sites = mlp_sites(model)
        owners = {index: site.module for index, site in enumerate(sites)}
        for layer, borrowed in by_layer(plan.mlp_shares).items():
            size = block_size(sites[layer].neurons, plan.num_heads)
            for name in sites[layer].names:
                kind = SharedColumns if name == sites[layer].output else SharedRows
                _replace(kind, owners, layer, name, size, borrowed, plan.num_heads)
