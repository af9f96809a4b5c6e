"""Where the learning rate ends, a choice that every recovery has: it spans the relaxation too."""

from __future__ import annotations

from typing import Any

from attention.axes import Knob
from search_spaces.recovery.distillation import AS_CONFIGURED

ENDS = {"tenth": 0.1, "zero": 0.0}
DECAY = Knob(
    "decay",
    "choice",
    AS_CONFIGURED,
    "the cosine ends as the training's settings say, at a tenth of the peak (paper 000, B.5) or at 0 (paper 001, 4.1)",
    choices=(AS_CONFIGURED, *ENDS),
)


def decayed(decay: str) -> dict[str, Any]:
    """What the knob changes of the training's settings."""
    return {} if decay == AS_CONFIGURED else {"min_lr_ratio": ENDS[decay]}
