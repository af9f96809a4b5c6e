"""Heads and MLP blocks of later layers that use the weights of earlier ones (Cao 2024).

A shared head takes over query, key and value rows with their biases, and its columns of the output
projection if the plan shares them; norms and position embedding stay the layer's own. A shared MLP
block takes over its neurons: rows of the input projections with their biases, and columns of the
output projection.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any

from torch import nn
from transformers import PreTrainedModel

from attention.families import family_of
from attention.families._separate import OUTPUT_NAMES
from attention.modeling.mlp import block_size, mlp_sites
from attention.modeling.shared_weights import SharedColumns, SharedProjection, SharedRows
from attention.plan import AttentionPlan, HeadShare

_PROJECTIONS = {"q": "q_proj", "k": "k_proj", "v": "v_proj"}


def by_layer(shares: Iterable[HeadShare]) -> dict[int, dict[int, tuple[int, int]]]:
    """Return layer -> shared head -> (source layer, source head).

    Layers are ascending, so that lenders come before borrowers.
    """
    layers: dict[int, dict[int, tuple[int, int]]] = {}
    for share in sorted(shares):
        layers.setdefault(share.layer, {})[share.head] = (share.source_layer, share.source_head)
    return layers


def sharing_layers(plan: AttentionPlan) -> frozenset[int]:
    """Layers whose heads are shared or lent.

    These need separate query, key and value projections.
    """
    return frozenset(
        i for side in _PROJECTIONS for s in plan.shares_of(side) for i in (s.layer, s.source_layer)
    )


@dataclass(frozen=True)
class SharedSite:
    """One projection of every layer of which blocks are shared.

    `name` in `owners[layer]`, blocks of `size` features.

    Attributes:
        kind: SharedRows where a block is output features, SharedColumns where it is input features.
    """

    name: str
    kind: type[SharedProjection]
    size: int
    shares: tuple[HeadShare, ...]
    owners: Mapping[int, Any]

    def projection(self, layer: int) -> Any:
        return getattr(self.owners[layer], self.name)


def shared_sites(model: PreTrainedModel, plan: AttentionPlan) -> list[SharedSite]:
    """Return the projections of a model that the shares of `plan` are about, shared yet or not.

    Raises:
        ValueError: For output projections or MLPs that are no linear layers (GPT-2).
    """
    modules: dict[int, Any] = dict(enumerate(family_of(model.config).attention_modules(model)))
    sites = [
        SharedSite(name, SharedRows, plan.head_dim, shares, modules)
        for side, name in _PROJECTIONS.items()
        if (shares := plan.shares_of(side))
    ]
    if plan.output_shares:
        name = _output_name(modules[0], family_of(model.config).name)
        sites.append(SharedSite(name, SharedColumns, plan.head_dim, plan.output_shares, modules))
    if plan.mlp_shares:
        mlps = mlp_sites(model)
        owners = {index: site.module for index, site in enumerate(mlps)}
        size = block_size(mlps[0].neurons, plan.num_heads)
        for name in mlps[0].names:
            kind = SharedColumns if name == mlps[0].output else SharedRows
            sites.append(SharedSite(name, kind, size, plan.mlp_shares, owners))
    return sites


def _output_name(module: Any, family: str) -> str:
    for name in OUTPUT_NAMES:
        if isinstance(getattr(module, name, None), nn.Linear | SharedProjection):
            return name
    raise ValueError(
        f"the output projections of {family} cannot be shared: expected a linear projection called "
        f"one of "
        f"{OUTPUT_NAMES}; leave output_shares empty (sharing.output=false)"
    )


def share(model: PreTrainedModel, plan: AttentionPlan) -> None:
    """Give a freshly built model the shared projections of its plan. Weights are not copied."""
    for site in shared_sites(model, plan):
        for layer, borrowed in by_layer(site.shares).items():
            lenders = {
                block: (site.projection(source), theirs)
                for block, (source, theirs) in borrowed.items()
            }
            shared = site.kind(site.projection(layer), plan.num_heads, site.size, lenders)
            setattr(site.owners[layer], site.name, shared)
