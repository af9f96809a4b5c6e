"""A planning context that measures plans by a function of the test instead of by running a model."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from attention.plan import AttentionPlan, LayerPlan
from search_spaces.planning.context import PlanningContext
from search_spaces.recipes.catalogue import Recipe


@dataclass(frozen=True, kw_only=True)
class MeasuredContext(PlanningContext):
    """`measure(recipe, plan)` stands for the loss of the model converted so."""

    measure: Callable[[Recipe, AttentionPlan], float]

    def loss_of(self, recipe: Recipe, plan: AttentionPlan, refinement: Mapping[str, Any] | None = None) -> float:
        return self.measure(recipe, plan)

    def increases_of(self, recipe: Recipe, plans: Sequence[tuple[int, AttentionPlan]], **_: Any) -> list[float]:
        own = LayerPlan(self.geometry.kv_map, self.geometry.kv_map)
        original = AttentionPlan((own,) * self.geometry.num_layers, self.geometry.head_dim)

        def alone(layer: int, plan: AttentionPlan) -> AttentionPlan:
            layers = tuple(plan.layers[i] if i == layer else own for i in range(plan.num_layers))
            return replace(original, layers=layers)

        return [self.measure(recipe, alone(*item)) - self.measure(recipe, original) for item in plans]
