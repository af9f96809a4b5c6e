"""The Fisher metric of attention outputs: against a slow reference, a worked example, and measured loss increases."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from torch import Tensor
from transformers import PreTrainedModel

from attention.conversion.sensitivity import drawn_cost, expected_cost, output_metrics
from attention.families import family_of
from attention.modeling.predictions import Final, final

FAMILIES = ["gpt2", "gpt_neox", "llama", "mixtral", "olmo2", "qwen3"]


@pytest.fixture
def tokens() -> Tensor:
    return torch.from_numpy(np.random.default_rng(0).integers(0, 64, (3, 12)))


@pytest.mark.parametrize("family", FAMILIES)
def test_it_is_the_mean_outer_product_of_each_token_s_gradient(family: str, tiny_model, tokens: Tensor) -> None:
    """The reference adds a shift to one layer's output and differentiates by it, a sequence at a time."""
    model = tiny_model(family, num_hidden_layers=2)
    before = {name: p.requires_grad for name, p in model.named_parameters()}
    metrics = output_metrics(model, tokens, seed=3)
    assert {name: p.requires_grad for name, p in model.named_parameters()} == before
    assert all(p.grad is None for p in model.parameters())
    width = metrics[0].shape[0]
    for layer, module in enumerate(family_of(model.config).attention_modules(model)):
        generator, expected = torch.Generator().manual_seed(3), torch.zeros(width, width)
        for ids in tokens.split(2):
            shift = torch.zeros(*ids.shape, width, requires_grad=True)

            def shifted(_, __, output, shift: Tensor = shift):
                return (output[0] + shift, *output[1:]) if isinstance(output, tuple) else output + shift

            hook = module.register_forward_hook(shifted)
            cost = drawn_cost(final(model, ids), generator)
            (gradient,) = torch.autograd.grad(cost, shift)
            hook.remove()
            for token in gradient.flatten(0, 1):
                expected += torch.outer(token, token)
        torch.testing.assert_close(metrics[layer], expected / tokens.numel(), rtol=1e-4, atol=1e-7)


def test_two_logits_by_hand() -> None:
    """States that are the logits: the mean outer product tends to diag(p) - p p^T, here of p = (1/4, 3/4)."""
    states = torch.tensor([0.0, np.log(3.0)], dtype=torch.float32).expand(4000, 2, 2).clone().requires_grad_(True)
    cost = drawn_cost(Final(states, lambda rows: rows, 2), torch.Generator().manual_seed(0))
    (gradient,) = torch.autograd.grad(cost, states)
    rows = gradient[:, 0]  # the last token of a sequence predicts nothing
    assert torch.equal(gradient[:, 1], torch.zeros_like(rows))
    expected = torch.tensor([[3.0, -3.0], [-3.0, 3.0]]) / 16
    torch.testing.assert_close(rows.T @ rows / len(rows), expected, rtol=0.05, atol=0)


def test_the_cost_of_an_error_by_hand() -> None:
    metric = torch.tensor([[2.0, 0.0], [0.0, 4.0]])
    errors = [torch.tensor([[[1.0, 0.0], [0.0, 1.0]]]), torch.tensor([[[1.0, 1.0]]])]
    assert expected_cost(metric, errors) == pytest.approx((2 + 4 + 6) / 2 / 3)


@pytest.mark.extended
def test_a_small_error_costs_what_is_foretold(demo_model: PreTrainedModel, demo_tokens: Tensor) -> None:
    """KL of the demo model with noise of the shape of the output in one layer, within a factor of 1.6."""
    model = demo_model
    metrics = output_metrics(model, demo_tokens[:16])
    held_out = demo_tokens[16:24]
    with torch.no_grad():
        plain = model(held_out).logits.log_softmax(-1)
    for layer, module in enumerate(family_of(model.config).attention_modules(model)):
        errors: list[Tensor] = []
        generator = torch.Generator().manual_seed(layer)

        def noisy(_, __, output, errors: list[Tensor] = errors, generator: torch.Generator = generator):
            size = 0.1 * output[0].square().mean().sqrt()
            errors.append(size * torch.randn(output[0].shape, generator=generator))
            return (output[0] + errors[-1], *output[1:])

        hook = module.register_forward_hook(noisy)
        with torch.no_grad():
            changed = model(held_out).logits.log_softmax(-1)
        hook.remove()
        result = float((plain.exp() * (plain - changed)).sum(-1).mean())
        assert 1 / 1.6 < expected_cost(metrics[layer], errors) / result < 1.6, layer


def test_the_same_seed_gives_the_same_numbers(tiny_model, tokens: Tensor) -> None:
    model = tiny_model("llama")
    first, again, other = (output_metrics(model, tokens, seed=seed) for seed in (1, 1, 2))
    assert all(torch.equal(a, b) for a, b in zip(first, again, strict=True))
    assert not torch.equal(first[0], other[0])
    with pytest.raises(ValueError, match="at least 2 tokens, got 1"):
        output_metrics(model, tokens[:, :1])
