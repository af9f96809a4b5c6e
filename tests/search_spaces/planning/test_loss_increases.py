"""Measured increases: the same as converting and running the whole model; curves shared by budgets and stored."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from parameters import extended
from scipy.stats import spearmanr
from transformers import PreTrainedTokenizerBase

from attention.calibration.calibrate import calibrate
from attention.conversion.convert import assemble, lift
from attention.conversion.refinement.local import fit_module, layer_error
from attention.families import geometry_of
from attention.io import checkpoint
from attention.modeling.losses import language_loss
from attention.plan import AttentionPlan, LayerPlan
from search_spaces.grouping.neighbour import neighbour_partition
from search_spaces.planning import loss_increases
from search_spaces.planning.loss_increases import ESTIMATED_INCREASE, MEASURED_INCREASE, LayerTrials
from search_spaces.planning.planner import PlanningContext, make_plan
from search_spaces.recipes.catalogue import recipe
from search_spaces.recipes.recipe import Recipe
from search_spaces.site import SIDES, plan_of_sites
from trainers.text.data import load_sequences

FAMILIES = ["gemma", "gpt2", "gpt_neox", "llama", "mistral", "opt", "phi", "qwen2", "qwen3"]


@pytest.mark.parametrize("family", FAMILIES)
def test_a_rise_is_that_of_the_whole_model(family: str, tiny_model) -> None:
    model = tiny_model(family, num_hidden_layers=3)
    tokens = torch.from_numpy(np.random.default_rng(0).integers(0, 64, (5, 16)))
    trials = LayerTrials(model, tokens, batch_size=2)
    heads = lift(model)
    for layer in (0, 2, 1, 1):  # backwards too
        other = replace(heads[layer], q=heads[layer].q * 2, k=heads[layer].k * 0.5, v=heads[layer].v.flip(0))
        changed = [other if i == layer else own for i, own in enumerate(heads)]
        whole = assemble(model, AttentionPlan.identity(3, 4, heads[0].head_dim), changed)
        assert trials.increase(layer, other) == pytest.approx(language_loss(whole, tokens) - trials.base, abs=1e-5)
    assert abs(trials.increase(0, heads[0])) < 1e-6
    assert trials.base == pytest.approx(language_loss(model, tokens), abs=1e-5)
    assert trials.base == pytest.approx(language_loss(trials.model, tokens), abs=1e-6)  # the model is unchanged


def test_heads_that_are_not_lifted_are_refused(tiny_model) -> None:
    model = tiny_model("llama")
    trials = LayerTrials(model, torch.zeros(1, 8, dtype=torch.long))
    heads = lift(model)[0]
    with pytest.raises(ValueError, match="expand"):
        trials.increase(0, replace(heads, k=heads.k[:2]))


@pytest.mark.parametrize("kv_heads", [4, 2])
def test_context_rises_are_those_of_the_converted_model(kv_heads: int, make_context) -> None:
    context = make_context("llama", num_key_value_heads=kv_heads)
    chosen = recipe("least_squares", together=False, allocation="knapsack", refinement="none")
    own = LayerPlan(context.geometry.kv_map, context.geometry.kv_map)
    plan = AttentionPlan((own, LayerPlan(own.key_map, (0, 0, 0, 0))), 8)
    untouched = context.loss_of(chosen, AttentionPlan((own, own), 8))
    whole = context.loss_of(chosen, plan) - untouched
    assert context.increases_of(chosen, [(1, plan)], tokens=10_000)[0] == pytest.approx(whole, abs=1e-5)
    assert abs(context.increases_of(chosen, [(0, plan)], tokens=10_000)[0]) < 1e-5


def test_budgets_share_curves_in_a_file(make_context, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    context = replace(make_context("llama"), cache_dir=tmp_path)
    chosen = recipe("least_squares", together=False, allocation="knapsack", refinement="none")
    plans = {ratio: make_plan(chosen, ratio, context, np.random.default_rng(0)) for ratio in (0.75, 0.5)}
    (file,) = tmp_path.glob("curves-*.json")
    assert all(f in (file, tmp_path / ".lock") or f.name.startswith("prices-") for f in tmp_path.iterdir())

    def again(*_: object, **__: object) -> float:
        raise AssertionError("measured again")

    monkeypatch.setattr(PlanningContext, "increases_of", again)
    for where in (context, replace(context, curves={})):  # from memory; from the file, as in another process
        for ratio, plan in plans.items():
            assert make_plan(chosen, ratio, where, np.random.default_rng(0)) == plan
        assert make_plan(chosen, 0.375, where, np.random.default_rng(0)).kv_ratio == 0.375
    file.write_text("{")  # damaged: measured again, not believed
    with pytest.raises(AssertionError, match="measured again"):
        make_plan(chosen, 0.5, replace(context, curves={}), np.random.default_rng(0))


def test_other_tokens_or_fusions_have_curves_of_their_own(make_context, tmp_path: Path) -> None:
    context = replace(make_context("llama"), cache_dir=tmp_path)
    chosen = recipe("least_squares", together=False, allocation="knapsack", refinement="none")
    make_plan(chosen, 0.5, context, np.random.default_rng(0))
    make_plan(chosen.with_changes(refinement="heal"), 0.5, context, np.random.default_rng(0))
    assert len(list(tmp_path.glob("curves-*"))) == 1
    make_plan(chosen.with_changes(fusion="mean"), 0.5, context, np.random.default_rng(0))
    assert len(list(tmp_path.glob("curves-*"))) == 2
    make_plan(chosen.with_changes(**{"allocation.tokens": 24}), 0.5, context, np.random.default_rng(0))
    assert len(list(tmp_path.glob("curves-*"))) == 3


def test_one_count_a_layer(make_context) -> None:
    context = make_context("llama", num_hidden_layers=3)
    for together in (True, False):
        chosen = recipe("least_squares", together=together, allocation="layerwise", refinement="none")
        plan = make_plan(chosen, 7 / 12, context, np.random.default_rng(0))
        assert sum(layer.key_heads for layer in plan.layers) == 7
        assert all(layer.key_heads == layer.value_heads for layer in plan.layers)
        if together:
            assert all(layer.key_map == layer.value_map for layer in plan.layers)
    with pytest.raises(ValueError, match="even"):
        make_plan(chosen, 13 / 24, context, np.random.default_rng(0))


@pytest.mark.parametrize(("counts", "allowed"), [("powers_of_two", {1, 2, 4, 6}), ("divisors", {1, 2, 3, 6})])
def test_counts_are_the_requested_ones(counts: str, allowed: set[int], make_context) -> None:
    context = make_context("llama", num_attention_heads=6, num_key_value_heads=6, hidden_size=48)
    knobs = {"grouping.equal_sizes": False, "allocation.counts": counts}
    chosen = recipe("least_squares", together=False, allocation="knapsack", refinement="none", **knobs)
    plan = make_plan(chosen, 0.5, context, np.random.default_rng(0))
    assert {n for layer in plan.layers for n in (layer.key_heads, layer.value_heads)} <= allowed
    assert plan.kv_ratio == 0.5


@pytest.mark.parametrize("family", [f if f in ("gpt2", "gpt_neox", "llama") else extended(f) for f in FAMILIES])
def test_a_short_fit_before_measuring(family: str, make_context, monkeypatch: pytest.MonkeyPatch) -> None:
    """The increase is that of the model with the fitted layer, and the fit makes the layer's error smaller."""
    context = make_context(family)
    tokens = torch.from_numpy(np.random.default_rng(1).integers(0, 64, (64, 24)))
    context = replace(context, sequences=tokens, _trials={})
    chosen = recipe("least_squares", together=False, allocation="knapsack", refinement="none")
    plan = AttentionPlan((LayerPlan.identity(4), LayerPlan((0, 0, 1, 1), (0, 1, 0, 2))), context.geometry.head_dim)
    (raw,) = context.increases_of(chosen, [(1, plan)], tokens=2000)
    errors: list[tuple[float, float]] = []

    def judged(module: Any, task: Any, *rest: Any, **options: Any) -> Any:
        before = layer_error(module, task.check)
        work = fit_module(module, task, *rest, **options)
        errors.append((before, layer_error(module, task.check)))
        return work

    monkeypatch.setattr(loss_increases, "fit_module", judged)
    (fitted,) = context.increases_of(chosen, [(1, plan)], tokens=2000, fit_steps=60)
    ((before, after),) = errors
    assert after < before and fitted != raw
    assert [fitted] == context.increases_of(chosen, [(1, plan)], tokens=2000, fit_steps=60)
    identity = AttentionPlan((LayerPlan.identity(4),) * 2, context.geometry.head_dim)
    assert abs(context.increases_of(chosen, [(1, identity)], tokens=2000, fit_steps=5)[0]) < 1e-4


@pytest.fixture(scope="module")
def demo_context(demo_dir: Path, demo_tokenizer: PreTrainedTokenizerBase) -> PlanningContext:
    model = checkpoint.load(demo_dir, torch.float32)
    tokens = load_sequences("stdlib", demo_tokenizer, split="calibration", tokens=4096, sequence_length=128)
    return PlanningContext(geometry_of(model.config), lift(model), calibrate(model, tokens), model, tokens)


@pytest.mark.extended
def test_estimates_follow_what_is_measured(demo_context: PlanningContext) -> None:
    """On the demo checkpoint, of single sites without a fit: ranked alike, and mostly within a factor of two."""
    context, geometry = demo_context, demo_context.geometry
    chosen = recipe("least_squares", together=False, refinement="none")
    result = {MEASURED_INCREASE: [], ESTIMATED_INCREASE: []}
    for layer in range(geometry.num_layers):
        sites = [{(layer, side): neighbour_partition(8, count)} for side in SIDES for count in (1, 2, 4)]
        plans = [plan_of_sites(site, geometry) for site in sites]
        for increases, values in result.items():
            values += context.increases_of(chosen, [(layer, plan) for plan in plans], tokens=1024, increases=increases)
    measured, estimated = (np.array(result[name]) for name in (MEASURED_INCREASE, ESTIMATED_INCREASE))
    assert spearmanr(measured, estimated).statistic > 0.9
    seen = measured > 1e-3  # smaller ones are as large as what the sample of tokens changes
    assert seen.sum() > 12 and np.median(np.abs(np.log2(estimated[seen] / measured[seen]))) < 1


@pytest.mark.heavy
@pytest.mark.extended
def test_an_estimate_foresees_a_longer_refinement(demo_context: PlanningContext) -> None:
    """From 60 steps to what 240 make of it, on the demo checkpoint. Where keys stay as they are nothing is fitted."""
    chosen = recipe("least_squares", together=False, refinement="none")

    def estimate(side: str, fit_steps: int, refined_steps: int) -> float:
        plan = plan_of_sites({(3, side): neighbour_partition(8, 4)}, demo_context.geometry)
        knobs = {"tokens": 1024, "fit_steps": fit_steps, "refined_steps": refined_steps}
        return demo_context.increases_of(chosen, [(3, plan)], increases=ESTIMATED_INCREASE, **knobs)[0]

    short, foreseen, created = estimate("key", 60, 60), estimate("key", 60, 240), estimate("key", 240, 240)
    assert created < short
    assert foreseen == pytest.approx(created, rel=0.25)
    assert estimate("value", 60, 240) == estimate("value", 60, 60)


@pytest.mark.parametrize(("layers", "steps"), [(0, 720), (6, 720), (12, 360), (30, 180)])
def test_an_estimate_counts_on_the_steps_of_the_refinement(
    layers: int, steps: int, make_context, monkeypatch: pytest.MonkeyPatch
) -> None:
    """More than six layers share the steps of six, at least a quarter each."""
    context = replace(make_context("llama"), checkpoint_layers=layers)
    requested = set[int]()

    def seen(
        _: PlanningContext, recipe: Recipe, plans: Sequence[Any], *, refined_steps: int, **more: Any
    ) -> list[float]:
        requested.add(refined_steps)
        return [float(layer) for layer, _ in plans]

    monkeypatch.setattr(PlanningContext, "increases_of", seen)
    make_plan(recipe("headfold"), 0.5, context, np.random.default_rng(0))
    assert requested == {steps}


@pytest.mark.heavy
def test_parallel_layers_are_those_one_after_the_other(
    make_context, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """With two threads two layers are requested together, and their results are stored before the next requests."""
    context = make_context("llama", num_hidden_layers=3)
    chosen = recipe("headfold", **{"allocation.fit_steps": 20, "allocation.counts": "powers_of_two"})
    increases_of, requested = PlanningContext.increases_of, list[tuple[set[int], int]]()

    def seen(self: PlanningContext, recipe: Recipe, plans: Sequence[tuple[int, Any]], **more: Any) -> list[float]:
        stored = sum(len(json.loads(file.read_text())) for file in Path(self.cache_dir or "").glob("curves-*.json"))
        requested.append(({layer for layer, _ in plans}, stored))
        return increases_of(self, recipe, plans, **more)

    monkeypatch.setattr(PlanningContext, "increases_of", seen)
    threads, result = torch.get_num_threads(), {}
    try:
        for at_once in (1, 2):
            torch.set_num_threads(at_once)
            ours = replace(context, cache_dir=tmp_path / str(at_once), curves={})
            make_plan(chosen, 0.5, ours, np.random.default_rng(0))
            (result[at_once],) = ours.curves.values()
    finally:
        torch.set_num_threads(threads)
    # Two head counts, 1 and 2, of keys and of values: four points a layer.
    assert requested == [({0}, 0), ({1}, 4), ({2}, 8), ({0, 1}, 0), ({2}, 8)]
    assert result[1].keys() == result[2].keys()
    for key, (increase, partition) in result[1].items():
        assert result[2][key].partition == partition
        assert result[2][key].increase == pytest.approx(increase, rel=1e-3, abs=1e-6)
