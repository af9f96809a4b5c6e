"""Shared heads in the real DeepSpeed engine: every ZeRO stage trains as plain torch does, and they stay shared."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from decay import groups_by_decay
from parameters import extended
from sizes import parameters
from zero_three import split_small_weights

from attention.conversion.convert import convert
from attention.io import checkpoint
from attention.plan import AttentionPlan, HeadShare, LayerPlan
from trainers.engine import TrainEngine
from trainers.loop import train_model
from trainers.losses import objective
from trainers.settings import TrainSettings
from trainers.text.data import BatchStream

STEPS = 4
# Layer 1 borrows and lends; layer 2 owns no head.
SHARES = (
    HeadShare(1, 1, 0, 3), HeadShare(1, 2, 0, 0),
    HeadShare(2, 0, 1, 0), HeadShare(2, 1, 0, 3), HeadShare(2, 2, 0, 1), HeadShare(2, 3, 0, 1),
)  # fmt: skip
PLAN = AttentionPlan((LayerPlan.identity(4),) * 3, 8, SHARES, mlp_shares=SHARES)


@pytest.mark.parametrize("stage", [extended(0), 1, extended(2), 3])
def test_trains_as_plain_torch_does(tiny_model: Any, tmp_path: Any, monkeypatch: Any, stage: Any) -> None:
    """Same losses and weights; saved and read back with every weight once."""
    split_small_weights(monkeypatch)
    ids = torch.randint(0, 64, (20, 16), generator=torch.Generator().manual_seed(0))
    start: Any = convert(tiny_model("llama", num_hidden_layers=3), PLAN)
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
    trained, losses = copy.deepcopy(start), []
    engine = TrainEngine(trained, settings, STEPS)
    try:
        assert stage < 3 or all(p.numel() == 0 for p in trained.parameters())
        stored = {"loss_fn": loss_fn, "on_step": lambda _, loss: losses.append(loss)}
        train_model(engine, BatchStream(ids, 8), steps=STEPS, start_step=0, **stored)
        weights = engine.weights()
    finally:
        engine.close()
    assert losses == pytest.approx(expected, abs=1e-4)
    for name, tensor in plain.state_dict().items():
        torch.testing.assert_close(weights[name], tensor, atol=3e-4, rtol=0)
    assert all(not torch.equal(t, weights[n]) for n, t in start.state_dict().items() if t.is_floating_point())
    start.load_state_dict(weights)
    back = checkpoint.load(checkpoint.save(start, tmp_path / "trained"))
    assert torch.equal(back(ids[:2]).logits, start(ids[:2]).logits) and parameters(back) == parameters(start)
