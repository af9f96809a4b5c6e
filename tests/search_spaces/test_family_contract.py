"""Contract of every family: each recipe converts it, at two budgets, into a model whose cache is correct, that can be
read from disk, that stock software loads where the plan allows it, and that each export target supports or refuses.

Tests of families without recipes are with the tested code: lifting, the identity bit for bit, kernels and caches in
tests/attention/modeling/test_grouped.py and test_conversion.py, calibration against hooks in test_calibration.py.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from head_references import logits
from transformers import AutoModelForCausalLM, PreTrainedModel

from attention.calibration.calibrate import calibrate
from attention.conversion.convert import lift
from attention.families import families, geometry_of
from attention.io import checkpoint
from attention.io.export import export, tolerance
from attention.io.targets import TargetError, target, targets
from attention.modeling.growing_cache import cache_argument
from attention.modeling.model_classes import plan_of
from attention.plan import PlanError
from search_spaces.planning.context import PlanningContext, convert_with
from search_spaces.planning.planner import make_plan
from search_spaces.recipes.catalogue import RECIPES, Recipe, recipe

Tiny = Callable[..., PreTrainedModel]
FAMILIES = sorted(families())
TOKENS = torch.randint(64, (12, 24), generator=torch.Generator().manual_seed(0))
QUICK = ("gqa", "least_squares")
WINDOWED = ("gemma2", "gemma3_text", "gemma4_text", "gpt_oss")  # composition needs the cache of all tokens
NORMS_APART = ("minimax_m2", "olmo2", "olmoe", "stablelm")  # objective=layer knows no norm of each head's own


def ratios_of(known: Recipe) -> tuple[float, ...]:
    """Two budgets that a recipe can meet; sharing layers saves weights and no cache, a single head is a quarter."""
    if known.sharing != "none":
        return (1.0,)
    return (0.25,) if known.allocation == "single" else (0.5, 0.25)


CASES = [
    pytest.param(name, family, ratio, marks=() if name in QUICK and ratio == 0.5 else pytest.mark.extended)
    for family in FAMILIES
    for name, known in RECIPES.items()
    for ratio in ratios_of(known)
]


@pytest.fixture(scope="module")
def contexts(tiny_model: Tiny) -> Callable[[str], PlanningContext]:
    """The tiny model of a family with what planning needs, made once."""
    created: dict[str, PlanningContext] = {}

    def context(family: str) -> PlanningContext:
        if family not in created:
            model = tiny_model(family)
            calibrated = calibrate(model, TOKENS)
            distances = np.random.default_rng(0).random((2, 4, 4))  # of DHA's search phase, which trains
            both = {side: list(distances + distances.transpose(0, 2, 1)) for side in ("key", "value")}
            context = PlanningContext(geometry_of(model.config), lift(model), calibrated, model, TOKENS)
            created[family] = replace(context, fusion_distances=both)
        return created[family]

    return context


@pytest.mark.parametrize(("name", "family", "ratio"), CASES)
def test_every_recipe(name: str, family: str, ratio: float, contexts: Any, tmp_path: Path) -> None:
    context = contexts(family)
    chosen, seed = recipe(name), np.random.default_rng(0)
    if name == "asymgqa" and family in NORMS_APART and ratio == 0.5:  # a quarter is one group, and none is searched
        with pytest.raises(ValueError, match=f"objective=layer has no form for {family}.*another objective"):
            make_plan(chosen, ratio, context, seed)
        return
    plan = make_plan(chosen, ratio, context, seed)
    if chosen.composition != "none" and family in WINDOWED:
        with pytest.raises(PlanError, match=f"{family} keep a window of 10 tokens.*without composition"):
            convert_with(chosen, context.model, plan, context.calibration)
        return
    converted = convert_with(chosen, context.model, plan, context.calibration)
    whole = logits(converted, TOKENS[:2])
    assert torch.isfinite(whole).all() and plan_of(converted) == plan
    with torch.no_grad():
        cache = converted(TOKENS[:2, :20], use_cache=True).past_key_values
        steps = [
            converted(TOKENS[:2, t : t + 1], **cache_argument(converted, cache), use_cache=True).logits
            for t in range(20, 24)
        ]
    torch.testing.assert_close(torch.cat(steps, 1), whole[:, 20:], rtol=0, atol=3e-4)
    folder = checkpoint.save(converted, tmp_path / "model")
    torch.testing.assert_close(logits(checkpoint.load(folder), TOKENS[:2]), whole, rtol=0, atol=1e-4)
    if not checkpoint.load_config(folder).model_type.startswith("headfold_"):
        stock = AutoModelForCausalLM.from_pretrained(folder)
        torch.testing.assert_close(logits(stock, TOKENS[:2]), whole, rtol=0, atol=1e-4)


@pytest.mark.parametrize("family", FAMILIES)
def test_our_keys_and_values_are_nearer_than_means(family: str, contexts: Any) -> None:
    """With the same groups, in the logits: the gain of least squares in a layer is visible at the end of the model."""
    context = contexts(family)
    plan = make_plan(recipe("gqa"), 0.5, context, np.random.default_rng(0))
    expected = logits(context.model, TOKENS)
    apart = [
        float((logits(convert_with(recipe(name), context.model, plan, context.calibration), TOKENS) - expected).norm())
        for name in ("least_squares", "gqa")
    ]
    assert 0 < apart[0] < apart[1]


@pytest.mark.parametrize("name", sorted(targets()))
@pytest.mark.parametrize("family", FAMILIES)
def test_every_target_holds_the_family_or_says_why_not(
    family: str, name: str, tiny_model: Tiny, contexts: Any, tmp_path: Path
) -> None:
    context = contexts(family)
    plan = make_plan(recipe("gqa"), 0.5, context, np.random.default_rng(0))
    source = checkpoint.save(convert_with(recipe("gqa"), context.model, plan, None), tmp_path / "model")
    config = checkpoint.load_config(source)
    try:
        target(name).support_for(config, plan_of(checkpoint.load(source)))
    except TargetError as error:
        assert len(str(error)) > 30
        return
    report = export(source, name, tmp_path / "out", allow_larger_cache=True)
    assert report.exact and report.max_logit_difference <= tolerance(torch.float32) * max(report.max_logit, 1.0)
