"""Which weights train after the conversion, and which settings of a training that may change."""

from __future__ import annotations

from typing import Any

from attention.axes import Knob
from search_spaces.axes import RECOVERY

AS_CONFIGURED = "as_configured"
ENDS = {"tenth": 0.1, "zero": 0.0}
_KNOBS = (
    Knob(
        "distillation",
        "choice",
        (
            "learn from the original model: as the training's settings say, not at all, KL, "
            "or KL + BiLD (Jin 2024)"
        ),
        choices=(AS_CONFIGURED, "none", "kl", "kl_bild"),
    ),
    Knob(
        "distillation_weight",
        "float",
        "with `distillation` kl or kl_bild: its share of the loss; 1 leaves language modelling out",
        0.01,
        1.0,
    ),
    Knob(
        "decay",
        "choice",
        "the cosine, which spans the relaxation too, ends as the training's settings say, at a "
        "tenth of the peak "
        "(DHA, B.5) or at 0 (Jin 2024, 4.1)",
        choices=(AS_CONFIGURED, *ENDS),
    ),
)


@RECOVERY.part("full", source="continued pre-training", knobs=_KNOBS)
def full(
    *,
    distillation: str = AS_CONFIGURED,
    distillation_weight: float = 0.5,
    decay: str = AS_CONFIGURED,
) -> dict[str, Any]:
    """All weights train, or those that `train.tuning` names."""
    changes: dict[str, Any] = {}
    if distillation != AS_CONFIGURED:
        changes |= {"distillation": distillation, "distillation_weight": distillation_weight}
    return changes if decay == AS_CONFIGURED else {**changes, "min_lr_ratio": ENDS[decay]}


@RECOVERY.part(
    "lora",
    source="Hu 2021; Chen 2024 (AsymGQA), Table 3",
    knobs=(
        Knob("rank", "int", "rank of an adapter", 1, 64, searched=True),
        Knob("alpha", "float", "an adapter counts alpha / rank times", 1e-3, 1e4),
        *_KNOBS,
    ),
    passes_to=full,
)
def lora(*, rank: int = 8, alpha: float = 16.0, **knobs: Any) -> dict[str, Any]:
    """Low-rank adapters train, the weights stay (AsymGQA, Table 3, has both)."""
    return {"tuning": "lora", "lora_rank": rank, "lora_alpha": alpha, **full(**knobs)}
