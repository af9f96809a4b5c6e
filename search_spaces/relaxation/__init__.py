"""Ways to reach a plan while training: one file a part.

A part is `f(plan: AttentionPlan, **knobs) -> tuple[AttentionPlan, ...]`: the plans to be reached one after the other,
the last one being `plan`; none without a relaxation. `trainers.relaxations` has a part of the same name, which is given
the knobs of `attention.relaxation_knobs`; `FRACTION` and `STAGES` are for whoever sets up the training.
"""

from attention.axes import Knob
from search_spaces.axes import RELAXATION

FRACTION = Knob("fraction", "float", 0.5, "share of a trial's training steps; recovery has the rest", 0.05, 0.95)
STAGES = Knob("halving", "bool", False, "fuse in stages: groups of 2, then of 4, then of 8 (paper 000, App. B.2)")
OWN = (FRACTION.name, STAGES.name)
"""Knobs that the relaxation itself does not have."""

__all__ = ["FRACTION", "OWN", "RELAXATION", "STAGES"]
