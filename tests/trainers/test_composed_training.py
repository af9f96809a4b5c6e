"""Composed heads in the real DeepSpeed engine: every ZeRO stage trains as plain torch does."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from decay import groups_by_decay
from parameters import extended

from attention.conversion.convert import convert
from attention.io import checkpoint
from attention.plan import AttentionPlan, Composition, LayerPlan
from trainers.engine import TrainEngine
from trainers.loop import train_model
from trainers.losses import objective
from trainers.settings import TrainSettings
from trainers.text.data import BatchStream

STEPS = 4
MAPS = (LayerPlan((0, 0, 1, 1), (0, 1, 1, 0)), LayerPlan((0, 1, 2, 3), (0, 0, 0, 0)))
SETTINGS = Composition(static_base=True, window=6)


@pytest.mark.extended
@pytest.mark.parametrize("stage", [extended(0), 1, extended(2), 3])
def test_trains_as_plain_torch_does(tiny_model: Any, tmp_path: Any, stage: int) -> None:
    """A retrofit from its identity start; afterwards it is saved, read back, and no longer the identity."""
    ids = torch.randint(0, 64, (20, 16), generator=torch.Generator().manual_seed(0))
    start = convert(tiny_model("llama"), AttentionPlan(MAPS, 8, (), SETTINGS))
    settings, loss_fn = TrainSettings(learning_rate=3e-3, zero_stage=stage), objective()
    plain, stream, expected = copy.deepcopy(start).train(), BatchStream(ids, 8), []
    optimizer = torch.optim.AdamW(groups_by_decay(plain, settings.weight_decay))
    for step in range(STEPS):
        for group in optimizer.param_groups:
            group["lr"] = settings.rate(step, STEPS)
        loss = loss_fn(plain, stream.next())
        loss.backward()
        torch.nn.utils.clip_grad_norm_(plain.parameters(), settings.max_grad_norm)
        optimizer.step()
        optimizer.zero_grad()
        expected.append(loss.item())
    engine, losses = TrainEngine(copy.deepcopy(start), settings, STEPS), []
    try:
        stored = {"loss_fn": loss_fn, "on_step": lambda _, loss: losses.append(loss)}
        train_model(engine, BatchStream(ids, 8), steps=STEPS, start_step=0, **stored)
        weights = engine.weights()
    finally:
        engine.close()
    assert losses == pytest.approx(expected, abs=1e-4)
    for name, tensor in plain.state_dict().items():
        torch.testing.assert_close(weights[name], tensor, atol=3e-4, rtol=0)
    moved = [n for n, t in start.state_dict().items() if "composition" in n and not torch.equal(t, weights[n])]
    assert len(moved) == sum("composition" in n for n in weights)
    start.load_state_dict(weights)
    back = checkpoint.load(checkpoint.save(start, tmp_path / "trained"))
    assert torch.equal(back(ids[:2]).logits, start(ids[:2]).logits)
