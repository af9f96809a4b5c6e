"""Align: heads fade into their group's new head under L0 masks (paper 001, sec. 3.5)."""

from __future__ import annotations

from dataclasses import replace

from attention.conversion.relaxation_knobs import HARD_CONCRETE
from attention.plan import AttentionPlan
from search_spaces.axes import RELAXATION
from search_spaces.relaxation import FRACTION

# The paper's schedule is over all of the training, of which the last fifth has frozen masks: that fifth is recovery
# here, and the shares are of the first four fifths.
WHOLE = 0.8
KNOBS = tuple(
    replace(knob, default={"target_fraction": 0.3 / WHOLE, "freeze_fraction": 1.0}.get(knob.name, knob.default))
    for knob in HARD_CONCRETE
)


@RELAXATION.part(
    "hard_concrete",
    source="Jin 2024 (paper 001), sec. 3.5, Eq. 25 to 29",
    knobs=(replace(FRACTION, default=WHOLE), *KNOBS),
)
def hard_concrete(plan: AttentionPlan, **knobs: object) -> tuple[AttentionPlan, ...]:
    return (plan,)
