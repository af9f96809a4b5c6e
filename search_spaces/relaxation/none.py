"""Heads are fused before training, in closed form."""

from __future__ import annotations

from attention.plan import AttentionPlan
from search_spaces.axes import RELAXATION


@RELAXATION.part("none", source="-")
def none(plan: AttentionPlan) -> tuple[AttentionPlan, ...]:
    return ()
