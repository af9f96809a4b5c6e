"""Every part of every axis, every recipe and every family on a GPU, an emulated one: no tensor is on the wrong device,
and plans and weights are those of the CPU. A new part, recipe or family is collected by itself."""

from __future__ import annotations

import copy
import re
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from parameters import extended
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel
from transformers import PreTrainedModel

from attention.axes import Part
from attention.base.draws import draw_categories
from attention.calibration.calibrate import calibrate
from attention.calibration.store import Calibration
from attention.conversion.convert import lift
from attention.conversion.refinement.refine import refine
from attention.conversion.sensitivity import output_metrics
from attention.families import families, geometry_of
from attention.plan import AttentionPlan
from search_spaces.planning.context import PlanningContext, convert_with
from search_spaces.planning.planner import make_plan
from search_spaces.recipes.catalogue import AXES, RECIPES, Recipe, RecipeError, recipe
from search_spaces.space.joint_space import JointSpace

CPU = torch.device("cpu")
FAMILIES = sorted(families())
ROOMS = ("attention", "search_spaces", "trainers", "orchestrator")
TOKENS = torch.randint(64, (6, 24), generator=torch.Generator().manual_seed(0))
SHORT = {"fit_steps": 4, "iterations": 40, "steps": 40, "tokens": 48}  # knobs of parts that work by steps
ORDINARY = ("alignment", "composition", "activation", "layer")
"""The axes and parts of `make test`; others come with its recipes."""
PARTS = [
    pytest.param(axis, part, id=f"{axis}={part.name}", marks=() if ordinary else pytest.mark.extended)
    for axis, parts in AXES.items()
    for part in parts
    for ordinary in [axis in ORDINARY or part.name in ORDINARY]
]

Outcome = tuple[AttentionPlan, Tensor] | str


@pytest.fixture(scope="module")
def context(tiny_model: Callable[..., PreTrainedModel]) -> Callable[[str, torch.device], PlanningContext]:
    """A family's tiny model on a device with what planning needs; its calibration is the CPU's, as mapped files are."""
    created: dict[str, tuple[PreTrainedModel, Calibration]] = {}
    distances = np.random.default_rng(0).random((2, 4, 4))  # of DHA's search phase, which trains
    both = {side: list(distances + distances.transpose(0, 2, 1)) for side in ("key", "value")}

    def on(family: str, device: torch.device) -> PlanningContext:
        if family not in created:
            model = tiny_model(family)
            created[family] = model, calibrate(model, TOKENS)
        model, calibration = created[family]
        moved = copy.deepcopy(model).to(device)
        # Afresh: a context keeps what was found with it.
        return PlanningContext(
            geometry_of(model.config), lift(moved), calibration, moved, TOKENS, fusion_distances=both
        )

    return on


def outcome(chosen: Recipe, ratio: float, context: PlanningContext) -> Outcome:
    """Plan and logits of a conversion, refined if the recipe says so; or why there is none."""
    model: Any = context.model
    try:
        with sdpa_kernel(SDPBackend.MATH), torch.no_grad():  # as the emulated GPU does it
            plan = make_plan(chosen, ratio, context, np.random.default_rng(0))
            converted = convert_with(chosen, model, plan, context.calibration, share=True)
            with torch.enable_grad():
                refine(chosen.refinement, model, converted, TOKENS, chosen.knobs("refinement"))
            return plan, converted(TOKENS[:2].to(model.device)).logits.cpu()
    except ValueError as error:
        return str(error)


def assert_same_on(device: torch.device, chosen: Recipe, ratio: float, family: str, context: Any) -> Outcome:
    expected = outcome(chosen, ratio, context(family, CPU))
    result = outcome(chosen, ratio, context(family, device))
    if isinstance(expected, str) or isinstance(result, str):
        assert result == expected
    else:
        assert result[0] == expected[0]
        # A real GPU adds in another order, and the fit's steps make much of small gradients: weights of Gemma's tiny
        # model that differ by 1e-7 of themselves move these logits by 2e-4.
        limit = 5e-3 if device.type == "cuda" else 1e-4
        torch.testing.assert_close(result[1], expected[1], atol=limit, rtol=1e-4)
    return result


def short(chosen: Recipe) -> Recipe:
    """The recipe with few steps of everything that takes steps."""
    less = {
        f"{axis}.{knob.name}": max(SHORT[knob.name], int(knob.low or 0))
        for axis, part in chosen.parts().items()
        for knob in part.knobs
        if knob.name in SHORT and axis not in ("relaxation", "recovery")  # these are of training
    }
    return chosen.with_changes(**less)


def ratio_of(chosen: Recipe) -> float:
    """A budget that a recipe can meet; a single head is a quarter."""
    if chosen.sharing != "none":
        return 1.0
    return 0.25 if chosen.allocation == "single" else 0.5


def spaces_with(part: Part, axis: str, context: PlanningContext) -> Iterator[JointSpace]:
    """Spaces of recipes that use the part, those of short plans first; shared heads save no KV cache."""
    for ratios in ([0.5, 0.25], [1.0]):
        for others in ({"allocation": ["uniform"], "together": [True]}, {}, {"relaxation": AXES["relaxation"].names()}):
            try:
                yield JointSpace(ratios, context.geometry, choices=others | {axis: [part.name]})
            except ValueError:
                continue


def recipe_with(part: Part, axis: str, context: PlanningContext) -> tuple[Recipe, float]:
    """A recipe and ratio that use the part, the knobs at their defaults."""
    for space in spaces_with(part, axis, context):
        for seed in range(30):
            generator, point = np.random.default_rng(seed), {}
            while (domain := space.next(point)) is not None:
                point[domain.name] = domain.default if "." in domain.field else domain.sample(generator)
            chosen, ratio = space.to_recipe(point)
            if getattr(chosen, axis) == part.name:
                return short(chosen), ratio
    raise AssertionError(f"no recipe has {axis}={part.name}")


@pytest.mark.parametrize(("axis", "part"), PARTS)
def test_every_part(axis: str, part: Part, context: Any, fgpu: torch.device) -> None:
    chosen, ratio = recipe_with(part, axis, context("llama", CPU))
    result = assert_same_on(fgpu, chosen, ratio, "llama", context)
    assert not isinstance(result, str), result


CHOICES = [
    extended(axis, part, knob.name, choice, id=f"{axis}={part.name},{knob.name}={choice}")
    for axis, parts in AXES.items()
    for part in parts
    for knob in part.knobs
    for choice in knob.choices or ()
    if axis not in ("relaxation", "recovery")  # their knobs are of training
]


@pytest.mark.parametrize(("axis", "part", "knob", "choice"), CHOICES)
def test_every_choice_of_every_part(
    axis: str, part: Part, knob: str, choice: Any, context: Any, fgpu: torch.device
) -> None:
    chosen, ratio = recipe_with(part, axis, context("llama", CPU))
    try:
        chosen = chosen.with_changes(**{f"{axis}.{knob}": choice})
    except RecipeError as error:
        pytest.skip(f"not with these other parts: {error}")
    result = assert_same_on(fgpu, chosen, ratio, "llama", context)
    assert not isinstance(result, str), result


QUICK = ("asymgqa", "dcformer", "postshare")


@pytest.mark.parametrize("name", [name if name in QUICK else extended(name) for name in RECIPES])
def test_every_recipe(name: str, context: Any, fgpu: torch.device) -> None:
    ratio = ratio_of(recipe(name))
    result = assert_same_on(fgpu, short(recipe(name)), ratio, "llama", context)
    assert not isinstance(result, str), result


@pytest.mark.extended
@pytest.mark.parametrize("family", FAMILIES)
def test_every_family(family: str, context: Any, fgpu: torch.device) -> None:
    """By the recipe that uses most of the project: moments, curves, fits, healing."""
    result = assert_same_on(fgpu, short(recipe("headfold_gqa")), 0.5, family, context)
    assert not isinstance(result, str), result


@pytest.mark.extended
@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("name", RECIPES)
def test_every_recipe_of_every_family(name: str, family: str, context: Any, fgpu: torch.device) -> None:
    ratio = ratio_of(recipe(name))
    assert_same_on(fgpu, short(recipe(name)), ratio, family, context)


@pytest.mark.parametrize(
    "family", [f if f == "llama" else pytest.param(f, marks=pytest.mark.extended) for f in FAMILIES]
)
def test_calibration_and_sensitivity(family: str, context: Any, fgpu: torch.device) -> None:
    """Moments, and the metrics of outputs: a backward pass from labels that the same numbers are drawn for."""
    with sdpa_kernel(SDPBackend.MATH):
        on_cpu, on_gpu = (context(family, device).model for device in (CPU, fgpu))
        expected, result = calibrate(on_cpu, TOKENS), calibrate(on_gpu, TOKENS)
        for layer, other in zip(expected.layers, result.layers, strict=True):
            for name in ("input_moment", "mixed_moments", "query_moment", "inputs"):
                torch.testing.assert_close(getattr(other, name).cpu(), getattr(layer, name), atol=1e-4, rtol=1e-4)
        metrics = zip(output_metrics(on_cpu, TOKENS), output_metrics(on_gpu, TOKENS), strict=True)
    for layer, other in metrics:
        torch.testing.assert_close(other.cpu(), layer, atol=1e-5, rtol=1e-3)


def test_statistics_are_handed_out_on_the_device_of_the_heads(context: Any, fgpu: torch.device) -> None:
    statistics = context("llama", CPU).calibration.layers[0]
    assert statistics.on(CPU) is statistics
    there = statistics.on(fgpu)
    heads = context("llama", fgpu).heads[0]
    assert there.on(fgpu) is there and there.on(CPU) is statistics
    assert {there.inputs.device, there.input_moment.device, there.query_moment.device} == {fgpu}
    assert there.inputs is there.inputs  # copied once
    assert there.mixed_moments.device == CPU  # the largest: only requested ones are copied
    assert {there.mixed_triangle(1, 4).device, there.mixed_means().device, there.pooled_moment().device} == {fgpu}
    assert torch.equal(there.mixed_triangle(1, 4).cpu(), statistics.mixed_triangle(1, 4))
    assert there.sums_to_one == statistics.sums_to_one and there.tokens == statistics.tokens
    assert there.key_gram(heads).device == fgpu


def test_one_seed_draws_the_same_on_each_device(fgpu: torch.device) -> None:
    probabilities = torch.rand(200, 30, generator=torch.Generator().manual_seed(1)).softmax(-1)
    drawn = [
        draw_categories(probabilities.to(device), torch.Generator().manual_seed(2)).cpu() for device in (CPU, fgpu)
    ]
    assert torch.equal(*drawn)
    often = draw_categories(torch.tensor([0.7, 0.1, 0.2]).repeat(20_000, 1).to(fgpu), torch.Generator().manual_seed(0))
    shares = torch.bincount(often.cpu().flatten(), minlength=3) / 20_000
    torch.testing.assert_close(shares, torch.tensor([0.7, 0.1, 0.2]), atol=0.015, rtol=0)


def test_no_generator_is_made_on_a_device() -> None:
    """Random numbers of a result are drawn on the CPU: other devices draw other numbers from a seed."""
    root = Path(__file__).resolve().parents[2]
    created = re.compile(r"torch\.Generator\((?!\))")  # of any argument
    files = (path for room in ROOMS for path in sorted((root / room).rglob("*.py")))
    assert [str(path.relative_to(root)) for path in files if created.search(path.read_text())] == []
    assert created.search("torch.Generator(model.device)") and not created.search("torch.Generator()")
