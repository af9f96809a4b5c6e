"""All weights train."""

from __future__ import annotations

from typing import Any

from search_spaces.axes import RECOVERY
from search_spaces.recovery.distillation import KNOBS, distilled


@RECOVERY.part("full", source="continued pre-training of all weights", knobs=KNOBS)
def full(*, distillation: str, distillation_weight: float) -> dict[str, Any]:
    return distilled(distillation, distillation_weight)
