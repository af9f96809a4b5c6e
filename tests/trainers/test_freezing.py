"""Training keys and values alone: what is frozen in every family, and that only they move and have optimiser state."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from torch import Tensor

from attention.conversion.convert import convert
from attention.families import families, family_of, geometry_of
from attention.plan import AttentionPlan, HeadShare, LayerPlan
from trainers.deepspeed_config import layout_of
from trainers.engine import TrainEngine
from trainers.freezing import freeze_all_but_keys_and_values, key_value_parameters
from trainers.loop import train_model
from trainers.losses import objective
from trainers.settings import TrainSettings
from trainers.text.data import BatchStream

MAPS = (LayerPlan((0, 0, 1, 1), (0, 1, 1, 0)), LayerPlan((0, 1, 2, 3), (0, 0, 0, 0)))


def plan(model: Any) -> AttentionPlan:
    return AttentionPlan(MAPS, geometry_of(model.config).head_dim)


@pytest.mark.parametrize("family", families())
def test_in_every_family_only_what_makes_keys_and_values_is_left(tiny_model: Any, family: str) -> None:
    """In the uneven form, in which no family fuses its projections: changing the trained tensors changes keys and
    values alone, and all of them are among the trained tensors."""
    original = tiny_model(family)
    model: Any = convert(original, plan(original))
    freeze_all_but_keys_and_values(model)
    before, geometry = copy.deepcopy(model), geometry_of(model.config)
    trained = [p for p in model.parameters() if p.requires_grad]
    assert sum(p.numel() for p in trained) < key_value_parameters(geometry)
    with torch.no_grad():
        for parameter in trained:
            parameter.add_(1.0)
    modules = family_of(model.config).attention_modules
    for new, old in zip(modules(model), modules(before), strict=True):
        now, then = (family_of(model.config).read(module, geometry) for module in (new, old))
        for name in ("k", "v"):
            assert bool(((getattr(now, name) - getattr(then, name)) - 1.0).abs().max() < 1e-5), name
        assert torch.equal(now.q, then.q)
        assert torch.equal(now.o, then.o)


def test_a_fused_projection_is_trained_whole(tiny_model: Any) -> None:
    model = tiny_model("gpt_neox")
    freeze_all_but_keys_and_values(model)
    names = {name.rpartition(".")[0].rpartition(".")[2] for name, p in model.named_parameters() if p.requires_grad}
    assert names == {"query_key_value"}


def test_trains_and_nothing_else_moves_or_has_optimiser_state(tiny_model: Any) -> None:
    ids: Tensor = torch.randint(0, 64, (20, 16), generator=torch.Generator().manual_seed(0))
    settings = TrainSettings(tuning="kv", learning_rate=1e-2, batch_size=4)
    original = tiny_model("llama")
    model: Any = convert(original, plan(original))
    before, losses = {name: p.detach().clone() for name, p in model.named_parameters()}, list[float]()
    engine = TrainEngine(model, settings, 6)
    try:
        train_model(
            engine, BatchStream(ids, 4), steps=6, loss_fn=objective(), on_step=lambda _, loss: losses.append(loss)
        )
        after = engine.weights()
        cached = sum(p.numel() for group in engine._engine.optimizer.param_groups for p in group["params"])
    finally:
        engine.close()
    moved = {name for name, tensor in before.items() if not torch.equal(tensor, after[name])}
    assert moved == {name for name in before if "k_proj" in name or "v_proj" in name}
    assert cached == sum(before[name].numel() for name in moved)
    assert losses[-1] < losses[0]


def test_a_checkpoint_of_another_tuning_is_not_gone_on_with() -> None:
    layouts = [layout_of(TrainSettings(tuning=tuning)) for tuning in ("full", "lora", "kv")]
    assert all(layouts.count(layout) == 1 for layout in layouts)


def test_shared_heads_are_refused(tiny_model: Any) -> None:
    original = tiny_model("llama", num_hidden_layers=2)
    shares = (HeadShare(1, 1, 0, 3),)
    head_dim = geometry_of(original.config).head_dim
    shared = convert(original, AttentionPlan((LayerPlan.identity(4),) * 2, head_dim, shares))
    with pytest.raises(ValueError, match=r"tuning kv: layers of this model share heads.*use tuning=full"):
        freeze_all_but_keys_and_values(shared)
