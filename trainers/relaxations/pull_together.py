"""PostShare: before a later head takes over an earlier head's Q, K and V weights, a penalty draws the two together.

Paper 004 (Cao 2024), section on PostShare. An MLP block is shared, and drawn, as a head is.

Where the paper is **silent**: the weight of the penalty, and whether biases count; they belong to the head and do.
The penalty is a sum over pairs and elements, as printed, so the weight that fits falls with the size of a head.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

from attention.heads import LayerHeads
from attention.mlp import block_size, mlp_sites
from attention.plan import AttentionPlan, HeadShare, PlanError
from attention.relaxation_knobs import PULL_TOGETHER
from trainers.groups import ParameterGroup
from trainers.relaxations.axis import RELAXATION
from trainers.relaxations.base import Relaxation, attention_modules, opened

SIDES = ("q", "k", "v")


def pull(later: Tensor, earlier: Tensor) -> Tensor:
    """sum ‖W_later - W_earlier‖² over pairs, both `[pairs, ...]`."""
    return (later - earlier).square().sum()


class Pulled(nn.Linear):
    """A linear layer whose weight can also be read. By a call, since ZeRO 3 gathers weights around calls only."""

    @classmethod
    def of(cls, linear: nn.Linear) -> Pulled:
        bias, like = linear.bias, linear.weight
        new = cls(linear.in_features, linear.out_features, bias is not None, device=like.device, dtype=like.dtype)
        new.load_state_dict({"weight": like} | ({} if bias is None else {"bias": bias}))
        return new.train(linear.training)

    def forward(self, input: Tensor | None = None) -> Tensor:
        """The projection of `input`; without one the weight, with the bias as one more column if there is one."""
        if input is not None:
            return super().forward(input)
        return self.weight.clone() if self.bias is None else torch.cat([self.weight, self.bias[:, None]], 1)


@dataclass(frozen=True)
class Site:
    """One projection of each layer that has a part in a share: `size` rows (or columns) a block."""

    shares: tuple[HeadShare, ...]
    projections: dict[int, Pulled]
    size: int
    columns: bool = False

    def distance(self) -> Tensor:
        """sum ‖W_later - W_earlier‖² over the shares; float32."""
        weights = {layer: self._lines(projection) for layer, projection in self.projections.items()}
        later = torch.cat([self._block(weights[s.layer], s.head) for s in self.shares])
        earlier = torch.cat([self._block(weights[s.source_layer], s.source_head) for s in self.shares])
        return pull(later, earlier)

    def _lines(self, projection: Pulled) -> Tensor:
        """Rows, or columns without the bias: an output bias belongs to no block."""
        lines = projection().float()
        return lines[:, : projection.in_features].T if self.columns else lines

    def _block(self, lines: Tensor, block: int) -> Tensor:
        return lines[block * self.size : (block + 1) * self.size]


class PullTogether(Relaxation):
    """PostShare's post-training, over the plan's shared heads and MLP blocks."""

    start: Tensor

    def __init__(
        self, model: PreTrainedModel, plan: AttentionPlan, sites: Sequence[Site], *, weight: float, tolerance: float
    ) -> None:
        super().__init__(model, plan)
        self.weight, self.tolerance, self._sites = weight, tolerance, tuple(sites)
        self._latest: Tensor | None = None
        with torch.no_grad():
            start = self.distance()
        self.register_buffer("start", start)

    def distance(self) -> Tensor:
        """The sum over all projections; float32."""
        return torch.stack([site.distance() for site in self._sites]).sum()

    def penalty(self, step: int) -> Tensor:
        distance = self.distance()
        self._latest = distance.detach()
        return self.weight * distance

    def finished(self) -> bool:
        """The pairs, as of the last penalty, are as near to each other as the tolerance asks for."""
        return self._latest is not None and float(self._latest) <= self.tolerance * float(self.start)

    @torch.no_grad()
    def metrics(self) -> dict[str, float]:
        """distance: the squared distance of the pairs over that at step 0."""
        return {"distance": float(self.distance() / self.start)}

    def parameter_groups(self) -> list[ParameterGroup]:
        return []

    @torch.no_grad()
    def collapse(self) -> list[LayerHeads]:
        """Every later head is given the Q, K and V weights of its earlier head, which itself is not shared. Shared MLP
        blocks are no heads: `collapsed_model` shares them, as the plan says."""
        layers = super().collapse()
        for share in self.plan.shares:
            earlier, later = layers[share.source_layer], layers[share.layer]
            changes = {}
            for name in (*SIDES, *(f"{side}_bias" for side in SIDES)):
                if (rows := getattr(later, name)) is not None:
                    changes[name] = rows.clone()
                    changes[name][share.head] = getattr(earlier, name)[share.source_head]
            layers[share.layer] = replace(later, **changes)
        return layers

    def _collapsed(self, layer: int, heads: LayerHeads) -> LayerHeads:
        return heads


def _pulled(shares: Sequence[HeadShare], parents: Sequence[Any], name: str, size: int, columns: bool = False) -> Site:
    """Make the projections called `name` readable in all layers of `shares`."""
    layers = sorted({layer for s in shares for layer in (s.layer, s.source_layer)})
    for layer in layers:
        setattr(parents[layer], name, Pulled.of(getattr(parents[layer], name)))
    projections = {layer: getattr(parents[layer], name) for layer in layers}
    return Site(tuple(shares), projections, size, columns)


@RELAXATION.part("pull_together", source="Cao 2024 (paper 004): PostShare", knobs=PULL_TOGETHER, needs=("shares",))
def install(
    model: PreTrainedModel,
    plan: AttentionPlan,
    *,
    steps: int,
    generator: torch.Generator | None = None,
    weight: float = 0.01,
    tolerance: float = 1e-4,
) -> PullTogether:
    """Relax a copy of `model` towards the shares of `plan`; nothing is random, and no schedule depends on `steps`.

    Raises PlanError if the plan shares nothing, or if the model or the plan has fewer key or value than query heads.
    """
    if not plan.is_shared:
        raise PlanError("relaxation=pull_together needs a plan with shared heads or MLP blocks, got none")
    new, old = opened(model, plan)
    if not all(layer.is_identity for layer in (*old.layers, *plan.layers)):
        raise PlanError(
            "relaxation=pull_together shares whole heads, query, key and value; model and plan must keep one key and "
            "one value head a query head"
        )
    sites = []
    if plan.shares:
        modules = attention_modules(new)
        sites += [_pulled(plan.shares, modules, f"{side}_proj", plan.head_dim) for side in SIDES]
    if plan.mlp_shares:
        mlps = mlp_sites(new)
        size = block_size(mlps[0].neurons, plan.num_heads)
        for name in mlps[0].names:
            columns = name == mlps[0].output
            sites.append(_pulled(plan.mlp_shares, [site.module for site in mlps], name, size, columns))
    return PullTogether(new, plan, sites, weight=weight, tolerance=tolerance)
