"""Dynamically composable heads (Xiao 2024).

The settings are those that the paper varies in its Tables 9 and 10.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from attention.axes import Knob
from attention.plan import AttentionPlan, Composition
from search_spaces.axes import COMPOSITION

WINDOW = 256  # Xiao 2024, sec. 4: "a sliding attention window of 256 tokens for each other layer"
_KNOBS = (
    Knob("rank", "int", "R of the low-rank branches", 1, 16, searched=True),
    Knob("query_side", "bool", "weights made from the query token"),
    Knob("key_side", "bool", "weights made from the key token; cached at decoding"),
    Knob("before_softmax", "bool", "compose scores"),
    Knob("after_softmax", "bool", "compose weights"),
    Knob(
        "projection",
        "bool",
        "the dynamic low-rank projections (Table 9: without them, gates alone)",
    ),
    Knob("gate", "bool", "the dynamic gates (Table 9: without them, projections alone)"),
    Knob("static_base", "bool", "a learned static projection in place of the skip connection"),
    Knob("groups", "int", "heads compose within so many groups (tensor parallel)", 1, 64),
    Knob(
        "windowed",
        "bool",
        "windows as in sec. 4: 256 tokens unless `window` says else, every second layer",
    ),
    Knob("window", "int", "tokens that layers with a window see; 0: everything", 0, 1_000_000),
    Knob("window_pattern", "int", "layers with a window for each one without", 1, 64),
)


@COMPOSITION.part("none", source="-")
def none(plan: AttentionPlan) -> AttentionPlan:
    """Heads as they are."""
    return plan


def composition_of(settings: Mapping[str, Any]) -> Composition:
    """Return a composition from its own settings, and `windowed`.

    Raises:
        PlanError: For settings that cannot be.
    """
    fields = {name: value for name, value in settings.items() if name != "windowed"}
    if settings.get("windowed") and not fields.get("window"):
        fields["window"] = WINDOW
    return Composition(**fields)


@COMPOSITION.part("dcmha", source="Xiao 2024, sec. 3 and 4", knobs=_KNOBS, passes_to=Composition)
def dcmha(plan: AttentionPlan, *, windowed: bool = False, **knobs: Any) -> AttentionPlan:
    """Return the plan with dynamically composed scores and weights of all heads.

    Raises:
        PlanError: For settings that cannot be.
    """
    return replace(plan, composition=composition_of({"windowed": windowed, **knobs}))
