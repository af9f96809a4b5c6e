"""Ways to reach a plan while training: one file a part.

A part is `f(plan: AttentionPlan, **knobs) -> tuple[AttentionPlan, ...]`: the plans to be reached one after the other,
the last one being `plan`; none without a relaxation. `trainers.relaxations` has a part of the same name, which is given
the knobs of `attention.conversion.relaxation_knobs`; those in `OWN` are for whoever sets up the training.
"""

from attention.axes import Knob
from search_spaces.axes import RELAXATION

FRACTION = Knob("fraction", "float", 0.5, "share of a trial's training steps; recovery has the rest, if any", 0.05, 1.0)
STAGES = Knob("halving", "bool", False, "fuse in stages: groups of 2, then of 4, then of 8 (paper 000, App. B.2)")
REGROUP = Knob(
    "regroup_steps",
    "int",
    0,
    "with halving: steps before each stage that say which heads fuse first (App. B.2); 0: in the order of the heads",
    low=0,
    high=1_000_000,
)
STEPS = Knob("steps", "int", 0, "training steps of all stages, whatever `fraction` says; 0: `fraction`", 0, 1_000_000)
BATCH = Knob("batch_size", "int", 0, "sequences a step while fusing; 0: as in training (paper 000: 64, then 256)", 0)
RATE = Knob("learning_rate", "float", 0.0, "peak rate of the weights while fusing; 0: that of the trial", 0.0, 1.0)
SCHEDULE = Knob(
    "own_schedule", "bool", False, "fusing and recovering each have a warm-up and a cosine (paper 000, Table 4)"
)
OWN = tuple(knob.name for knob in (FRACTION, STAGES, REGROUP, STEPS, BATCH, RATE, SCHEDULE))
"""Knobs that the relaxation itself does not have."""

__all__ = ["BATCH", "FRACTION", "OWN", "RATE", "REGROUP", "RELAXATION", "SCHEDULE", "STAGES", "STEPS"]
