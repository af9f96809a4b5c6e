"""PostShare.

Before a later head takes over an earlier head's Q, K and V weights, a penalty draws the two
together.

Cao 2024, section on PostShare: the loss is that of the language model plus the squared distance of
the selected pairs. MLP blocks are shared and pulled like heads. Legend: a *star* is an earlier
block and the m later ones that are to use its weights; C its mean, D_i the difference between its
i-th later block and the earlier one.

The earlier block is written as C - ΣD/(m + 1) and each later one as C + D_i - ΣD/(m + 1): the same
weights, in coordinates in which the penalty is Σ‖D_i‖², a weight decay of the D_i. Both sides move,
and the mean stays, as under the penalty's own gradient. Added to the loss under Adam the penalty's
weight has almost no effect, since Adam divides by it again: every weight moves by about the
learning rate per step. As AdamW does for weight decay (Loshchilov 2019, sec. 2: decoupled), each
step here subtracts `rate` of every difference, separately from Adam's step for the language model's
loss. Without the latter a share (1 - rate)^2n of the squared distance remains after n steps at the
peak.

Where the paper is **silent**: the strength of the pull; whether biases count (they belong to the
head, and do); the shared weight where a distance remains (the mean C, which changes the weights
least).
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from transformers import PreTrainedModel

from attention.conversion.convert import assemble, read_layers
from attention.conversion.relaxation_knobs import PULL_TOGETHER, rate_of
from attention.modeling.shared_heads import SharedSite, shared_sites
from attention.modeling.shared_weights import SharedColumns, SharedProjection, stored
from attention.plan import AttentionPlan, PlanError
from trainers.loop import ParameterGroup
from trainers.relaxations.base import RELAXATION_TRAINING, Learned, Relaxation, open_projections

_Block = tuple[int, int]  # layer, head


def from_centre(apart: Tensor) -> Tensor:
    """Return the differences of a star's blocks from their mean, the earlier block first.

    D `[m, ...]` -> `[m + 1, ...]`, sum 0.
    """
    return torch.cat([torch.zeros_like(apart[:1]), apart]) - apart.sum(0) / (len(apart) + 1)


class Star(Learned):
    """The differences D `[m, size, width]` of later blocks of a projection to the earlier one.

    A block is `size` lines, the rows of a weight with the bias as last column, or its columns
    (`SharedColumns`, whose bias belongs to no block).
    """

    def __init__(self, apart: Tensor) -> None:
        super().__init__(apart)
        self.register_buffer("start", apart.float().square().sum())

    def distance(self) -> Tensor:
        """Σ‖W_later - W_earlier‖², float32."""
        return self().float().square().sum()


class Beside:
    """Adds to the output of one projection the differences of its blocks from the shared weights.

    The index of its blocks is a buffer of the projection, which moves with the model.

    Args:
        projection: The projection whose hook it is.
        parts: For each block its star and its index there (0: the earlier block).
    """

    def __init__(
        self, site: SharedSite, projection: Any, parts: dict[int, tuple[Star, int]]
    ) -> None:
        self.columns = site.kind is SharedColumns
        self.parts = parts
        blocks = torch.tensor(list(parts))
        places = (blocks[:, None] * site.size + torch.arange(site.size)).flatten()
        self.name = f"places_beside_{len(projection._forward_hooks)}"
        places = places.to(projection.weight.device)
        projection.register_buffer(self.name, places, persistent=False)

    def __call__(self, module: nn.Module, args: tuple[Tensor, ...], output: Tensor) -> Tensor:
        places = module.get_buffer(self.name)
        # By a call, for ZeRO 3.
        stars = {id(star): from_centre(star()) for star, _ in self.parts.values()}
        lines = torch.cat([stars[id(star)][index] for star, index in self.parts.values()])
        if self.columns:
            return output + F.linear(args[0].index_select(-1, places), lines.T)
        x = args[0]
        extra = F.linear(
            x, lines[:, : x.shape[-1]], lines[:, -1] if lines.shape[1] > x.shape[-1] else None
        )
        return output.index_add(-1, places, extra)


def _lines(projection: Any, columns: bool) -> Tensor:
    """Return a projection's weight, the features of its blocks first, biases as last column."""
    if columns:
        return projection.weight.detach().T
    bias = projection.bias
    return (
        projection.weight.detach()
        if bias is None
        else torch.cat([projection.weight, bias[:, None]], 1).detach()
    )


def _centre(projection: Any, block: int, size: int, mean: Tensor, columns: bool) -> None:
    """Make `mean` `[size, width]` the weight of a block that `projection` owns."""
    start = projection.offset(block) if isinstance(projection, SharedProjection) else block * size
    weight, bias = stored(projection)
    assert weight is not None  # it owns the block
    lines = weight.data.T if columns else weight.data
    lines[start : start + size] = mean[:, : lines.shape[1]]
    if bias is not None and not columns:
        bias.data[start : start + size] = mean[:, -1]


def _part(site: SharedSite, plain: SharedSite) -> Iterator[Star]:
    """Move the lent blocks of a projection to their stars' means, and store the differences."""
    columns = site.kind is SharedColumns
    size = site.size
    borrowers: dict[_Block, list[_Block]] = {}
    for share in site.shares:
        borrowers.setdefault((share.source_layer, share.source_head), []).append(
            (share.layer, share.head)
        )
    parts: dict[int, dict[int, tuple[Star, int]]] = {}
    for earlier, later in borrowers.items():
        members = [earlier, *later]
        blocks = torch.stack(
            [_lines(plain.projection(i), columns)[b * size : (b + 1) * size] for i, b in members]
        )
        star = Star(blocks[1:] - blocks[0])
        _centre(
            site.projection(earlier[0]),
            earlier[1],
            size,
            blocks.double().mean(0).to(blocks.dtype),
            columns,
        )
        for index, (layer, block) in enumerate(members):
            parts.setdefault(layer, {})[block] = (star, index)
        yield star
    for layer, at_blocks in parts.items():
        projection = site.projection(layer)
        projection.register_forward_hook(Beside(site, projection, at_blocks))


@RELAXATION_TRAINING.part(
    "pull_together", source="Cao 2024: PostShare", knobs=PULL_TOGETHER, needs=("shares",)
)
class PullTogether(Relaxation):
    """PostShare's post-training, of a copy of `model`.

    The shared model of `plan`, plus the differences, which shrink. Nothing is random, and no
    schedule depends on `steps`.

    `collapse` gives every head with the weights that it shares; MLP blocks are no heads:
    `collapsed_model` shares them. Raises PlanError if the plan shares nothing, or if the model or
    the plan has fewer key or value than query heads.
    """

    def __init__(
        self,
        model: PreTrainedModel,
        plan: AttentionPlan,
        *,
        steps: int,
        generator: torch.Generator | None = None,
        rate: float | str,
        tolerance: float,
    ) -> None:
        if not plan.is_shared:
            raise PlanError(
                "relaxation=pull_together needs a plan with shared heads or MLP blocks, got none"
            )
        plain, old = open_projections(model, plan)
        if not all(layer.is_identity for layer in (*old.layers, *plan.layers)):
            raise PlanError(
                "relaxation=pull_together shares whole heads, query, key and value; model and plan "
                "must keep one key "
                "and one value head a query head"
            )
        new = assemble(plain, plan, read_layers(plain))
        super().__init__(new, plan)
        sites = zip(shared_sites(new, plan), shared_sites(plain, plan), strict=True)
        self.stars = nn.ModuleList(
            star for site, plain_site in sites for star in _part(site, plain_site)
        )
        self.rate = rate_of("pull_together", rate, steps)
        self.tolerance = tolerance
        self._left: float | None = None

    def penalty(self, step: int) -> Tensor:
        """Return nothing: the groups' `shrink` has the effect of the penalty."""
        return torch.zeros((), device=self.model.device)

    def finished(self) -> bool:
        """Return whether the pairs, as of the last `metrics`, are within the tolerance."""
        return self._left is not None and self._left <= self.tolerance

    def remaining(self) -> float:
        """Return the squared distance of the pairs over that at step 0."""
        return self.metrics()["distance"]

    @torch.no_grad()
    def metrics(self) -> dict[str, float]:
        """Return `distance`, the remaining share of the pairs' squared distance, 1 at step 0."""
        stars: list[Any] = list(self.stars)
        now = torch.stack([star.distance() for star in stars]).sum()
        self._left = float(now / torch.stack([star.start.float() for star in stars]).sum())
        return {"distance": self._left}

    def parameter_groups(self) -> list[ParameterGroup]:
        return [ParameterGroup(tuple(self.stars.parameters()), None, shrink=self.rate)]
