"""Heads as they are."""

from __future__ import annotations

from attention.plan import AttentionPlan
from search_spaces.axes import COMPOSITION


@COMPOSITION.part("none", source="-")
def none(plan: AttentionPlan) -> AttentionPlan:
    return plan
