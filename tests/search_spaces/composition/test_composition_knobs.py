"""Knobs of the composition that stand for a setting of the paper's."""

from __future__ import annotations

import pytest

from attention.plan import AttentionPlan, Composition
from search_spaces.axes import COMPOSITION

PLAN = AttentionPlan.identity(4, 4, 8)


@pytest.mark.parametrize(
    ("knobs", "expected"),
    [
        ({}, Composition()),
        ({"windowed": True}, Composition(window=256)),
        ({"windowed": True, "window": 64}, Composition(window=64)),
        ({"window": 64}, Composition(window=64)),
        ({"windowed": True, "window_pattern": 3}, Composition(window=256, window_pattern=3)),
        ({"gate": False}, Composition(gate=False)),
    ],
)
def test_a_window_is_256_tokens_in_every_second_layer_if_one_is_requested(
    knobs: dict[str, object], expected: Composition
) -> None:
    part = COMPOSITION.get("dcmha")
    created = part(PLAN, **part.settings(knobs)).composition
    assert created == expected
    if expected == Composition(window=256):
        assert [created.window_of(layer) for layer in range(4)] == [256, 0, 256, 0]
