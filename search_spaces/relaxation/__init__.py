"""Ways to reach a plan while training.

A part is `f(plan: AttentionPlan, **knobs) -> tuple[AttentionPlan, ...]`: the plans to be reached
one after the other, the last one being `plan`; none without a relaxation. `trainers.relaxations`
has a part of the same name.
"""
