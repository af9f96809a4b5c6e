"""Rates of relaxations follow the steps that there are: each comes to its end in them, and what cannot is foreseen."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

from attention.axes import AUTO_KNOB
from attention.conversion.relaxation_knobs import UNFINISHED, constraint_weight, rate_of, too_few_steps
from attention.plan import AttentionPlan, HeadShare, LayerPlan
from orchestrator.search.trials.context import unfinished_relaxations
from search_spaces.recipes.catalogue import recipe
from trainers.losses import objective
from trainers.relaxations import RELAXATION_TRAINING
from trainers.relaxations.stage import relaxed_objective
from trainers.settings import TrainSettings

GROUPED = AttentionPlan((LayerPlan((0, 0, 1, 1), (0, 0, 1, 1)),) * 2, head_dim=8)
SHARED = AttentionPlan((LayerPlan.identity(4),) * 2, 8, (HeadShare(1, 0, 0, 2), HeadShare(1, 1, 0, 0)))
PARTS = [part.name for part in RELAXATION_TRAINING]
STEPS, TOTAL = 19, 24  # of a trial of 24 steps, of which a relaxation has four fifths


def relaxed(name: str, model: Any, ids: Tensor, **knobs: Any) -> Any:
    """The relaxation `name` after STEPS steps of AdamW, on the schedule of a training of TOTAL steps."""
    part, plan = RELAXATION_TRAINING.get(name), SHARED if name == "pull_together" else GROUPED
    options = {"freeze_fraction": 1.0} if name == "hard_concrete" else {}
    relaxation = part(model, plan, steps=STEPS, **part.settings(options | knobs))
    settings, own, done = TrainSettings(learning_rate=1e-3), relaxation.parameter_groups(), 0
    special = {id(p) for group in own for p in group.parameters}
    groups: list[dict[str, Any]] = [{"params": [p for p in relaxation.model.parameters() if id(p) not in special]}]
    scales = [1.0]
    for group in own:
        scale, decay = group.options(settings.learning_rate)
        groups.append({"params": list(group.parameters), "weight_decay": decay})
        scales.append(scale)
    optimiser = torch.optim.AdamW(groups, lr=1.0)
    loss_fn = relaxed_objective(relaxation, objective(), lambda: done)
    relaxation.model.train()
    for done in range(STEPS):
        for group, scale in zip(optimiser.param_groups, scales, strict=True):
            group["lr"] = settings.rate(done, TOTAL) * scale
        optimiser.zero_grad()
        loss_fn(relaxation.model, ids).backward()
        optimiser.step()
    return relaxation


@pytest.fixture
def ids() -> Tensor:
    return torch.randint(0, 64, (8, 16), generator=torch.Generator().manual_seed(0))


@pytest.mark.parametrize("name", PARTS)
def test_a_relaxation_ends_in_the_steps_of_a_short_trial(name: str, tiny_model: Any, ids: Tensor) -> None:
    assert relaxed(name, tiny_model("llama"), ids).remaining() <= UNFINISHED


@pytest.mark.parametrize(("name", "rate"), [("hard_concrete", 0.01), ("lagrangian", 0.01), ("pull_together", 0.001)])
def test_at_a_papers_rate_it_does_not_and_that_is_foreseen(
    name: str, rate: float, tiny_model: Any, ids: Tensor
) -> None:
    assert relaxed(name, tiny_model("llama"), ids, rate=rate).remaining() > 0.5
    knobs = RELAXATION_TRAINING.get(name).settings({"rate": rate})
    report = too_few_steps(name, knobs, STEPS)
    assert report is not None and report.startswith(f"{STEPS} steps are too few for relaxation {name} at rate {rate:g}")
    least = int(report.split("needs ")[1].split()[0])
    assert too_few_steps(name, knobs, least) is None and too_few_steps(name, knobs, least - 1)


@pytest.mark.parametrize("name", PARTS)
def test_nothing_is_left_at_the_end_and_all_of_it_at_the_start(name: str, tiny_model: Any) -> None:
    part, plan = RELAXATION_TRAINING.get(name), SHARED if name == "pull_together" else GROUPED
    assert part(tiny_model("llama"), plan, steps=10, **part.settings({})).remaining() == pytest.approx(1.0)


@pytest.mark.parametrize(
    ("name", "steps", "rate"),
    [
        ("lagrangian", 1000, 0.01),  # Chen 2024 (DHA), sec. 5.1
        ("lagrangian", 18, 0.01 * 1000 / 18),
        ("lagrangian", 4, 1.0),
        ("hard_concrete", 2000, 0.01),
        ("hard_concrete", 19, 1.0),
        ("pull_together", 18, 0.3),
        ("pull_together", 36, 1 - 0.7**0.5),
    ],
)
def test_the_rate_follows_the_steps_unless_it_is_a_number(name: str, steps: int, rate: float) -> None:
    assert rate_of(name, AUTO_KNOB, steps) == pytest.approx(rate)
    assert rate_of(name, 0.25, steps) == 0.25


def test_the_constraint_weighs_as_in_the_paper_with_a_rate_that_is_a_number() -> None:
    assert constraint_weight(AUTO_KNOB, 0.01, 19) == constraint_weight(AUTO_KNOB, AUTO_KNOB, 10**6) == 1.0
    assert constraint_weight(AUTO_KNOB, AUTO_KNOB, 19) > 1000
    assert constraint_weight(7.0, AUTO_KNOB, 19) == 7.0


def test_a_search_foresees_which_recipes_cannot_end() -> None:
    slow = recipe("align", **{"relaxation.rate": 0.01})
    (report,) = unfinished_relaxations([recipe("gqa"), recipe("align"), slow], (0, 8, 24))
    assert report.startswith(
        "align: 19 steps are too few for relaxation hard_concrete at rate 0.01: it needs 640 at least"
    )
    assert unfinished_relaxations([slow], (0,)) == []
    assert "3 steps are too few" in unfinished_relaxations([recipe("align")], (0, 4))[0]
