"""DHA: heads become learned mixes, which a Lagrangian draws together (paper 000, sec. 4.2, App. B.2)."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from attention.conversion.relaxation_knobs import LAGRANGIAN
from attention.plan import AttentionPlan, LayerPlan
from search_spaces.axes import RELAXATION
from search_spaces.relaxation import BATCH, FRACTION, RATE, REGROUP, SCHEDULE, STAGES, STEPS


@RELAXATION.part(
    "lagrangian",
    source="Chen 2024 (paper 000), sec. 4.2 and App. B.2; sec. 5.1 and Table 4 for how it is trained",
    knobs=(FRACTION, STAGES, REGROUP, STEPS, BATCH, RATE, SCHEDULE, *LAGRANGIAN),
)
def lagrangian(plan: AttentionPlan, *, halving: bool = False, **knobs: object) -> tuple[AttentionPlan, ...]:
    """The plan itself or, with `halving`, first groups of two, of four, ... that make up its groups.

    Every stage is a part of the last one, whose groups were searched for. Which heads of a group come first is cut here
    in their order; with `regroup_steps` the training finds it anew at every stage, as the paper does.
    """
    if not halving:
        return (plan,)
    stages, size = [], 2
    while (stage := _in_groups_of(size, plan)) != plan:
        stages.append(stage)
        size *= 2
    return (*stages, plan)


def _in_groups_of(size: int, plan: AttentionPlan) -> AttentionPlan:
    """Every group of more than `size` heads cut into pieces of `size`, in the order of the heads."""

    def cut(groups: Sequence[Sequence[int]]) -> list[Sequence[int]]:
        return [group[i : i + size] for group in groups for i in range(0, len(group), size)]

    layers = [
        LayerPlan.from_groups(cut(layer.key_groups), cut(layer.value_groups), plan.num_heads) for layer in plan.layers
    ]
    return replace(plan, layers=tuple(layers))
