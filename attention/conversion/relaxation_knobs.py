"""Knobs and defaults of the relaxations, declared below both who proposes them (search_spaces) and who trains them.

Sources and meaning: `trainers.relaxations`, one file each.
"""

from __future__ import annotations

from attention.axes import Knob

LAGRANGIAN = (
    Knob("rate", "log_float", "peak rate of coefficients and multiplier", 1e-4, 1.0, searched=True, default=1e-2),
    Knob("per_dimension", "bool", "one coefficient a head dimension, and not one a head (sec. 4.3)", default=True),
    Knob("base", "float", "b of the margin, Eq. 8", 0.0, 1.0, default=0.999),
    Knob("margin_fraction", "float", "share of the steps until the margin is 0 (k of Eq. 8)", 0.0, 1.0, default=0.2),
    Knob("multiplier_start", "float", "the multiplier at step 0", 0.0, 1e6, default=10.0),
    Knob("tolerance", "float", "fusion loss below which fusing ends (sec. 4.3)", 0.0, 1.0, default=1e-3),
)
HARD_CONCRETE = (
    Knob("rate", "log_float", "peak learning rate of the masks", 1e-4, 1.0, searched=True, default=1e-2),
    Knob("log_alpha_start", "float", "location (log alpha) of every mask at step 0", 2.4, 20.0, default=4.0),
    Knob("target_fraction", "float", "share of the steps in which target T falls from 1 to 0", 0.0, 1.0, default=0.3),
    Knob("freeze_fraction", "float", "share of the steps after which every mask is 0", 0.0, 1.0, default=0.8),
)
PULL_TOGETHER = (
    Knob("rate", "log_float", "share of a pair's gap closed by a step at peak", 1e-4, 1.0, searched=True, default=0.3),
    Knob("tolerance", "float", "pairs' squared distance, over that at step 0, taken as equal", 0.0, 1.0, default=1e-4),
)
