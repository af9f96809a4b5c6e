"""Learning from the original model while recovering, a choice that every recovery has."""

from __future__ import annotations

from typing import Any

from attention.axes import Knob

AS_CONFIGURED = "as_configured"
KNOBS = (
    Knob(
        "distillation",
        "choice",
        AS_CONFIGURED,
        "learn from the original model: as the training's settings say, not at all, KL, or KL + BiLD (paper 001)",
        choices=(AS_CONFIGURED, "none", "kl", "kl_bild"),
    ),
    Knob("distillation_weight", "float", 0.5, "its share of the loss; 1 leaves language modelling out", 0.01, 1.0),
)


def distilled(distillation: str, weight: float) -> dict[str, Any]:
    """What these knobs change of the training's settings."""
    if distillation == AS_CONFIGURED:
        return {}
    return {"distillation": distillation, "distillation_weight": weight}
