"""Low-rank adapters train, the weights stay (paper 003, Table 3, has both)."""

from __future__ import annotations

from typing import Any

from attention.axes import Knob
from search_spaces.axes import RECOVERY
from search_spaces.recovery.distillation import KNOBS, distilled
from search_spaces.recovery.schedule import DECAY, decayed

RANK = Knob("rank", "int", 8, "rank of an adapter", 1, 64, searched=True)
ALPHA = Knob("alpha", "float", 16.0, "an adapter counts alpha / rank times", 1e-3, 1e4)


@RECOVERY.part("lora", source="Hu 2022; Chen 2024 (paper 003), Table 3", knobs=(RANK, ALPHA, *KNOBS, DECAY))
def lora(*, rank: int, alpha: float, distillation: str, distillation_weight: float, decay: str) -> dict[str, Any]:
    adapters = {"tuning": "lora", "lora_rank": rank, "lora_alpha": alpha}
    return {**adapters, **distilled(distillation, distillation_weight), **decayed(decay)}
