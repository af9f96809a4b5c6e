"""The plans that training with a relaxation reaches one after the other."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from attention.axes import Knob
from attention.conversion.relaxation_knobs import HARD_CONCRETE, LAGRANGIAN, PULL_TOGETHER
from attention.plan import AttentionPlan, LayerPlan
from search_spaces.axes import RELAXATION

FRACTION = Knob(
    "fraction",
    "float",
    "share of a trial's training steps; recovery has the rest, if any",
    0.05,
    1.0,
)
STAGED = (
    Knob("halving", "bool", "fuse in stages: groups of 2, then of 4, then of 8 (DHA, App. B.2)"),
    Knob(
        "regroup_steps",
        "int",
        (
            "with halving: steps before each stage that say which heads fuse first (App. "
            "B.2); 0: in their order"
        ),
        low=0,
        high=1_000_000,
    ),
    Knob(
        "steps",
        "int",
        "training steps of all stages, whatever `fraction` says; 0: `fraction`",
        0,
        1_000_000,
    ),
    Knob(
        "batch_size",
        "int",
        "sequences per step while fusing; 0: as in training (DHA: 64, then 256)",
        0,
    ),
    Knob(
        "learning_rate",
        "float",
        "peak rate of the weights while fusing; 0: that of the trial",
        0.0,
        1.0,
    ),
    Knob(
        "own_schedule",
        "bool",
        "fusing and recovering each have a warm-up and a cosine (DHA, Table 4)",
    ),
)
SETUP_KNOBS = tuple(knob.name for knob in (FRACTION, *STAGED))
"""Knobs for the code that sets up the training; the relaxation itself does not have them."""
# Jin 2024 has its schedule over all of the training, of which the last fifth has frozen masks: that
# fifth is recovery here, and the shares are of the first four fifths.
WHOLE = 0.8
OF_WHOLE = {"target_fraction": 0.3 / WHOLE, "freeze_fraction": 1.0}


@RELAXATION.part("none", source="-")
def none(plan: AttentionPlan) -> tuple[AttentionPlan, ...]:
    """Heads are fused before training, in closed form."""
    return ()


@RELAXATION.part(
    "pull_together",
    source="Cao 2024: PostShare",
    knobs=(FRACTION, *PULL_TOGETHER),
    needs=("shares",),
)
def pull_together(
    plan: AttentionPlan, *, fraction: float = 0.5, **knobs: object
) -> tuple[AttentionPlan, ...]:
    """PostShare: heads that are to share their weights are drawn together first (Cao 2024)."""
    return (plan,)


@RELAXATION.part(
    "hard_concrete",
    source="Jin 2024, sec. 3.5, Eq. 25 to 29",
    knobs=(
        FRACTION,
        *(replace(knob, default=OF_WHOLE.get(knob.name, knob.default)) for knob in HARD_CONCRETE),
    ),
)
def hard_concrete(
    plan: AttentionPlan, *, fraction: float = WHOLE, **knobs: object
) -> tuple[AttentionPlan, ...]:
    """Align: heads fade into their group's new head under L0 masks (Jin 2024, sec. 3.5)."""
    return (plan,)


@RELAXATION.part(
    "lagrangian",
    source="Chen 2024 (DHA), sec. 4.2 and App. B.2; sec. 5.1 and Table 4 for how it is trained",
    knobs=(FRACTION, *STAGED, *LAGRANGIAN),
)
def lagrangian(
    plan: AttentionPlan,
    *,
    fraction: float = 0.5,
    halving: bool = False,
    regroup_steps: int = 0,
    steps: int = 0,
    batch_size: int = 0,
    learning_rate: float = 0.0,
    own_schedule: bool = False,
    **knobs: object,
) -> tuple[AttentionPlan, ...]:
    """DHA: heads become learned mixes, which a Lagrangian draws together (DHA, sec. 4.2, App. B.2).

    The plan itself or, with `halving`, first groups of two, of four, ... that make up its groups.
    Every stage is a part of the last one, whose groups were searched for. Which heads of a group
    come first is cut here in their order; with `regroup_steps` the training finds it anew at every
    stage, as the paper does.
    """
    if not halving:
        return (plan,)
    stages: list[AttentionPlan] = []
    size = 2
    while (stage := _in_groups_of(size, plan)) != plan:
        stages.append(stage)
        size *= 2
    return (*stages, plan)


def _in_groups_of(size: int, plan: AttentionPlan) -> AttentionPlan:
    """Split every group of more than `size` heads into pieces of `size`, in head order."""

    def cut(groups: Sequence[Sequence[int]]) -> list[Sequence[int]]:
        return [group[i : i + size] for group in groups for i in range(0, len(group), size)]

    layers = (
        LayerPlan.from_groups(cut(layer.key_groups), cut(layer.value_groups), plan.num_heads)
        for layer in plan.layers
    )
    return replace(plan, layers=tuple(layers))
