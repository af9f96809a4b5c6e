"""Knobs of the relaxations, declared once below both who proposes them (search_spaces) and who trains them (trainers).

Sources and meaning lie in `trainers.relaxations`, one file each.
"""

from __future__ import annotations

from attention.axes import Knob

LAGRANGIAN = (
    Knob("rate", "log_float", 1e-2, "peak learning rate of coefficients and multiplier", 1e-4, 1.0, searched=True),
    Knob("per_dimension", "bool", True, "one coefficient a head dimension, and not one a head (sec. 4.3)"),
    Knob("base", "float", 0.999, "b of the margin, Eq. 8", 0.0, 1.0),
    Knob("margin_fraction", "float", 0.2, "share of the steps after which the margin is 0 (k of Eq. 8)", 0.0, 1.0),
    Knob("multiplier_start", "float", 10.0, "the multiplier at step 0", 0.0, 1e6),
    Knob("tolerance", "float", 1e-3, "fusion loss below which fusing ends (sec. 4.3)", 0.0, 1.0),
)
HARD_CONCRETE = (
    Knob("rate", "log_float", 1e-2, "peak learning rate of the masks", 1e-4, 1.0, searched=True),
    Knob("log_alpha_start", "float", 4.0, "location (log alpha) of every mask at step 0", 2.4, 20.0),
    Knob("target_fraction", "float", 0.3, "share of the steps over which the target T falls from 1 to 0", 0.0, 1.0),
    Knob("freeze_fraction", "float", 0.8, "share of the steps after which every mask is 0", 0.0, 1.0),
)
PULL_TOGETHER = (
    Knob(
        "rate",
        "log_float",
        0.3,
        "share of each pair's difference that a step takes away at the schedule's peak",
        1e-4,
        1.0,
        searched=True,
    ),
    Knob(
        "tolerance", "float", 1e-4, "squared distance of the pairs over that at step 0 that counts as equal", 0.0, 1.0
    ),
)
