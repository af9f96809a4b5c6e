"""Relaxations in the real DeepSpeed engine: every ZeRO stage as plain torch, own rates, exact resuming."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from parameters import extended
from torch import Tensor
from zero_three import split_small_weights

from attention.plan import AttentionPlan, HeadShare, LayerPlan
from trainers.engine import TrainEngine
from trainers.loop import ParameterGroup, train_model
from trainers.losses import objective
from trainers.relaxations import RELAXATION_TRAINING
from trainers.relaxations.stage import relaxed_objective
from trainers.settings import TrainSettings
from trainers.text.data import BatchStream

STEPS = 20
GROUPED = AttentionPlan((LayerPlan((0, 0, 1, 0), (0, 1, 1, 0)), LayerPlan((0, 1, 2, 3), (0, 0, 0, 0))), head_dim=8)
SHARED = AttentionPlan((LayerPlan.identity(4),) * 2, 8, (HeadShare(1, 0, 0, 2),), mlp_shares=(HeadShare(1, 1, 0, 1),))
KNOBS = {"lagrangian": {"rate": 0.05}, "hard_concrete": {"rate": 0.3}, "pull_together": {"rate": 0.05}}
SOME_PARTS = [part.name if part.name == "hard_concrete" else extended(part.name) for part in RELAXATION_TRAINING]
KINDS = [
    (1, "float32"),
    (3, "float32"),
    extended(0, "float32"),
    extended(2, "float32"),
    extended(2, "bfloat16"),
    extended(3, "bfloat16"),
]


@pytest.fixture(scope="module")
def ids() -> Tensor:
    return torch.randint(0, 64, (20, 16), generator=torch.Generator().manual_seed(0))


@pytest.fixture
def make(tiny_model: Any, monkeypatch: pytest.MonkeyPatch) -> Iterator[Callable[..., tuple[Any, TrainEngine]]]:
    """`make(name, **settings) -> (relaxation, engine)`. With ZeRO 3 even the smallest parameter is split."""
    engines = []
    split_small_weights(monkeypatch)

    def build(name: str, **settings: Any) -> tuple[Any, TrainEngine]:
        part = RELAXATION_TRAINING.get(name)
        dtype = torch.bfloat16 if settings.get("dtype") == "bfloat16" else torch.float32
        plan = SHARED if "shares" in part.needs else GROUPED
        model = tiny_model("llama", attention_bias=True).to(dtype)
        relaxation = part(model, plan, steps=STEPS, **part.settings(KNOBS.get(name, {})))
        chosen = TrainSettings(learning_rate=3e-3, micro_batch_size=4, **settings)
        engines.append(TrainEngine(relaxation.model, chosen, STEPS, relaxation.parameter_groups()))
        return relaxation, engines[-1]

    yield build
    for engine in engines:
        engine.close()


def run(relaxation: Any, engine: TrainEngine, stream: BatchStream, start: int = 0, stop: int = STEPS) -> list[float]:
    losses: list[float] = []
    train_model(
        engine,
        stream,
        steps=stop,
        start_step=start,
        loss_fn=relaxed_objective(relaxation, objective(), lambda: engine.steps_done),
        on_step=lambda _, x: losses.append(x),
    )
    return losses


def plain_torch(relaxation: Any, ids: Tensor, settings: TrainSettings) -> list[float]:
    own = relaxation.parameter_groups()
    special = {id(p) for group in own for p in group.parameters}
    groups = [{"params": [p for p in relaxation.model.parameters() if id(p) not in special], "scale": 1.0}]
    for group in own:
        scale, decay = group.options(settings.learning_rate)
        groups.append({"params": list(group.parameters), "scale": scale, "weight_decay": decay})
    optimizer = torch.optim.AdamW(groups, weight_decay=settings.weight_decay)
    stream, losses, step = BatchStream(ids, 8), [], 0
    loss_fn = relaxed_objective(relaxation, objective(), lambda: step)
    relaxation.model.train()
    for step in range(STEPS):
        for group in optimizer.param_groups:
            group["lr"] = settings.rate(step, STEPS) * group["scale"]
        loss = loss_fn(relaxation.model, stream.next())
        loss.backward()
        torch.nn.utils.clip_grad_norm_(relaxation.model.parameters(), settings.max_grad_norm)
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    return losses


@pytest.mark.parametrize("name", SOME_PARTS)
@pytest.mark.parametrize(("stage", "dtype"), KINDS)
def test_every_zero_stage_trains_as_plain_torch(
    name: str, stage: int, dtype: str, make: Any, tiny_model: Any, ids: Tensor
) -> None:
    relaxation, engine = make(name, zero_stage=stage, dtype=dtype)
    part = RELAXATION_TRAINING.get(name)
    knobs = part.settings(KNOBS.get(name, {}))
    reference = part(tiny_model("llama", attention_bias=True), relaxation.plan, steps=STEPS, **knobs)
    expected = plain_torch(reference, ids, engine.settings)
    losses = run(relaxation, engine, BatchStream(ids, 8))
    assert losses == pytest.approx(expected, abs=2e-3 if dtype == "float32" else 0.1)
    weights = engine.weights()
    wide = tiny_model("llama", attention_bias=True).to(weights["lm_head.weight"].dtype)
    whole = part(wide, relaxation.plan, steps=STEPS, **part.settings())
    whole.model.load_state_dict(weights)
    for ours, theirs in zip(whole.collapse(), reference.collapse(), strict=True):
        atol = 2e-3 if dtype == "float32" else 0.15
        torch.testing.assert_close(ours.k, theirs.k, atol=atol, rtol=0)
        torch.testing.assert_close(ours.v, theirs.v, atol=atol, rtol=0)
    assert relaxation.metrics() == pytest.approx(reference.metrics(), abs=2e-3 if dtype == "float32" else 0.05)


@pytest.mark.parametrize("name", SOME_PARTS)
@pytest.mark.parametrize("stage", [extended(1), 3])
def test_resuming_gives_the_same_next_10_losses(name: str, stage: int, make: Any, ids: Tensor, tmp_path: Path) -> None:
    relaxation, engine = make(name, zero_stage=stage)
    stream = BatchStream(ids, 8)
    run(relaxation, engine, stream, 0, 10)
    engine.save(tmp_path, {"stream": stream.state_dict()})
    whole = run(relaxation, engine, stream, 10)
    relaxation, engine = make(name, zero_stage=stage)
    resumed = BatchStream(ids, 8)
    resumed.load_state_dict(engine.load(tmp_path)["stream"])
    assert engine.steps_done == 10
    assert run(relaxation, engine, resumed, 10) == whole


def test_groups_train_at_their_own_rate(make: Any, ids: Tensor) -> None:
    relaxation, engine = make("lagrangian", weight_decay=0.5)
    omega = relaxation.parameter_groups()[0].parameters[0]
    before = omega.detach().clone()
    run(relaxation, engine, BatchStream(ids, 8), 0, 1)
    moved = (omega.detach() - before).abs().max().item()
    rate = 0.05 * engine.settings.rate(0, STEPS) / engine.settings.learning_rate
    assert moved == pytest.approx(rate, rel=0.05)  # Adam's first step is one rate long, and nothing decays


def test_impossible_groups_are_refused(tiny_model: Any) -> None:
    stranger = torch.nn.Parameter(torch.zeros(1))
    with pytest.raises(ValueError, match="1 parameters of the groups are not parameters of the model"):
        TrainEngine(tiny_model("llama"), TrainSettings(), 5, [ParameterGroup((stranger,), 0.1)])
    with pytest.raises(ValueError, match="needs at least one parameter"):
        ParameterGroup((), 0.1)
    with pytest.raises(ValueError, match="must be above 0, got 0"):
        ParameterGroup((stranger,), 0)
    with pytest.raises(ValueError, match=r"shrink of a parameter group must lie in \[0, 1\], got 2"):
        ParameterGroup((stranger,), None, shrink=2)
