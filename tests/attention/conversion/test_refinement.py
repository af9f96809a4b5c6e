"""Refinement: layers come closer to the original's, never further away, for every family and dtype."""

from __future__ import annotations

import copy
import math
from collections.abc import Callable, Iterable
from dataclasses import replace
from typing import Any

import pytest
import torch
from parameters import extended
from torch import Tensor
from transformers import PreTrainedModel

from attention.calibration.calibrate import calibrate
from attention.conversion.convert import convert
from attention.conversion.refinement.capture import recorded, split_held_out
from attention.conversion.refinement.healing import SideBySide, heal_layer, ridge_refit
from attention.conversion.refinement.local import FitTexts, LayerTask, at_a_step, fit_module, layer_error, shared_steps
from attention.conversion.refinement.original import Original
from attention.conversion.refinement.parallel import SMALL_LAYER, each_layer
from attention.conversion.refinement.refine import REFINEMENT, refine
from attention.conversion.refinement.windows import attended
from attention.families import families, family_of
from attention.modeling.running import Streams
from attention.plan import AttentionPlan, LayerPlan

FAMILIES = ["gemma2", "gpt2", "gpt_oss", "llama", "qwen3"]  # soft caps, learned positions, sinks, none, norms
MORE_FAMILIES = ["gemma", "gpt_neox", "mistral", "opt", "phi", "qwen2"]
PLAN = LayerPlan((0, 0, 1, 1), (0, 0, 0, 1))
QUICK = {"fit_steps": 100, "fit_rate": 0.3}
Tiny = Callable[..., PreTrainedModel]


@pytest.fixture(scope="module")
def tokens() -> Tensor:
    return torch.randint(0, 64, (200, 24), generator=torch.Generator().manual_seed(0))


def pair(tiny_model: Tiny, tokens: Tensor, family: str, plan: LayerPlan = PLAN, **more: object) -> tuple:
    model = tiny_model(family, **more).requires_grad_(False)
    calibration = calibrate(model, tokens)
    whole = AttentionPlan((plan, plan), 8)
    return model, convert(model, whole, fusion="least_squares", calibration=calibration).requires_grad_(False)


def weights(model: PreTrainedModel) -> dict[str, Tensor]:
    return {name: tensor.clone() for name, tensor in model.state_dict().items()}


@pytest.mark.parametrize("family", [*FAMILIES, *map(extended, MORE_FAMILIES)])
def test_every_family_comes_closer(family: str, tiny_model: Tiny, tokens: Tensor) -> None:
    original, converted = pair(tiny_model, tokens, family)
    before, untouched = weights(converted), weights(original)
    report = refine("fit_heal", original, converted, tokens, QUICK)
    assert [(fit.step, fit.layer) for fit in report] == [("fit", 0), ("fit", 1), ("heal", 0), ("heal", 1)]
    assert all(fit.after < 0.97 * fit.before for fit in report if fit.step == "fit")
    assert not any(p.requires_grad or p.grad is not None for p in converted.parameters())
    after = weights(converted)
    own = set(family_of(converted.config).attention_modules(converted))
    modules = [name for name, module in converted.named_modules() if module in own]
    changed = {name for name in after if not torch.equal(after[name], before[name])}
    assert changed and all(any(name.startswith(m) for m in modules) for name in changed)
    assert all(torch.equal(tensor, untouched[name]) for name, tensor in original.state_dict().items())


@pytest.mark.parametrize("name", REFINEMENT.names())
def test_the_same_seedless_call_gives_the_same_weights(name: str, tiny_model: Tiny, tokens: Tensor) -> None:
    original, first = pair(tiny_model, tokens, "llama")
    second = copy.deepcopy(first)
    knobs = QUICK if name == "fit_heal" else {}
    for model in (first, second):
        refine(name, original, model, tokens, knobs)
    assert all(torch.equal(tensor, second.state_dict()[key]) for key, tensor in first.state_dict().items())


@pytest.mark.parametrize("name", ["heal", "fit_heal"])
def test_nothing_is_kept_that_does_not_help(name: str, tiny_model: Tiny, tokens: Tensor) -> None:
    """An identity plan is exact already; with steps far too large a fit must fall back to where it began."""
    original, converted = pair(tiny_model, tokens, "llama", LayerPlan.identity(4))
    before = weights(converted)
    knobs = {"fit_steps": 8, "fit_rate": 100.0} if name == "fit_heal" else {}
    report = refine(name, original, converted, tokens, knobs)
    assert all(fit.after <= max(fit.before, 1e-10) for fit in report)
    with torch.no_grad():
        assert (original(tokens).logits - converted(tokens).logits).abs().max() < 1e-3
    if name == "fit_heal":
        assert not any(fit.improves for fit in report if fit.step == "fit")
        assert all(torch.equal(converted.state_dict()[key], t) for key, t in before.items() if "q_proj" in key)


@pytest.mark.parametrize("family", sorted(families()))
def test_a_window_gives_what_whole_sequences_do_there(family: str, tiny_model: Tiny, tokens: Tensor) -> None:
    """Outputs, and the gradients of the whole sequence from those of its windows."""
    _, converted = pair(tiny_model, tokens, family)
    original = tiny_model(family).requires_grad_(False)
    module = family_of(converted.config).attention_modules(converted)[1].requires_grad_(True)
    task = LayerTask.of(FitTexts.of(Original.of(original), tokens[:16], 8), 1)
    assert task.parts == [(0, 8), (8, 16), (16, 24)]

    def gradients(outputs: Iterable[tuple[Tensor, Tensor]]) -> dict[str, Tensor]:
        module.zero_grad()
        for output, target in outputs:
            (output - target).square().sum().backward()
        return {name: p.grad.clone() for name, p in module.named_parameters() if p.grad is not None}

    index, sequence = torch.tensor([3]), slice(3, 4)
    inputs, targets = task.inputs[sequence], task.targets[sequence]
    parts = [attended(module, task.example, inputs, *part) for part in task.parts]
    whole = at_a_step(module, replace(task, parts=[(0, 24)]), index)[0]
    torch.testing.assert_close(torch.cat(parts, 1), whole, atol=1e-5, rtol=1e-4)
    by_windows = gradients((p, targets[:, a:b]) for p, (a, b) in zip(parts, task.parts, strict=True))
    for name, expected in gradients([(whole, targets)]).items():
        torch.testing.assert_close(by_windows[name], expected, atol=1e-4, rtol=1e-3)


def test_fits_on_windows_end_as_low_as_fits_on_whole_sequences(tiny_model: Tiny, tokens: Tensor) -> None:
    """Three times as many steps on a third of the positions: the same tokens."""
    original, converted = pair(tiny_model, tokens, "llama")
    module = family_of(converted.config).attention_modules(converted)[0]
    result = []
    for positions, steps in ((8, 240), (24, 80)):
        task = LayerTask.of(FitTexts.of(Original.of(original), tokens, positions), 0)
        fitted = copy.deepcopy(module)
        before, after, work = fit_module(fitted, task, steps, 0.3, torch.Generator().manual_seed(0), shared_by=2)
        assert (len(task.parts), work.tokens) == (24 // positions, 80 * 24)
        result.append(after / before)
    assert result[0] < 1.02 * result[1] < 0.9


def test_layers_that_keep_all_heads_are_not_fitted(tiny_model: Tiny, tokens: Tensor) -> None:
    model = tiny_model("llama").requires_grad_(False)
    plan = AttentionPlan((PLAN, LayerPlan.identity(4)), 8)
    converted = convert(model, plan, fusion="least_squares", calibration=calibrate(model, tokens))
    fused, whole = (fit for fit in refine("fit_heal", model, converted, tokens, QUICK) if fit.step == "fit")
    assert fused.improves and fused.work.optimizer_steps == 100
    assert not whole.improves and whole.work.optimizer_steps == 0


def test_many_layers_share_the_steps_of_few() -> None:
    costs = [2.0**-i for i in range(16)]
    steps = shared_steps(720, costs)
    assert steps == sorted(steps, reverse=True) and steps[0] <= 2 * 720 and steps[-1] >= 60
    assert shared_steps(720, costs[:6]) == [720] * 6, "few layers are fitted alike"
    assert shared_steps(720, [0.1] * 30) == [180] * 30, "a quarter of the steps at least"
    assert shared_steps(720, [0.1] * 12) == [360] * 12, "6 x 720 steps in all"
    assert shared_steps(720, [0.1] * 12 + [0.0] * 10)[0] == 360, "layers that cost nothing take none"
    assert shared_steps(24, costs)[-1] == 24


def test_steps_go_to_the_layers_that_cost_most() -> None:
    """The sum of c n^(-1/3) is lower than with the same number of steps in each layer."""
    costs = [1.2**-i for i in range(24)]
    steps = shared_steps(720, costs)
    assert sum(steps) == pytest.approx(6 * 720, rel=0.1)
    expected = sum(c * n ** (-1 / 3) for c, n in zip(costs, steps, strict=True))
    assert expected < 0.97 * sum(c * (sum(steps) / 24) ** (-1 / 3) for c in costs)


def test_each_layer_makes_the_steps_it_is_given(tiny_model: Tiny, tokens: Tensor) -> None:
    original, converted = pair(tiny_model, tokens, "llama")
    fits = refine("fit_heal", original, converted, tokens, {"fit_rate": 0.3}, layer_steps=[12, 60])
    assert [fit.work.optimizer_steps for fit in fits if fit.step == "fit"] == [12, 60]


def test_a_fit_falls_back_to_the_best_state_it_met(tiny_model: Tiny, tokens: Tensor) -> None:
    original, converted = pair(tiny_model, tokens, "llama")
    module = family_of(converted.config).attention_modules(converted)[0]
    task = LayerTask.of(FitTexts.of(Original.of(original), tokens, 48), 0)
    before, after, work = fit_module(module, task, 12, 100.0, torch.Generator().manual_seed(0), shared_by=2)
    assert layer_error(module, task.check) == pytest.approx(after)
    assert after <= before
    assert work.optimizer_steps % 6 == 0 and 6 <= work.optimizer_steps <= 36, "half of the steps where they do not help"
    assert work.tokens == work.optimizer_steps * 2 * tokens.shape[1]
    assert work.flops == 6 * work.tokens * sum(p.numel() for p in module.parameters())


def test_queries_and_keys_take_larger_steps_the_more_heads_share_a_key(tiny_model: Tiny, tokens: Tensor) -> None:
    original, converted = pair(tiny_model, tokens, "qwen3")
    module = family_of(converted.config).attention_modules(converted)[0]
    task = LayerTask.of(FitTexts.of(Original.of(original), tokens), 0)

    def first_steps(shared_by: float) -> dict[str, float]:
        moved = copy.deepcopy(module)
        before, after, _ = fit_module(moved, task, 1, 1e-3, torch.Generator().manual_seed(0), shared_by=shared_by)
        assert after < before
        there = dict(module.named_parameters())
        return {name: float((p - there[name]).abs().max()) for name, p in moved.named_parameters()}

    by_two, by_eight = first_steps(2), first_steps(8)
    for name, step in by_two.items():
        more = 2 if name.startswith(("q_", "k_")) else 1
        assert by_eight[name] == pytest.approx(more * step, rel=0.01), name
    size = {name: float(p.square().mean().sqrt() / math.sqrt(p[0].numel())) for name, p in module.named_parameters()}
    for name, share in {"q_proj.weight": 1, "k_proj.weight": 1, "v_proj.weight": 0.5, "o_proj.weight": 0.5}.items():
        assert by_two[name] == pytest.approx(1e-3 * share * size[name], rel=0.01), name


def test_the_first_rate_of_wide_heads_follows_their_error(
    tiny_model: Tiny, tokens: Tensor, monkeypatch: pytest.MonkeyPatch
) -> None:
    """At most the root of the relative squared error; groups of the checkpoint's width take the rate unchanged."""
    original, converted = pair(tiny_model, tokens, "llama")
    module = family_of(converted.config).attention_modules(converted)[0]
    task = LayerTask.of(FitTexts.of(Original.of(original), tokens), 0)
    sizes: list[float] = []

    def note(module: Any, task: Any, steps: int, rates: Any, *args: Any) -> tuple[float, int]:
        sizes.append(max(rates.values()))
        return 0.0, steps

    monkeypatch.setattr("attention.conversion.refinement.local._train", note)
    for rate, wide in ((1e3, False), (1e3, True), (1e-3, False), (1e-3, True)):
        before = fit_module(module, task, 1, rate, torch.Generator(), shared_by=2, wide=wide)[0]
    assert sizes[1] / sizes[0] == pytest.approx(math.sqrt(before) / 1e3)
    assert sizes[2] == sizes[3]


def test_steps_that_are_too_large_are_made_smaller(tiny_model: Tiny, tokens: Tensor) -> None:
    original, converted = pair(tiny_model, tokens, "llama")
    report = refine("fit_heal", original, converted, tokens, {**QUICK, "fit_rate": 4.0})
    assert all(fit.improves for fit in report if fit.step == "fit")


def test_fused_values_alone_are_fitted_in_small_steps_from_the_first_try(tiny_model: Tiny, tokens: Tensor) -> None:
    """At any requested rate: every step is used."""
    plan = LayerPlan((0, 1, 2, 3), (0, 0, 1, 1))
    original, converted = pair(tiny_model, tokens, "llama", plan)
    report = refine("fit_heal", original, converted, tokens, {**QUICK, "fit_rate": 100.0})
    fits = [fit for fit in report if fit.step == "fit"]
    assert all(fit.improves and fit.after < fit.before for fit in fits)
    assert [fit.work.optimizer_steps for fit in fits] == [QUICK["fit_steps"]] * 2


def test_a_half_precision_model_is_fitted_in_single_precision(tiny_model: Tiny, tokens: Tensor) -> None:
    original, converted = pair(tiny_model, tokens, "llama", dtype=torch.bfloat16)
    report = refine("fit_heal", original, converted, tokens, QUICK)
    assert {p.dtype for p in converted.parameters()} == {torch.bfloat16}
    assert all(fit.after < 0.97 * fit.before for fit in report if fit.step == "fit")


def test_the_task_holds_what_the_layer_sees_and_gives(tiny_model: Tiny, tokens: Tensor) -> None:
    model = tiny_model("llama").requires_grad_(False)
    modules = family_of(model.config).attention_modules(model)
    task = LayerTask.of(FitTexts.of(Original.of(model), tokens, 96), 1)
    fit, check = split_held_out(tokens)
    assert task.batch == 4 and task.inputs.shape == (len(fit), 24, 32)
    whole = next(recorded(Streams(model, modules, fit[:4], 4), 1))
    torch.testing.assert_close(task.targets[:4], whole.output)
    assert sum(len(record.output) for record in task.check) == len(check)
    assert layer_error(modules[1], task.check) < 1e-12


@pytest.mark.parametrize("family", [*FAMILIES, *map(extended, MORE_FAMILIES)])
def test_a_refit_continues_with_what_the_healed_layer_does(family: str, tiny_model: Tiny, tokens: Tensor) -> None:
    """It knows the layer's output without a run: its streams are those of the converted model as it is then."""
    original, converted = pair(tiny_model, tokens, family)
    modules = family_of(converted.config).attention_modules(converted)
    fit, check = (
        SideBySide(Original(original).on(part), Streams(converted, modules, part, 8)) for part in split_held_out(tokens)
    )
    assert heal_layer(fit, check, 0, 0, 1e-3, 1.0).improves
    for both, part in ((fit, split_held_out(tokens)[0]), (check, split_held_out(tokens)[1])):
        assert both.converted.layer == 1
        afresh = recorded(Streams(converted, modules, part, 8), 1)
        for result, expected in zip(recorded(both.converted, 1), afresh, strict=True):
            torch.testing.assert_close(result.stream, expected.stream, atol=1e-4, rtol=1e-4)


def test_ridge_refit_is_least_squares_pulled_to_the_present_weights() -> None:
    generator = torch.Generator().manual_seed(0)
    z, y, w = (torch.randn(*s, generator=generator, dtype=torch.float64) for s in ((50, 6), (50, 3), (6, 3)))
    result = ridge_refit(w, z.T @ z, z.T @ y, 1e-12)
    torch.testing.assert_close(result, torch.linalg.lstsq(z, y).solution)
    torch.testing.assert_close(ridge_refit(w, z.T @ z, z.T @ y, 1e12), w)


def test_a_ridge_too_small_for_few_tokens_is_raised() -> None:
    """Rounded products of few tokens have negative eigenvalues, here of 1e-7 of the largest."""
    generator = torch.Generator().manual_seed(0)
    z, y, w = (torch.randn(*s, generator=generator, dtype=torch.float64) for s in ((20, 40), (20, 3), (40, 3)))
    zz = z.T @ z
    zz -= 1e-7 * torch.linalg.eigvalsh(zz)[-1] * torch.eye(40)
    result = ridge_refit(w, zz, z.T @ y, 1e-9)
    assert (z @ result - y).norm() < 1e-3 * (z @ w - y).norm()
    with pytest.raises(ValueError, match="not finite"):
        ridge_refit(w, zz * math.nan, z.T @ y, 1e-3)


def test_too_few_sequences_are_refused(tiny_model: Tiny, tokens: Tensor) -> None:
    original, converted = pair(tiny_model, tokens, "llama")
    for given in (None, tokens[:1]):
        with pytest.raises(ValueError, match="at least two calibration sequences"):
            refine("heal", original, converted, given)


def test_layers_side_by_side_are_those_one_after_the_other(tiny_model: Tiny, tokens: Tensor) -> None:
    original, one = pair(tiny_model, tokens, "llama", num_hidden_layers=2)
    other = copy.deepcopy(one)
    threads = torch.get_num_threads()
    alone = refine("fit_heal", original, one, tokens, QUICK)
    try:
        torch.set_num_threads(2)
        shared = refine("fit_heal", original, other, tokens, QUICK)
        assert torch.get_num_threads() == 2, "as it was"
    finally:
        torch.set_num_threads(threads)
    assert [(f.step, f.layer) for f in shared] == [(f.step, f.layer) for f in alone]
    for name, tensor in weights(one).items():
        torch.testing.assert_close(weights(other)[name], tensor, atol=1e-5, rtol=1e-4)


def test_an_error_in_one_layer_is_reported() -> None:
    threads = torch.get_num_threads()
    seen: list[int] = []

    def work(layer: int) -> int:
        seen.append(torch.get_num_threads())
        if layer == 1:
            raise ValueError("layer 1")
        return layer

    try:
        torch.set_num_threads(2)
        with pytest.raises(ValueError, match="layer 1"):
            each_layer(3, work, 10, torch.device("cpu"))
        assert torch.get_num_threads() == 2 and set(seen) == {1}
        seen.clear()
        assert each_layer(1, lambda i: torch.get_num_threads(), SMALL_LAYER + 1, torch.device("cpu")) == [2]
    finally:
        torch.set_num_threads(threads)
