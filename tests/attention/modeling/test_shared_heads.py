"""Shared heads and MLP blocks: the same model as one with the heads copied by hand, with every weight stored once."""

import copy
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from sizes import file_bytes, parameters, resident_bytes, saved_parameters
from torch import nn
from transformers import LlamaConfig, LlamaForCausalLM

from attention.conversion.convert import assemble, convert, read_layers, unshare
from attention.conversion.refinement.refine import refine
from attention.families import families, family_of, geometry_of
from attention.io import checkpoint, export
from attention.modeling import mlp
from attention.modeling.model_classes import plan_of
from attention.modeling.shared_weights import (
    SharedColumns,
    SharedProjection,
    SharedRows,
    sharing_modules,
)
from attention.plan import AttentionPlan, HeadShare, LayerPlan, PlanError

# Layer 1 is borrower and lender; layer 2 borrows one head twice, and another out of order; layer 3 owns none.
SHARES = (
    HeadShare(1, 0, 0, 3), HeadShare(1, 2, 0, 1),
    HeadShare(2, 1, 0, 2), HeadShare(2, 2, 1, 3), HeadShare(2, 3, 0, 2),
    HeadShare(3, 0, 0, 0), HeadShare(3, 1, 1, 1), HeadShare(3, 2, 2, 0), HeadShare(3, 3, 0, 0),
)  # fmt: skip
LAYERS = (LayerPlan.identity(4),) * 4
HEADS = AttentionPlan(LAYERS, 8, SHARES)
BLOCKS = AttentionPlan(LAYERS, 8, mlp_shares=SHARES)
BOTH = AttentionPlan(LAYERS, 8, SHARES, mlp_shares=SHARES)
WITHOUT_BLOCKS = ("glm4_moe", "gpt2", "gpt_oss", "minimax_m2", "mixtral", "olmoe", "phi3", "qwen3_moe")
IDS = torch.arange(48).view(2, 24) * 5 % 64


def logits(model) -> torch.Tensor:
    with torch.no_grad():
        return model(IDS).logits


def four(tiny_model, name: str, **settings: Any) -> Any:
    return tiny_model(name, num_hidden_layers=4, **settings)


@torch.no_grad()
def copied_by_hand(model, plan: AttentionPlan):
    """A stock model in which every shared head is a copy of its source, written head by head."""
    model = copy.deepcopy(model)
    family, geometry = family_of(model.config), geometry_of(model.config)
    modules = family.attention_modules(model)
    for s in plan.shares:
        source, target = (family.read(modules[i], geometry).to(copy=True) for i in (s.source_layer, s.layer))
        for name in ("q", "k", "v", "q_bias", "k_bias", "v_bias"):
            if getattr(target, name) is not None:
                getattr(target, name)[s.head] = getattr(source, name)[s.source_head]
        family.write(modules[s.layer], target)
    for s in plan.mlp_shares:
        source, target = (mlp.mlp_sites(model)[i] for i in (s.source_layer, s.layer))
        size = source.neurons // plan.num_heads
        ours, theirs = (
            slice(s.head * size, (s.head + 1) * size),
            slice(s.source_head * size, (s.source_head + 1) * size),
        )
        for name in source.inputs:
            old, new = source.projection(name), target.projection(name)
            new.weight[ours] = old.weight[theirs]
            if new.bias is not None:
                new.bias[ours] = old.bias[theirs]
        target.projection(target.output).weight[:, ours] = source.projection(source.output).weight[:, theirs]
    return model


@pytest.mark.parametrize("kind", [SharedRows, SharedColumns])
@pytest.mark.parametrize("bias", [False, True])
@pytest.mark.parametrize("borrowed", [{1: 2}, {0: 1, 2: 1, 3: 0}, {0: 0, 1: 1, 2: 2, 3: 3}])
def test_forward_and_gradients_are_those_of_the_whole_weight(kind, bias: bool, borrowed: dict[int, int]) -> None:
    """17 features in 4 blocks of 4, one over; against one linear layer with a weight put together block by block."""
    torch.manual_seed(0)
    shape = (6, 17) if kind is SharedRows else (17, 6)
    lender = nn.Linear(*shape, bias=bias, dtype=torch.float64)
    shared = kind(lender, 4, 4, {ours: (lender, theirs) for ours, theirs in borrowed.items()})
    assert not [name for name, _ in shared.named_parameters() if "lender" in name]
    x = torch.randn(3, 5, shape[0], dtype=torch.float64)
    weight, place = [], 0
    cut = (lambda w, a, b: w[a:b]) if kind is SharedRows else (lambda w, a, b: w[:, a:b])
    for block in range(4):
        if block in borrowed:
            weight.append(cut(lender.weight, 4 * borrowed[block], 4 * borrowed[block] + 4))
        else:
            weight.append(cut(shared.own_weight, place, place + 4))
            place += 4
    weight = torch.cat([*weight, cut(shared.own_weight, place, place + 1)], kind.dim)
    assert torch.equal(shared.weight, weight) and shared.weight.shape == lender.weight.shape
    result, expected = shared(x), F.linear(x, weight, shared.bias)
    torch.testing.assert_close(result, expected)
    out = torch.randn_like(result)
    leaves = [*lender.parameters(), *shared.parameters()]
    theirs = torch.autograd.grad(expected, leaves, out, allow_unused=True)
    for a, b in zip(torch.autograd.grad(result, leaves, out, allow_unused=True), theirs, strict=True):
        torch.testing.assert_close(a, b)


@pytest.mark.parametrize("name", sorted(families()))
def test_logits_are_those_of_heads_copied_by_hand(name: str, tiny_model) -> None:
    model = four(tiny_model, name)
    try:
        mlp.mlp_sites(model)
        plan = BOTH
    except ValueError:  # mixtures of experts, and projections that are not separate linear layers
        plan = HEADS
        assert name in WITHOUT_BLOCKS
    shared: Any = convert(model, plan)
    expected: Any = copied_by_hand(model, plan)
    assert torch.allclose(logits(shared), logits(expected), atol=1e-4)
    assert not torch.allclose(logits(shared), logits(model), atol=1e-2)
    assert parameters(model) - parameters(shared) == saved_parameters(model, plan) > 0
    ids = shared.generate(IDS[:, :5], max_new_tokens=6, do_sample=False)
    assert torch.equal(ids, expected.generate(IDS[:, :5], max_new_tokens=6, do_sample=False))


# Queries, values and outputs have separate shares; keys share nothing.
APART = AttentionPlan(LAYERS, 8, query_shares=SHARES[:2], value_shares=SHARES[2:6], output_shares=SHARES[5:])
WITH_OUTPUT = AttentionPlan(LAYERS, 8, SHARES, output_shares=SHARES)


@pytest.mark.parametrize("name", ["llama", "opt", "gpt_neox", "phi"])
@pytest.mark.parametrize("plan", [APART, WITH_OUTPUT], ids=["apart", "with output"])
@torch.no_grad()
def test_projections_and_outputs_that_share_by_themselves(
    name: str, plan: AttentionPlan, tiny_model, tmp_path: Path
) -> None:
    model = four(tiny_model, name)
    copied = copy.deepcopy(model)
    family, geometry = family_of(model.config), geometry_of(model.config)
    modules = family.attention_modules(copied)
    for side in "qkvo":
        for s in plan.shares_of(side):
            source, target = (family.read(modules[i], geometry).to(copy=True) for i in (s.source_layer, s.layer))
            for part in (side, f"{side}_bias"):
                if part != "o_bias" and getattr(target, part) is not None:
                    getattr(target, part)[s.head] = getattr(source, part)[s.source_head]
            family.write(modules[s.layer], target)
    shared: Any = convert(model, plan)
    assert torch.allclose(logits(shared), logits(copied), atol=1e-4)
    assert not torch.allclose(logits(shared), logits(model), atol=1e-2)
    assert parameters(model) - parameters(shared) == saved_parameters(model, plan) > 0
    back = checkpoint.load(checkpoint.save(shared, tmp_path / "shared"))
    assert plan_of(back) == plan and torch.equal(logits(back), logits(shared))
    assert torch.allclose(logits(unshare(back)), logits(shared), atol=1e-4)


SEVEN = {"hidden_size": 4096, "intermediate_size": 11008, "num_hidden_layers": 32, "num_attention_heads": 32}
THIRTEEN = {"hidden_size": 5120, "intermediate_size": 13824, "num_hidden_layers": 40, "num_attention_heads": 40}


@pytest.mark.parametrize(
    ("sizes", "mlp", "remaining"),
    [
        (SEVEN, False, "6.09B of 6.74B"),
        (SEVEN, True, "4.80B of 6.74B"),  # the paper's table has 4.74B
        (THIRTEEN, False, "11.76B of 13.02B"),
        (THIRTEEN, True, "9.21B of 13.02B"),
    ],
)
def test_the_papers_share_of_the_parameters_of_a_llama_2(sizes: dict[str, int], mlp: bool, remaining: str) -> None:
    """Cao 2024, table "Statistics of Memory Reduction": 30 % of the heads, outputs too, and of the MLP's blocks."""
    config = LlamaConfig(**sizes, vocab_size=32000)
    with torch.device("meta"):
        model = LlamaForCausalLM(config)
    layers = heads = config.num_attention_heads
    many = round(0.3 * layers * heads)
    shares = tuple(HeadShare(layer, head, 0, head) for layer in range(1, layers) for head in range(heads))[:many]
    width = config.hidden_size // heads
    plan = AttentionPlan((LayerPlan.identity(heads),) * layers, width, shares)
    assert saved_parameters(model, plan) == many * 3 * width * config.hidden_size
    plan = replace(plan, output_shares=shares, mlp_shares=shares if mlp else ())
    whole = parameters(model)
    assert f"{(whole - saved_parameters(model, plan)) / 1e9:.2f}B of {whole / 1e9:.2f}B" == remaining


def test_outputs_of_a_gpt2_are_refused_and_a_refit_of_shared_ones(tiny_model) -> None:
    with pytest.raises(ValueError, match="output projections of gpt2 cannot be shared"):
        convert(four(tiny_model, "gpt2"), WITH_OUTPUT)
    with pytest.raises(PlanError, match="shares are of whole heads"):
        AttentionPlan(LAYERS, 8, SHARES, query_shares=SHARES)
    shared = convert(four(tiny_model, "llama"), WITH_OUTPUT)
    with pytest.raises(ValueError, match="9 heads that share theirs in other layers"):
        refine("heal", shared, shared, IDS)


def test_blocks_of_a_gpt2_are_refused(tiny_model) -> None:
    with pytest.raises(ValueError, match="gpt2.*cannot be shared.*attention heads only"):
        convert(four(tiny_model, "gpt2"), BLOCKS)


def test_what_is_left_over_when_heads_do_not_divide_the_mlp(tiny_model) -> None:
    """50 neurons in 4 blocks of 12: the last two are never shared."""
    model = four(tiny_model, "llama", intermediate_size=50)
    shared = convert(model, BLOCKS)
    assert torch.allclose(logits(shared), logits(copied_by_hand(model, BLOCKS)), atol=1e-4)
    assert parameters(model) - parameters(shared) == len(SHARES) * 12 * 3 * 32 == saved_parameters(model, BLOCKS)


@pytest.mark.parametrize("name", ["llama", "qwen2", "qwen3", "opt", "gpt_neox"])
def test_saved_once_and_read_back(name: str, tiny_model, tmp_path: Path) -> None:
    model = four(tiny_model, name)
    whole = file_bytes(checkpoint.save(convert(model, BOTH.unshared), tmp_path / "whole", plain=False))
    shared = convert(model, BOTH)
    folder = checkpoint.save(shared, tmp_path / "shared")
    back = checkpoint.load(folder)
    assert plan_of(back) == BOTH and torch.equal(logits(back), logits(shared))
    saved = 4 * saved_parameters(model, BOTH)
    assert abs(whole - file_bytes(folder) - saved) < 4096  # names and offsets in the headers
    assert resident_bytes(convert(model, BOTH.unshared)) - resident_bytes(back) == saved


def test_gradients_of_all_users_add_up(tiny_model) -> None:
    """The gradient of a lent head is the sum over the copies in a model where each layer has its own."""
    model = four(tiny_model, "llama")
    shared, apart = convert(model, HEADS), copied_by_hand(model, HEADS)
    each: Any
    for each in (shared, apart):
        each(IDS, labels=IDS).loss.backward()
    modules: Any = family_of(apart.config).attention_modules(apart)
    lent: Any = family_of(shared.config).attention_modules(shared)[0]
    grads = [m.v_proj.weight.grad.unflatten(0, (4, 8)) for m in modules]
    for head in range(4):
        users = [s for s in SHARES if (s.source_layer, s.source_head) == (0, head)]
        expected = sum((grads[s.layer][s.head] for s in users), grads[0][head])
        result = lent.v_proj.weight.grad.unflatten(0, (4, 8))[head]
        torch.testing.assert_close(result, expected, atol=1e-5, rtol=1e-4)


def test_copies_are_models_of_their_own(tiny_model) -> None:
    shared: Any = convert(four(tiny_model, "llama"), BOTH)
    other = copy.deepcopy(shared)
    before = logits(shared)
    with torch.no_grad():
        for parameter in other.parameters():
            parameter.zero_()
    assert torch.equal(logits(shared), before)
    borrowers = [module for module in other.modules() if isinstance(module, SharedProjection)]
    assert borrowers and not any(module.weight.any() for module in borrowers)  # what it borrows is its own
    assert logits(shared.to(torch.float64)).dtype == torch.float64


def test_sharing_can_be_undone_and_done_again(tiny_model) -> None:
    model = four(tiny_model, "phi")
    shared = convert(model, BOTH)
    whole = unshare(shared)
    assert not plan_of(whole).is_shared and parameters(whole) == parameters(model)
    assert torch.allclose(logits(whole), logits(shared), atol=1e-4)
    again = assemble(whole, BOTH, read_layers(whole))
    assert torch.equal(logits(again), logits(shared))
    assert unshare(whole) is whole


@pytest.mark.parametrize(("name", "target"), [("llama", "gqa"), ("qwen2", "gqa"), ("gpt_neox", "phi")])
def test_export_writes_shared_heads_out(name: str, target: str, tiny_model, tmp_path: Path) -> None:
    model = four(tiny_model, name)
    shared = convert(model, BOTH)
    report = export.export(checkpoint.save(shared, tmp_path / "shared"), target, tmp_path / "stock")
    assert report.exact and any("9 shared heads and 9 shared MLP blocks are written out" in n for n in report.notes)
    assert report.max_logit_difference < 1e-4 * max(report.max_logit, 1)


def test_adapters_know_which_projections_share(tiny_model) -> None:
    shared = convert(four(tiny_model, "llama"), AttentionPlan(LAYERS, 8, (HeadShare(2, 1, 1, 0),)))
    expected = {f"model.layers.{i}.self_attn.{p}_proj" for i in (1, 2) for p in "qkv"}
    assert sharing_modules(shared) == expected and sharing_modules(unshare(shared)) == set()


def test_layers_that_share_are_not_fitted_alone(tiny_model) -> None:
    """The output projection is each layer's own, so healing stays possible."""
    model = four(tiny_model, "llama")
    shared = convert(model, HEADS)
    tokens = torch.randint(0, 64, (6, 16), generator=torch.Generator().manual_seed(0))
    with pytest.raises(ValueError, match="trains each layer alone, and 9 heads"):
        refine("fit_heal", model, shared, tokens)
    before = [heads.q for heads in read_layers(shared)]
    refine("heal", model, shared, tokens)
    assert all(torch.equal(a, heads.q) for a, heads in zip(before, read_layers(shared), strict=True))


def test_plans_that_cannot_be() -> None:
    with pytest.raises(PlanError, match="layer 1: a shared head brings its own key.*not both"):
        AttentionPlan((LayerPlan.identity(2), LayerPlan((0, 0), (0, 0))), 8, (HeadShare(1, 0, 0, 0),))
    with pytest.raises(PlanError, match="mlp_shares.*outside 2 layers"):
        AttentionPlan((LayerPlan.identity(2),) * 2, 8, mlp_shares=(HeadShare(1, 2, 0, 0),))


def test_digests_without_mlp_shares_are_the_old_ones() -> None:
    assert "mlp_shares" not in HEADS.to_json()
    assert AttentionPlan.identity(2, 4, 8).digest == "fd4bc46a89bcbcca"
    assert AttentionPlan.from_json(BOTH.to_json()) == BOTH and BOTH.digest != HEADS.digest
