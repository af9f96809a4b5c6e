"""What a short local fit of planning says of the long one of refinement: the power by which errors fall with steps.

    python -m benchmarks fit-decay [--quick]

Loss increases of all single sites with fused keys, as the recipe `headfold` estimates them: after so many steps of fit
and brought to those of refinement (`search_spaces.planning.context.FIT_DECAY`), against those that really made them.
"""

from __future__ import annotations

import tempfile
from collections.abc import Iterator
from pathlib import Path

import numpy as np
from scipy.stats import gmean

from benchmarks.report import Row, Scale, benchmark
from orchestrator.conversion.in_memory import Source
from search_spaces.planning.context import FIT_DECAY
from search_spaces.planning.planning import make_plan
from search_spaces.recipes.recipes import recipe

EXAMPLES = Path(__file__).resolve().parents[1] / "examples"


@benchmark("fit-decay", devices=())  # by its name alone: minutes of fits
def fit_decay(scale: Scale) -> Iterator[Row]:
    """Loss increases foreseen from short local fits, against those after refinement's own number of steps."""
    whole = scale.pick(8, 480)
    for name in scale.pick(["prose-code-qwen3"], ["stdlib-llama", "prose-code-qwen3"]):
        made = increases(name, whole, whole, scale)
        for steps in scale.pick([4], [60, 120, 240]):
            foreseen = increases(name, steps, whole, scale)
            powers = FIT_DECAY + np.log(foreseen / made) / np.log(whole / steps)
            note = f"power {np.median(powers):.2f} ({powers.min():.2f} to {powers.max():.2f})"
            row = f"{name}: {whole} steps from {steps}"
            yield Row(row, float(gmean(foreseen)), float(gmean(made)), "nats", note)


def increases(name: str, fit_steps: int, refined_steps: int, scale: Scale) -> np.ndarray:
    """Of every layer and number of key heads but all, in one order."""
    steps = {"allocation.fit_steps": fit_steps, "refinement.fit_steps": refined_steps}
    chosen, tokens = recipe("headfold", **steps), scale.pick(1024, 16_384)
    sizes = {"calibration_tokens": tokens, "eval_tokens": 1024, "sequence_length": 256, "device": "cpu"}
    with tempfile.TemporaryDirectory() as cache:
        context = Source.load(EXAMPLES / name, chosen, [0.5], cache_dir=cache, **sizes).context
        make_plan(chosen, 0.5, context, np.random.default_rng(0))
    (points,) = context.curves.values()
    return np.array([points[place].increase for place in sorted(points) if "/key/" in place])
