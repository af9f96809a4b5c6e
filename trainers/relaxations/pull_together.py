"""PostShare: before a later head takes over an earlier head's Q, K and V weights, a penalty draws the two together.

Paper 004 (Cao 2024), section on PostShare. Legend: H heads, d head dim, D model dim.

Where the paper is **silent**: the weight of the penalty, and whether biases count; they belong to the head and do.
The penalty is a sum over pairs and elements, as printed, so the weight that fits falls with the size of a head.
"""

from __future__ import annotations

from dataclasses import replace

import torch
from torch import Tensor
from transformers import PreTrainedModel

from attention.axes import Knob
from attention.heads import LayerHeads
from attention.plan import AttentionPlan, PlanError
from trainers.groups import ParameterGroup
from trainers.relaxations.axis import RELAXATION
from trainers.relaxations.base import HeadProjection, Relaxation, attention_modules, opened

SIDES = ("q", "k", "v")
KNOBS = (
    Knob("weight", "log_float", 0.01, "factor of the sum of squared differences", 1e-6, 1e3, searched=True),
    Knob(
        "tolerance", "float", 1e-4, "squared distance of the pairs over that at step 0 that counts as equal", 0.0, 1.0
    ),
)


def pull(later: Tensor, earlier: Tensor) -> Tensor:
    """sum ‖W_later - W_earlier‖² over pairs, both `[pairs, ...]`."""
    return (later - earlier).square().sum()


class PulledProjection(HeadProjection):
    """A projection whose heads can also be read. By a call, since ZeRO 3 gathers weights around calls only."""

    def forward(self, input: Tensor | None = None) -> Tensor:
        if input is not None:
            return super().forward(input)
        weight, bias = self.source()
        return weight.flatten(1) if bias is None else torch.cat([weight.flatten(1), bias], 1)


class PullTogether(Relaxation):
    """PostShare's post-training, over the plan's shares."""

    def __init__(self, model: PreTrainedModel, plan: AttentionPlan, *, weight: float, tolerance: float) -> None:
        super().__init__(model, plan)
        self.weight, self.tolerance = weight, tolerance
        later = [(s.layer, s.head) for s in plan.shares]
        earlier = [(s.source_layer, s.source_head) for s in plan.shares]
        self._pairs = list(zip(later, earlier, strict=True))
        used = sorted({layer for layer, _ in later + earlier})
        modules = attention_modules(model)
        self._projections = {index: tuple(getattr(modules[index], f"{s}_proj") for s in SIDES) for index in used}
        self._latest: Tensor | None = None
        with torch.no_grad():
            start = self.distance()
        self.register_buffer("start", start)

    def distance(self) -> Tensor:
        """The sum over pairs, Q, K and V; float32."""
        heads = {index: [p().float() for p in projections] for index, projections in self._projections.items()}
        terms = []
        for side in range(len(SIDES)):
            later, earlier = (
                torch.stack([heads[pair[end][0]][side][pair[end][1]] for pair in self._pairs]) for end in (0, 1)
            )
            terms.append(pull(later, earlier))
        return torch.stack(terms).sum()

    def penalty(self, step: int) -> Tensor:
        distance = self.distance()
        self._latest = distance.detach()
        return self.weight * distance

    def finished(self) -> bool:
        """The pairs, as of the last penalty, are as near to each other as the tolerance asks for."""
        return self._latest is not None and float(self._latest) <= self.tolerance * float(self.start)  # type: ignore[arg-type]

    @torch.no_grad()
    def metrics(self) -> dict[str, float]:
        """distance: the squared distance of the pairs over that at step 0."""
        return {"distance": float(self.distance() / self.start)}  # type: ignore[operator]

    def parameter_groups(self) -> list[ParameterGroup]:
        return []

    @torch.no_grad()
    def collapse(self) -> list[LayerHeads]:
        """Every later head is given the Q, K and V weights of its earlier head, which itself is not shared."""
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


@RELAXATION.part("pull_together", source="Cao 2024 (paper 004): PostShare", knobs=KNOBS, needs=("shares",))
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
    if not plan.shares:
        raise PlanError("relaxation=pull_together needs a plan with shared heads, got none")
    new, old = opened(model, plan)
    if not all(layer.is_identity for layer in (*old.layers, *plan.layers)):
        raise PlanError(
            "relaxation=pull_together shares whole heads, query, key and value; model and plan must keep one key and "
            "one value head a query head"
        )
    for index in {s.layer for s in plan.shares} | {s.source_layer for s in plan.shares}:
        module = attention_modules(new)[index]
        for side in SIDES:
            weight_, bias = getattr(module, f"{side}_proj").source()
            made = PulledProjection(weight_.detach(), None if bias is None else bias.detach())
            setattr(module, f"{side}_proj", made)
    return PullTogether(new, plan, weight=weight, tolerance=tolerance)
