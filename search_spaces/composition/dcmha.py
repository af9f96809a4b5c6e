"""Dynamically composable heads (paper 002). The settings are those that the paper varies in its Tables 6 to 9."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from attention.axes import Knob
from attention.plan import AttentionPlan, Composition
from search_spaces.axes import COMPOSITION

KNOBS = (
    Knob("rank", "int", 2, "R of the low-rank branches", 1, 16, searched=True),
    Knob("query_side", "bool", True, "weights made from the query token"),
    Knob("key_side", "bool", True, "weights made from the key token; cached at decoding"),
    Knob("before_softmax", "bool", True, "compose scores"),
    Knob("after_softmax", "bool", True, "compose weights"),
    Knob("static_base", "bool", False, "a learned static projection in place of the skip connection"),
    Knob("groups", "int", 1, "heads compose within so many groups (tensor parallel)", 1, 64),
    Knob("window", "int", 0, "tokens that layers with a window see; 0: everything", 0, 1_000_000),
    Knob("window_pattern", "int", 1, "layers with a window for each one without", 1, 64),
)


@COMPOSITION.part("dcmha", source="Xiao 2024 (paper 002), sec. 3 and 4", knobs=KNOBS)
def dcmha(plan: AttentionPlan, **knobs: Any) -> AttentionPlan:
    """Raises PlanError for settings that cannot be."""
    return replace(plan, composition=Composition(**knobs))
