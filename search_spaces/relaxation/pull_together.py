"""PostShare: heads that are to share their weights are drawn together first (paper 004)."""

from __future__ import annotations

from attention.conversion.relaxation_knobs import PULL_TOGETHER
from attention.plan import AttentionPlan
from search_spaces.axes import RELAXATION
from search_spaces.relaxation import FRACTION


@RELAXATION.part(
    "pull_together", source="Cao 2024 (paper 004): PostShare", knobs=(FRACTION, *PULL_TOGETHER), needs=("shares",)
)
def pull_together(plan: AttentionPlan, **knobs: object) -> tuple[AttentionPlan, ...]:
    return (plan,)
