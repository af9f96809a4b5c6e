"""All weights train."""

from __future__ import annotations

from typing import Any

from search_spaces.axes import RECOVERY
from search_spaces.recovery.distillation import KNOBS, distilled
from search_spaces.recovery.schedule import DECAY, decayed


@RECOVERY.part("full", source="continued pre-training of all weights", knobs=(*KNOBS, DECAY))
def full(*, distillation: str, distillation_weight: float, decay: str) -> dict[str, Any]:
    return distilled(distillation, distillation_weight) | decayed(decay)
