"""A converted model that shares weights with its original: the same numbers, and no second copy of shared weights."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from parameters import extended

from attention.conversion.convert import convert, lift
from attention.families import family_of
from attention.io.checkpoint import to_plain
from attention.io.precision import cast_weights, round_weights
from attention.plan import AttentionPlan, Composition, LayerPlan

UNEVEN = AttentionPlan((LayerPlan((0, 0, 1, 1), (0, 1, 1, 0)), LayerPlan((0, 1, 2, 3), (0, 0, 0, 0))), head_dim=8)
UNIFORM = AttentionPlan((LayerPlan((0, 1, 1, 0), (0, 1, 1, 0)),) * 2, head_dim=8)
COMPOSED = AttentionPlan(UNIFORM.layers, 8, composition=Composition())
IDS = torch.randint(0, 64, (2, 12), generator=torch.Generator().manual_seed(0))


@pytest.mark.parametrize(
    ("family", "plan"),
    [
        ("llama", UNEVEN),
        ("llama", COMPOSED),
        extended("qwen3", UNEVEN),
        extended("gpt2", UNEVEN),
        extended("gpt_neox", UNEVEN),
        extended("opt", UNEVEN),
        extended("gemma", UNEVEN),
        extended("phi", UNEVEN),
    ],
)
@torch.no_grad()
def test_it_is_the_same_model(tiny_model: Any, family: str, plan: AttentionPlan) -> None:
    original = tiny_model(family)
    before = {name: tensor.clone() for name, tensor in original.state_dict().items()}
    apart, shared = (convert(original, plan, share=share) for share in (False, True))
    assert apart.state_dict().keys() == shared.state_dict().keys()
    assert all(torch.equal(tensor, shared.state_dict()[name]) for name, tensor in apart.state_dict().items())
    assert torch.equal(apart(IDS).logits, shared(IDS).logits)
    theirs = {parameter.data_ptr() for parameter in original.parameters()}
    inside = {id(p) for module in family_of(shared.config).attention_modules(shared) for p in module.parameters()}
    for name, parameter in shared.named_parameters():
        assert (parameter.data_ptr() in theirs) == (id(parameter) not in inside), name
    assert not {parameter.data_ptr() for parameter in apart.parameters()} & theirs
    # Nothing that is done to it before it is written reaches the original
    round_weights(shared, torch.bfloat16)
    cast_weights(shared, torch.bfloat16)
    assert all(torch.equal(tensor, before[name]) for name, tensor in original.state_dict().items())


@torch.no_grad()
def test_a_plain_form_shares_weights_with_its_model(tiny_model: Any) -> None:
    converted = convert(tiny_model("llama"), UNIFORM)
    plain = to_plain(converted)
    assert torch.allclose(plain(IDS).logits, converted(IDS).logits, atol=1e-5)
    assert plain.get_input_embeddings().weight.data_ptr() == converted.get_input_embeddings().weight.data_ptr()


def test_weights_that_a_dtype_holds_stay_where_they_are(tiny_model: Any) -> None:
    model = tiny_model("llama").bfloat16().float()
    before = [parameter.data_ptr() for parameter in model.parameters()]
    round_weights(model, torch.bfloat16)
    assert before == [parameter.data_ptr() for parameter in model.parameters()]


def test_heads_are_lifted_one_layer_at_a_time(tiny_model: Any) -> None:
    from attention.conversion.convert import LiftedHeads

    model = tiny_model("llama", num_key_value_heads=2)
    lazy = LiftedHeads(model)
    assert len(lazy) == 2 and lazy[0] is lazy[0] and lazy[-1] is lazy[1]
    for ours, whole in zip(lazy, lift(model), strict=True):
        assert torch.equal(ours.k, whole.k) and torch.equal(ours.o, whole.o)
    with pytest.raises(IndexError):
        lazy[2]
