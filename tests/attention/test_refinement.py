"""Refinement: what is captured, the ridge refit, and that no layer is made worse."""

import pytest
import torch
from torch import Tensor

from attention.conversion import convert, lift
from attention.families import families, family_of
from attention.plan import AttentionPlan, LayerPlan
from attention.refinement import REFINEMENT, RefinementReport, refine
from attention.refinement.capture import held_out, layer_of, run_to
from attention.refinement.healing import ridge_refit

HALF = AttentionPlan((LayerPlan((0, 0, 1, 1), (0, 0, 1, 1)),) * 2, 8)
CHANGES = [name for name in REFINEMENT.names() if name != "none"]


def tokens(rows: int = 16) -> Tensor:
    return torch.randint(64, (rows, 24), generator=torch.Generator().manual_seed(4))


def attention_error(original, converted, layer: int, sequences: Tensor) -> float:
    """Relative error of one attention layer's output when both models run from their own inputs."""
    records = zip(
        run_to(original, family_of(original.config).attention_modules(original)[layer], sequences, 4),
        run_to(converted, family_of(converted.config).attention_modules(converted)[layer], sequences, 4),
        strict=True,
    )
    wrong = power = 0.0
    for one, other in records:
        wrong += float((one.output - other.output).square().sum())
        power += float(one.output.square().sum())
    return wrong / power


def test_ridge_refit_worked_example() -> None:
    """One feature, one output: z = (1, 2), y = (3, 5), old weight 1, so V = (zy + p w) / (zz + p)."""
    zz, zy, weight = (torch.tensor([[x]], dtype=torch.float64) for x in (5.0, 13.0, 1.0))
    for ridge in (0.0, 0.5):
        penalty = ridge * 5
        assert ridge_refit(weight, zz, zy, ridge).item() == pytest.approx((13 + penalty) / (5 + penalty))


def test_ridge_refit_equals_stacked_least_squares() -> None:
    generator = torch.Generator().manual_seed(0)
    z, y, w = (torch.randn(s, generator=generator, dtype=torch.float64) for s in ((50, 6), (50, 3), (6, 3)))
    penalty = 0.1 * (z.T @ z).diagonal().mean()
    rows = torch.cat([z, penalty.sqrt() * torch.eye(6)]), torch.cat([y, penalty.sqrt() * w])
    slow = torch.linalg.lstsq(*rows).solution
    assert torch.allclose(ridge_refit(w, z.T @ z, z.T @ y, 0.1), slow, atol=1e-10)


def test_held_out_sequences_are_apart() -> None:
    fit, check = held_out(torch.arange(20)[:, None])
    assert check.flatten().tolist() == [7, 15] and len(fit) == 18
    assert [len(part) for part in held_out(torch.arange(2)[:, None])] == [1, 1]


@pytest.mark.parametrize("name", sorted(families()))
@torch.no_grad()
def test_capture_sees_what_the_model_computes(name: str, tiny_model) -> None:
    model = convert(tiny_model(name), HALF)
    module = family_of(model.config).attention_modules(model)[1]
    seen = {}
    hooks = (
        module.register_forward_hook(lambda m, a, out: seen.update(output=out[0] if isinstance(out, tuple) else out)),
        layer_of(model, module).register_forward_pre_hook(
            lambda m, a, k: seen.update(stream=a[0] if a else k["hidden_states"]), with_kwargs=True
        ),
    )
    model(tokens(3))
    for hook in hooks:
        hook.remove()
    (record,) = run_to(model, module, tokens(3), 8)
    assert torch.allclose(record.output, seen["output"], atol=1e-6)
    assert torch.allclose(record.stream, seen["stream"], atol=1e-6)
    heads = lift(model)[1]
    rebuilt = torch.einsum("bthd,hDd->btD", record.mixed.unflatten(2, (4, 8)), heads.o)
    rebuilt = rebuilt if heads.o_bias is None else rebuilt + heads.o_bias
    assert torch.allclose(rebuilt, record.output, atol=1e-4)
    assert model.config._attn_implementation == "headfold"


@pytest.mark.parametrize("part", CHANGES)
@pytest.mark.parametrize("name", sorted(families()))
def test_every_kept_change_lowers_the_held_out_error(name: str, part: str, tiny_model) -> None:
    original = tiny_model(name)
    converted = convert(original, HALF)
    first = attention_error(original, converted, 0, tokens())
    report = refine(part, original, converted, tokens())
    assert report.fits and any(fit.kept for fit in report.fits)
    assert attention_error(original, converted, 0, tokens()) < first
    assert all(p.grad is None for p in converted.parameters())


@pytest.mark.parametrize("part", CHANGES)
@torch.no_grad()
def test_a_perfect_conversion_is_left_as_it_is(part: str, tiny_model) -> None:
    original = tiny_model("llama")
    converted = convert(original, AttentionPlan.identity(2, 4, 8))
    refine(part, original, converted, tokens())
    assert torch.allclose(converted(tokens(2)).logits, original(tokens(2)).logits, atol=1e-3)


@torch.no_grad()
def test_none_changes_nothing(tiny_model) -> None:
    original = tiny_model("llama")
    converted = convert(original, HALF)
    before = converted(tokens(2)).logits
    assert refine("none", original, converted, None) == RefinementReport()
    assert torch.equal(converted(tokens(2)).logits, before)


def test_bad_input_is_refused(tiny_model) -> None:
    original = tiny_model("llama")
    converted = convert(original, HALF)
    with pytest.raises(ValueError, match="needs at least two calibration sequences, got 1"):
        refine("heal", original, converted, tokens(1))
    with pytest.raises(ValueError, match="got none"):
        refine("fit_heal", original, converted, None)
    with pytest.raises(ValueError, match="refinement must be one of .*'heal'.* got 'prayer'"):
        refine("prayer", original, converted, tokens())
    with pytest.raises(ValueError, match="has no setting 'speed'"):
        refine("heal", original, converted, tokens(), {"speed": 2})
