"""Recipes that fuse while they train, in a real search and on to a promotion; and how a trial becomes a job."""

from __future__ import annotations

import dataclasses
import json
import signal
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from small_searches import small_search

from attention.conversion.convert import lift
from attention.families import geometry_of
from attention.io import checkpoint
from attention.plan import AttentionPlan, LayerPlan
from orchestrator.conversion import dha_distances
from orchestrator.conversion.execution import relaxation_start
from orchestrator.pipeline import search
from orchestrator.search.candidates import Candidate
from orchestrator.search.trials.context import TrialContext, relaxation_spec, training_job
from orchestrator.storage.journal import load_trials
from orchestrator.storage.records import DONE
from search_spaces.planning.planner import PlanningContext, make_plan
from search_spaces.recipes.catalogue import RECIPES, recipe
from trainers.settings import TrainSettings

RELAXED = sorted(name for name, chosen in RECIPES.items() if chosen.relaxation != "none")


@pytest.fixture
def context(tmp_path: Path, demo_dir: Path) -> TrialContext:
    return TrialContext(
        folder=str(tmp_path),
        model=str(demo_dir),
        dtype="float32",
        train_file="/text/train",
        eval_file="/text/eval",
        calibration_file="/text/calibration",
        calibration_cache=str(tmp_path / "cache"),
        rungs=(0, 10, 50, 100),
        train=TrainSettings(batch_size=4).model_dump(mode="json"),
        original_loss=2.0,
    )


def planned(name: str, model: Any, **changes: Any) -> str:
    """A plan for a recipe, with neighbour groups: quick, and any plan will do here."""
    chosen = recipe(name)
    if chosen.sharing == "none":
        chosen = recipe("gqa")
    plans = PlanningContext(geometry_of(model.config), lift(model), model=model)
    return make_plan(chosen, 1.0 if chosen.sharing != "none" else 0.25, plans, np.random.default_rng(0)).to_json()


@pytest.mark.parametrize("name", RELAXED)
def test_a_relaxation_takes_its_share_of_the_steps(
    name: str, context: TrialContext, tmp_path: Path, demo_model
) -> None:
    chosen = recipe(name)
    (tmp_path / "plan.json").write_text(planned(name, demo_model))
    job = training_job(context, tmp_path, Candidate(chosen, 1.0, 1e-3, seed=7), "t1")
    taken = round(chosen.knobs("relaxation")["fraction"] * 100)
    assert job.relaxation is not None and job.relaxation.total_steps == taken
    assert job.milestones == tuple(rung - taken for rung in (10, 50, 100) if rung > taken)
    assert job.schedule_steps == 100 and job.seed == 7
    assert job.model_dir.endswith("start")
    if name == "align":
        assert job.settings.distillation == "kl_bild" and job.settings.distillation_weight == 1.0
        # The paper's shares of the whole training: T reaches 0 at 30 %, masks freeze at 80 %
        assert job.relaxation.knobs["target_fraction"] * taken == pytest.approx(30)
        assert job.relaxation.knobs["freeze_fraction"] * taken == pytest.approx(80)
        assert job.settings.rate(100, 100) == 0  # sec. 4.1: the cosine ends at 0


def test_a_separate_fusion_stage(context: TrialContext, tmp_path: Path, demo_model) -> None:
    """DHA, sec. 5.1 and Table 4: steps, batch, rate and schedule of the fusion stage, not the recovery's."""
    own = {"steps": 40, "batch_size": 2, "learning_rate": 2e-4, "own_schedule": True, "rate": 0.05}
    chosen = recipe("dha", **{f"relaxation.{name}": value for name, value in own.items()})
    (tmp_path / "plan.json").write_text(planned("dha", demo_model))
    job = training_job(context, tmp_path, Candidate(chosen, 1.0, 1e-3), "t1")
    assert job.relaxation is not None and job.relaxation.total_steps == 40
    assert job.milestones == (10, 60)  # rungs 50 and 100
    fusing, recovering = job.relaxation_settings, job.settings
    assert (fusing.batch_size, fusing.learning_rate, recovering.batch_size, recovering.learning_rate) == (
        2,
        2e-4,
        4,
        1e-3,
    )
    assert (job.relaxation.knobs["rate"], job.schedule_steps) == (0.05, 60)
    assert job.after_relaxation("collapsed").schedule_offset == 0
    with pytest.raises(ValueError, match="relaxation.steps must be below the last rung 100, got 100"):
        context.relaxation_steps(recipe("dha", **{"relaxation.steps": 100}))


def test_stages_are_grouped_anew_if_requested(context: TrialContext, tmp_path: Path, demo_model) -> None:
    chosen = recipe("dha", **{"relaxation.halving": True, "relaxation.regroup_steps": 7})
    spec = relaxation_spec(chosen, planned("dha", demo_model), 20)
    assert (len(spec.plans), spec.steps, spec.regroup_steps) == (2, 10, 7)  # groups of four: 2x, 4x


def test_a_relaxation_may_take_all_steps(context: TrialContext, tmp_path: Path, demo_model) -> None:
    """The paper's PostShare: pull, then share, without further training. Below 1, at least one step remains."""
    (tmp_path / "plan.json").write_text(planned("postshare", demo_model))
    for fraction, taken, milestones in ((1.0, 100, (0,)), (0.999, 99, (1,))):
        chosen = recipe("postshare", **{"relaxation.fraction": fraction})
        job = training_job(context, tmp_path, Candidate(chosen, 1.0, 1e-3), "t1")
        assert job.relaxation is not None and (job.relaxation.total_steps, job.milestones) == (taken, milestones)
        assert job.schedule_steps == 100
        assert job.after_relaxation("collapsed").milestones == milestones


def test_a_fusion_stage_of_its_own_schedule_may_take_all_steps(
    context: TrialContext, tmp_path: Path, demo_model
) -> None:
    (tmp_path / "plan.json").write_text(planned("dha", demo_model))
    chosen = recipe("dha", **{"relaxation.fraction": 1.0, "relaxation.own_schedule": True})
    rest = training_job(context, tmp_path, Candidate(chosen, 0.5, 1e-3), "t1").after_relaxation("collapsed")
    assert (rest.milestones, rest.schedule_steps, rest.schedule_offset) == ((0,), 0, 0)


def test_stages_begin_from_the_checkpoint_s_groups() -> None:
    """Two of 16 query heads read each of its key heads: stages of two heads would fuse nothing."""
    plan = AttentionPlan((LayerPlan((0,) * 8 + (1,) * 8, (0,) * 8 + (1,) * 8),), 4).to_json()
    dha = recipe("dha", **{"relaxation.halving": True})

    def sizes(kv_map: Sequence[int] | None) -> list[int]:
        spec = relaxation_spec(dha, plan, 60, kv_map=kv_map)
        return [AttentionPlan.from_json(text).layers[0].key_heads for text in spec.plans]

    assert sizes(None) == sizes(range(16)) == [8, 4, 2]
    assert sizes([head // 2 for head in range(16)]) == [4, 2]
    assert sizes([head // 8 for head in range(16)]) == [2]
    assert sizes([head // 3 for head in range(15)] + [4]) == [2], "no stage divides a stored head"


def test_stages_of_two_four_eight(context: TrialContext, tmp_path: Path, demo_model) -> None:
    plans = PlanningContext(geometry_of(demo_model.config), lift(demo_model), model=demo_model)
    plan = make_plan(recipe("gqa"), 0.125, plans, np.random.default_rng(0))
    spec = relaxation_spec(recipe("dha", **{"relaxation.halving": True}), plan.to_json(), 61)
    assert [json.loads(text)["layers"][0]["key_map"] for text in spec.plans] == [
        [0, 0, 1, 1, 2, 2, 3, 3],
        [0, 0, 0, 0, 1, 1, 1, 1],
        [0] * 8,
    ]
    two = relaxation_spec(recipe("dha", **{"relaxation.halving": True}), plan.to_json(), 2)
    assert (two.plans, two.total_steps) == (spec.plans[1:], 2), "a stage takes a step at least"
    assert spec.steps == 20 and spec.total_steps == 60


@pytest.mark.parametrize("family", ["llama", "qwen2", "gpt_neox"])
@pytest.mark.parametrize("alignment", ["none", "procrustes"])
def test_a_relaxation_starts_from_the_checkpoint(family: str, alignment: str, tiny_model) -> None:
    """Turned heads, each with separate keys and values, and the logits of the checkpoint."""
    from attention.calibration.calibrate import calibrate

    model = tiny_model(family)
    tokens = torch.randint(0, 64, (4, 16), generator=torch.Generator().manual_seed(0))
    calibration = calibrate(model, tokens)
    geometry = geometry_of(model.config)
    plans = PlanningContext(geometry, lift(model), calibration=calibration, model=model)
    plan = make_plan(recipe("gqa"), 1 / geometry.num_heads, plans, np.random.default_rng(0))
    start = relaxation_start(recipe("dha", alignment=alignment), model, plan, calibration)
    assert all(layer.is_identity for layer in checkpoint.plan_of(start).layers)
    with torch.no_grad():
        torch.testing.assert_close(start(tokens).logits, model(tokens).logits, atol=1e-4, rtol=1e-4)


def test_search_phases_are_distinguished_by_all_that_they_rest_on(context: TrialContext, tmp_path: Path) -> None:
    candidate = Candidate(recipe("dha"), 0.25, 1e-3)
    first = context.search_phase(candidate)
    assert first is not None and first == context.search_phase(candidate)
    assert context.search_phase(Candidate(recipe("align"), 0.25, 1e-3)) is None
    others = [
        context.search_phase(dataclasses.replace(candidate, seed=1)),
        context.search_phase(Candidate(recipe("dha", **{"objective.steps": 5}), 0.25, 1e-3)),
        dataclasses.replace(context, train_file="/text/other").search_phase(candidate),
    ]
    assert len({phase.file(tmp_path) for phase in (first, *others) if phase}) == 4
    result = {side: np.random.default_rng(0).random((2, 4, 4), dtype=np.float32) for side in ("key", "value")}
    dha_distances.write(result, first.file(tmp_path))
    for side, distance in dha_distances.read(first.file(tmp_path)).items():
        np.testing.assert_array_equal(distance, result[side])


@pytest.mark.extended
@pytest.mark.timeout(900)
def test_dha_and_align_in_a_search(tmp_path: Path, demo_dir: Path) -> None:
    """Search phase, relaxation, recovery over the rungs, and a promotion that continues after the relaxation."""
    recipes = [
        {"recipe": "dha", "params": {"objective.steps": 2}},
        {"recipe": "align", "label": "masked", "params": {"relaxation.fraction": 0.34}},
    ]
    config = small_search(
        demo_dir,
        tmp_path,
        search={"recipes": recipes, "kv_ratios": [0.25]},
        rungs={"steps": [0, 1, 3], "stop": False},
        promotion={"steps": 2},
    )
    handler = signal.getsignal(signal.SIGINT)
    outcome = search(config)
    assert signal.getsignal(signal.SIGINT) is handler, "Ctrl-C after the trials"
    trials = {t.recipe: t for t in load_trials(outcome.folder)}
    assert {name: t.status for name, t in trials.items()} == dict.fromkeys(("gqa", "dha", "masked"), DONE)
    steps = {name: [r["step"] for r in t.rungs] for name, t in trials.items()}
    assert steps == {"gqa": [0, 1, 3], "dha": [0, 3], "masked": [0, 3]}
    assert [r["tokens"] for r in trials["dha"].rungs] == [0, 3 * 2 * 64]
    assert {"fusion_loss", "own_share", "multiplier"} <= set(trials["dha"].relaxation[0])
    assert {"mean_mask", "target"} <= set(trials["masked"].relaxation[0])
    (entry,) = outcome.promotion["candidates"].values()
    assert entry["recipe"] == "masked" and entry["status"] == "promoted" and entry["steps"] == 5, entry
    assert entry["loss"] < trials["masked"].rungs[0]["loss"]
