"""DHA: every head becomes a learned mix of its group's heads, which a Lagrangian draws together.

Chen 2024 (DHA), sections 4.2 and 4.3, App. B.2. Legend: L layers, S heads that a projection holds,
g heads of a group, d head dim, P = sum of g² over a layer's groups.

Where the paper is **silent** or at odds with itself:
- the fusion loss is divided by the number of pairs and of layers, as Alg. 3 does and Eq. 7 does
  not; layers in which nothing is fused do not count;
- the multiplier starts at `multiplier_start` (from 0 it needs many hundred steps to weigh against
  the loss); its gradient is never negative, so it never falls;
- the margin's warm-up k is a share of the steps; the default is Alg. 3's 200 of the 1,000 of
  section 5;
- per-dimension coefficients scale rotary dims separately, as in the paper: the mixed tensors are
  weights before RoPE, so each mix is a projection like any other, and nothing needs to commute.
"""

from __future__ import annotations

from functools import partial

import torch
from torch import Tensor
from transformers import PreTrainedModel

from attention.conversion.relaxation_knobs import LAGRANGIAN, rate_of
from attention.plan import AttentionPlan
from trainers.loop import ParameterGroup
from trainers.relaxations.base import (
    RELAXATION_TRAINING,
    HeadGroups,
    HeadProjection,
    Learned,
    Relaxation,
    open_projections,
    replace_projections,
)

_SOURCE = "Chen 2024 (DHA), sec. 4.2, Eq. 5 to 8, and App. B.2"


# ---- the equations ----------------------------------------------------------------------------


def identity_coefficients(groups: HeadGroups, width: int) -> Tensor:
    """Return ω at the start, `[P, width]`.

    1 where a head meets itself, 0 elsewhere, so that every head is itself (Eq. 5).
    """
    return (
        torch.cat([torch.eye(len(group)).flatten() for group in groups])[:, None]
        .expand(-1, width)
        .contiguous()
    )


def group_blocks(omega: Tensor, groups: HeadGroups) -> list[Tensor]:
    """Return ω `[P, width]` as one `[g, g, width]` for each group.

    `block[h, j]` is what head h takes of head j.
    """
    pieces = omega.split([len(group) ** 2 for group in groups])
    return [
        piece.unflatten(0, (len(group), len(group)))
        for piece, group in zip(pieces, groups, strict=True)
    ]


def mix(omega: Tensor, groups: HeadGroups, rows: Tensor) -> Tensor:
    """Eq. 5: head h becomes sum_j diag(ω_hj) rows_j over its group.

    `rows [S, d, ...]`, ω `[P, d or 1]`.
    """
    trailing = (1,) * (rows.ndim - 2)
    mixed = [
        (block.reshape(*block.shape, *trailing) * rows[list(group)]).sum(1)
        if rows.ndim == 2
        else torch.einsum("hjd,jdn->hdn", block.expand(-1, -1, rows.shape[1]), rows[list(group)])
        for block, group in zip(group_blocks(omega, groups), groups, strict=True)
    ]
    order = torch.tensor([head for group in groups for head in group], device=rows.device).argsort()
    return torch.cat(mixed)[order]


def head_distances(block: Tensor) -> Tensor:
    """L_head of Eq. 7 for all pairs of a group, `[g, g, width]` -> `[g, g]`.

    1/g sum_j mean_d (ω_hj - ω_h'j)².
    """
    return (block[:, None] - block[None]).square().mean(-1).sum(-1) / len(block)


def fusion_loss(block: Tensor) -> Tensor:
    """Eq. 7 for one group: L_head summed over its pairs h < h'.

    The sum over pairs is that over heads of the distance to the mean coefficients, times g: no pair
    is formed.
    """
    return (block - block.mean(0)).square().mean(-1).sum()


def margin(step: int, warmup: int, base: float = 0.999) -> float:
    """T of Eq. 8: max(0, b^s (1 - s / k)); 0 throughout without a warm-up."""
    return max(0.0, base**step * (1 - step / warmup)) if warmup else 0.0


class _Reverse(torch.autograd.Function):
    """The identity, whose gradient has the other sign.

    So it holds however optimiser state is split over workers.
    """

    @staticmethod
    def forward(ctx: object, x: Tensor) -> Tensor:  # pyright: ignore[reportIncompatibleMethodOverride]
        return x.view_as(x)

    @staticmethod
    def backward(ctx: object, gradient: Tensor) -> Tensor:  # pyright: ignore[reportIncompatibleMethodOverride]
        return -gradient


def ascending(multiplier: Tensor) -> Tensor:
    """Return the multiplier, to be maximised where all else is minimised."""
    return _Reverse.apply(multiplier)  # pyright: ignore[reportReturnType]


# ---- the relaxation ---------------------------------------------------------------------------


class FusedProjection(HeadProjection):
    """The k or v projection of DHA: its original heads, and the coefficients that mix them."""

    def __init__(self, linear: HeadProjection, groups: HeadGroups, per_dimension: bool) -> None:
        super().__init__(*linear.source())
        self.groups = groups
        omega = identity_coefficients(groups, self.head_dim if per_dimension else 1)
        self.coefficients = Learned(omega.to(self.weight.device, self.weight.dtype))

    def mixed(self) -> tuple[Tensor, Tensor | None]:
        (weight, bias) = self.source()
        omega = self.coefficients()
        return mix(omega, self.groups, weight), None if bias is None else mix(
            omega, self.groups, bias
        )

    @property
    def pairs(self) -> int:
        return sum(len(group) * (len(group) - 1) // 2 for group in self.groups)

    def fusion_loss(self) -> Tensor:
        """Sum over groups and pairs, not normalised; float32."""
        return torch.stack(
            [fusion_loss(b) for b in group_blocks(self.coefficients().float(), self.groups)]
        ).sum()

    def collapsed(self, weight: Tensor, bias: Tensor | None) -> tuple[Tensor, Tensor | None]:
        """Return one head per group.

        Its heads mixed by their mean coefficients, sum_j diag(mean_h ω_hj) rows_j (App. B.2).
        """
        rows = []
        shift = []
        for block, group in zip(
            group_blocks(self.coefficients().float(), self.groups), self.groups, strict=True
        ):
            mean = block.mean(0)
            rows.append((mean[..., None] * weight[list(group)]).sum(0))
            if bias is not None:
                shift.append((mean * bias[list(group)]).sum(0))
        return torch.stack(rows), torch.stack(shift) if shift else None


@RELAXATION_TRAINING.part("lagrangian", source=_SOURCE, knobs=LAGRANGIAN)
class Lagrangian(Relaxation):
    """DHA's fusion stage, of a copy of `model`, towards `plan` over `steps` steps.

    `penalty` is the second term of Eq. 8. Nothing is random, so `generator` is not used.

    The model may already share heads if the plan's groups consist of whole groups of the model
    (stages 2x, 4x, 8x of App. B.2: relax, collapse, relax the result with the next plan). Raises
    PlanError for any other plan.
    """

    stop_early = True
    stand_ins: tuple[dict[str, FusedProjection], ...]

    def __init__(
        self,
        model: PreTrainedModel,
        plan: AttentionPlan,
        *,
        steps: int,
        generator: torch.Generator | None = None,
        rate: float | str,
        per_dimension: bool,
        base: float,
        margin_fraction: float,
        multiplier_start: float,
        tolerance: float,
    ) -> None:
        new, old = open_projections(model, plan)
        super().__init__(
            new,
            plan,
            replace_projections(
                new, old, plan, partial(FusedProjection, per_dimension=per_dimension)
            ),
        )
        self.rate = rate_of("lagrangian", rate, steps)
        self.warmup = round(margin_fraction * steps)
        self.base = base
        self.tolerance = tolerance
        self.multiplier = Learned(
            torch.tensor([multiplier_start], device=new.device, dtype=new.dtype)
        )
        self._latest: Tensor | None = None

    def layer_losses(self) -> list[Tensor]:
        """Return the mean L_head over the pairs of each layer that fuses heads, of both sides."""
        return [
            torch.stack([p.fusion_loss() for p in layer.values()]).sum()
            / sum(p.pairs for p in layer.values())
            for layer in self.stand_ins
            if layer
        ]

    def fusion_loss(self) -> Tensor:
        """L_fusion, divided by the number of pairs and of layers."""
        return torch.stack(self.layer_losses()).mean()

    def penalty(self, step: int) -> Tensor:
        loss = self.fusion_loss()
        self._latest = loss.detach()
        excess = (loss - margin(step, self.warmup, self.base)).clamp(min=0)
        return ascending(self.multiplier().float())[0] * excess

    def finished(self) -> bool:
        """L_fusion, as of the last penalty, is below the tolerance."""
        return self._latest is not None and float(self._latest) < self.tolerance

    @torch.no_grad()
    def remaining(self) -> float:
        """Return L_fusion over that of heads that are all themselves.

        Two of these in a group of g are 2 / g apart.
        """
        start = [
            sum(len(group) - 1 for p in layer.values() for group in p.groups)
            / sum(p.pairs for p in layer.values())
            for layer in self.stand_ins
            if layer
        ]
        return float(self.fusion_loss()) / (sum(start) / len(start))

    @torch.no_grad()
    def metrics(self) -> dict[str, float]:
        """Return fusion_loss, multiplier and own_share.

        The latter is the mean ω of a head for itself: 1 at the start, about 1/g at the end.
        """
        shares = [
            block.float().mean(-1).diagonal()
            for layer in self.stand_ins
            for projection in layer.values()
            for block in group_blocks(projection.coefficients(), projection.groups)
            if len(block) > 1
        ]
        return {
            "fusion_loss": float(self.fusion_loss()),
            "multiplier": float(self.multiplier()),
            "own_share": float(torch.cat(shares).mean()),
        }

    @torch.no_grad()
    def distances(self, side: str) -> list[Tensor | None]:
        """For each layer L_head between all heads, `[S, S]`, on side "k" or "v".

        Between groups it is infinite.
        """
        of_layers: list[Tensor | None] = []
        for layer in self.stand_ins:
            projection = layer.get(side)
            if projection is None:
                of_layers.append(None)
                continue
            heads = projection.out_features // projection.head_dim
            distance = torch.full((heads, heads), torch.inf)
            omega = projection.coefficients().float().cpu()
            for block, group in zip(
                group_blocks(omega, projection.groups), projection.groups, strict=True
            ):
                index = torch.tensor(group)
                distance[index[:, None], index] = head_distances(block)
            of_layers.append(distance)
        return of_layers

    def parameter_groups(self) -> list[ParameterGroup]:
        learned = [p.coefficients.value for layer in self.stand_ins for p in layer.values()]
        return [ParameterGroup((*learned, self.multiplier.value), self.rate)]
