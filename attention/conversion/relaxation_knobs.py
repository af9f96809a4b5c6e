"""Knobs and defaults of the relaxations, and what follows from them alone.

They are declared below both who proposes them (search_spaces) and who trains them (trainers). What
follows are the rate for a number of steps, and whether these can be enough.

Sources and meaning: `trainers.relaxations`, one file each. The papers' rates are for about a
thousand steps or more; a search trains each trial for some dozens. So the default of `rate` is
`auto`: the paper's, scaled to the steps that the relaxation has (`rate_of`). A rate that is a
number is used as it is.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

from attention.axes import AUTO_KNOB, Knob

UNFINISHED = 0.05
"""Share of its way that a relaxation may have left for its result to count as reached
(`Relaxation.remaining`)."""

LAGRANGIAN_PAPER = 0.01, 1000  # rate and steps: Chen 2024 (DHA), sec. 5.1
# The rate: Jin 2024; the steps at which it becomes 1 within 20, measured.
HARD_CONCRETE_PAPER = (0.01, 2000)
CONSTRAINT_STEPS = (
    30_000  # at which the weight is the paper's, 1; at 19 to 28 steps it closes all masks, measured
)
# Decided here, as Cao 2024 is silent: all but 1e-4 of the squared distance goes.
PULL_REFERENCE = (0.3, 18)


def _rate(doc: str) -> Knob:
    text = f"{doc}; auto: from the steps"
    return Knob("rate", "log_float", text, 1e-4, 1.0, searched=True, default=AUTO_KNOB, auto=True)


LAGRANGIAN = (
    _rate("peak rate of coefficients and multiplier"),
    Knob(
        "per_dimension",
        "bool",
        "one coefficient per head dimension, not one per head (sec. 4.3)",
        default=True,
    ),
    Knob("base", "float", "b of the margin, Eq. 8", 0.0, 1.0, default=0.999),
    Knob(
        "margin_fraction",
        "float",
        "share of the steps until the margin is 0 (k of Eq. 8)",
        0.0,
        1.0,
        default=0.2,
    ),
    Knob("multiplier_start", "float", "the multiplier at step 0", 0.0, 1e6, default=10.0),
    Knob(
        "tolerance",
        "float",
        "fusion loss below which fusing ends (sec. 4.3)",
        0.0,
        1.0,
        default=1e-3,
    ),
)
HARD_CONCRETE = (
    _rate("peak learning rate of the masks"),
    Knob(
        "weight",
        "float",
        (
            "weight of the constraint (Eq. 29) relative to the loss; auto: 1 with a rate that is "
            "a number, else from the steps"
        ),
        1e-3,
        1e6,
        default=AUTO_KNOB,
        auto=True,
    ),
    Knob(
        "log_alpha_start",
        "float",
        "location (log alpha) of every mask at step 0",
        2.4,
        20.0,
        default=4.0,
    ),
    Knob(
        "target_fraction",
        "float",
        "share of the steps in which target T falls from 1 to 0",
        0.0,
        1.0,
        default=0.3,
    ),
    Knob(
        "freeze_fraction",
        "float",
        "share of the steps after which every mask is 0",
        0.0,
        1.0,
        default=0.8,
    ),
    Knob(
        "new_heads",
        "choice",
        "what a group's new head starts as: the mean of its heads, or one of them (sec. 4.4)",
        choices=("mean", "nearest"),
        default="mean",
    ),
)
PULL_TOGETHER = (
    _rate("share of a pair's gap closed by a step at peak"),
    Knob(
        "tolerance",
        "float",
        "pairs' squared distance, over that at step 0, taken as equal",
        0.0,
        1.0,
        default=1e-4,
    ),
)


# ---- rates and steps --------------------------------------------------------------------------


def rate_of(name: str, rate: float | str, steps: int) -> float:
    """Return the rate of the relaxation `name` over `steps` steps.

    `rate` itself, or what `auto` comes to.

    Adam moves a number by about its rate per step, so rate times steps stays what it is in the
    paper, up to a rate of 1. A pull closes a share of the gap per step, so what all steps together
    leave of it stays.
    """
    if isinstance(rate, (int, float)):
        return rate
    if name == "pull_together":
        reference, known_steps = PULL_REFERENCE
        return 1 - (1 - reference) ** (known_steps / steps)
    paper, known_steps = LAGRANGIAN_PAPER if name == "lagrangian" else HARD_CONCRETE_PAPER
    return min(1.0, paper * known_steps / steps)


def constraint_weight(weight: float | str, rate: float | str, steps: int) -> float:
    """Return the weight of Align's constraint over `steps` steps.

    `weight` itself, or what `auto` comes to.

    The paper's (1) draws a mask shut against the loss only slowly: in few steps the gradients of
    the loss keep masks open, and Adam remembers them. The fewer the steps, the more it weighs; a
    rate that is a number leaves it alone.
    """
    if isinstance(weight, (int, float)):
        return weight
    return max(1.0, CONSTRAINT_STEPS / steps) if rate == AUTO_KNOB else 1.0


def too_few_steps(name: str, knobs: Mapping[str, Any], steps: int) -> str | None:
    """Warn that a relaxation cannot finish within `steps` steps, whatever the loss does.

    None where it may.

    The distance that Adam (or the pull) can cover at the peak rate is bounded.

    Args:
        knobs: Those of the part `name`.
    """
    rate = rate_of(name, knobs["rate"], steps)
    if name == "pull_together":
        enough = (
            math.inf
            if rate == 0
            else math.log(UNFINISHED) / (2 * math.log1p(-rate))
            if rate < 1
            else 1.0
        )
    elif name == "hard_concrete":
        # From where a mask starts to where it is 0 without noise, which is -log 11 (Louizos 2017,
        # Eq. 13)
        enough = (knobs["log_alpha_start"] + math.log(11)) / rate
    else:
        # Mixes of two heads, each itself at the start, whose squared distance is down to UNFINISHED
        # of what it was
        enough = 0.5 * (1 - math.sqrt(UNFINISHED)) / rate
    least = math.ceil(enough)
    if steps >= least:
        return None
    return (
        f"{steps} steps are too few for relaxation {name} at rate {rate:.3g}: it needs "
        f"{least} at least"
    )
