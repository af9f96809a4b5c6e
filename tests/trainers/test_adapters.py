"""LoRA on real models in the real DeepSpeed engine: what is adapted, what is trained, and that merging is exact."""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from parameters import extended
from torch import Tensor, nn

from attention.conversion.convert import build, convert
from attention.families import families, geometry_of
from attention.io import checkpoint
from attention.modeling.shared_weights import sharing_modules
from attention.plan import AttentionPlan, Composition, HeadShare, LayerPlan
from trainers.adapters import Adapters, adaptable, add_adapters
from trainers.engine import TrainEngine
from trainers.evaluation import evaluate
from trainers.jobs.worker import TrainJob
from trainers.loop import train_model
from trainers.losses import objective
from trainers.relaxations.stage import RelaxationSpec
from trainers.settings import TrainSettings
from trainers.text.data import BatchStream, write_sequences

STEPS = 6
UNEVEN = AttentionPlan((LayerPlan((0, 0, 1, 1), (0, 1, 1, 0)), LayerPlan((0, 1, 2, 3), (0, 0, 0, 0))), head_dim=8)
SHARES = (HeadShare(1, 1, 0, 3), HeadShare(2, 2, 0, 0))
SHARED = AttentionPlan((LayerPlan.identity(4),) * 3, 8, SHARES, mlp_shares=SHARES[:1])
LORA: dict[str, Any] = {"tuning": "lora", "lora_rank": 4, "learning_rate": 1e-2}


@pytest.fixture(scope="module")
def ids() -> Tensor:
    return torch.randint(0, 64, (20, 16), generator=torch.Generator().manual_seed(0))


@pytest.fixture
def engine() -> Iterator[Callable[..., TrainEngine]]:
    """Engines with LoRA, closed afterwards."""
    created: list[TrainEngine] = []

    def make(model: Any, **settings: Any) -> TrainEngine:
        created.append(TrainEngine(model, TrainSettings(**LORA | settings), STEPS))
        return created[-1]

    yield make
    for each in created:
        each.close()


def run(engine: TrainEngine, stream: BatchStream, start: int = 0, stop: int = STEPS) -> list[float]:
    losses: list[float] = []
    train_model(
        engine, stream, steps=stop, start_step=start, loss_fn=objective(), on_step=lambda _, x: losses.append(x)
    )
    return losses


def generator() -> torch.Generator:
    return torch.Generator().manual_seed(0)


def logits(model: Any, ids: Tensor) -> Tensor:
    with torch.no_grad():
        return model(ids).logits


def perturb(model: nn.Module) -> None:
    """Adapters that change something: as they start they are zero."""
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if ".lora_B." in name:
                parameter.normal_(std=0.1, generator=generator())


@pytest.mark.parametrize("plan", [None, UNEVEN], ids=["plain", "uneven"])
@pytest.mark.parametrize("family", families())
def test_every_family_takes_adapters_and_merges_them(
    tiny_model: Any, ids: Tensor, family: str, plan: AttentionPlan | None
) -> None:
    """All projections of a layer, fused or not, except experts and routers. Zero at first; once merged the same."""
    original = tiny_model(family)
    plain: Any = original if plan is None else convert(original, replace(plan, head_dim=original_head_dim(original)))
    adapted = copy.deepcopy(plain)
    adapters = add_adapters(adapted, 4, 8.0, generator())
    projections = {
        name
        for name, m in plain.named_modules()
        if hasattr(m, "weight") and m.weight.ndim == 2 and "layers." in name and not type(m).__name__.endswith("Router")
    } or {name for name, m in plain.named_modules() if ".h." in name and hasattr(m, "weight") and m.weight.ndim == 2}
    assert set(adapters.transposed) == projections
    assert {n.split(".lora_")[0] for n, p in adapted.named_parameters() if p.requires_grad} == projections
    torch.testing.assert_close(logits(adapted, ids), logits(plain, ids), atol=1e-6, rtol=0)
    perturb(adapted)
    merged = copy.deepcopy(plain)
    merged.load_state_dict(merged_state(adapters, adapted))
    assert (logits(adapted, ids) - logits(plain, ids)).abs().max() > 0.05
    torch.testing.assert_close(logits(merged, ids), logits(adapted, ids), atol=1e-4, rtol=1e-4)


def merged_state(adapters: Adapters, model: Any) -> dict[str, Tensor]:
    state = model.state_dict()
    sources = adapters.sources(state)
    return {name: adapters.merged(name, [state[part] for part in parts]) for name, parts in sources.items()}


def original_head_dim(model: Any) -> int:
    return geometry_of(model.config).head_dim


def plain_torch(model: Any, ids: Tensor, settings: TrainSettings) -> tuple[list[float], Adapters]:
    """The same training without DeepSpeed."""
    adapters = add_adapters(model, settings.lora_rank, settings.lora_alpha, generator())
    trained = [p for p in model.parameters() if p.requires_grad]
    optimizer = torch.optim.AdamW(trained, weight_decay=settings.weight_decay)
    stream, losses, loss_fn = BatchStream(ids, 8), [], objective()
    for step in range(STEPS):
        for group in optimizer.param_groups:
            group["lr"] = settings.rate(step, STEPS)
        loss = loss_fn(model.train(), stream.next())
        loss.backward()
        torch.nn.utils.clip_grad_norm_(trained, settings.max_grad_norm)
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    return losses, adapters


@pytest.mark.parametrize("stage", [0, extended(1), extended(2), 3])
def test_trains_as_plain_torch_does_and_nothing_else_moves(
    engine: Any, tiny_model: Any, ids: Tensor, stage: int
) -> None:
    model = convert(tiny_model("llama"), UNEVEN)
    reference: Any = copy.deepcopy(model)
    built = engine(copy.deepcopy(model), zero_stage=stage)
    expected, adapters = plain_torch(reference, ids, built.settings)
    losses = run(built, BatchStream(ids, 8))
    assert losses == pytest.approx(expected, abs=1e-4)
    assert expected[0] - expected[-1] > 0.3
    weights, before = built.weights(), model.state_dict()
    for name, tensor in merged_state(adapters, reference).items():
        torch.testing.assert_close(weights[name], tensor, atol=3e-4, rtol=0)
    moved = {name for name, tensor in before.items() if not torch.equal(tensor, weights[name])}
    assert moved == {f"{name}.weight" for name in adaptable(model)}
    model.load_state_dict(weights)
    assert evaluate(model, ids).loss == pytest.approx(evaluate(built.model, ids).loss, abs=1e-5)


def test_only_adapters_have_optimiser_state(engine: Any, tiny_model: Any, ids: Tensor) -> None:
    model = convert(tiny_model("llama"), UNEVEN)
    adapter_sizes = sum(4 * sum(m.weight.shape) for m in adaptable(model).values())
    for stage in (0, 2):
        built = engine(copy.deepcopy(model), zero_stage=stage)
        run(built, BatchStream(ids, 8), 0, 1)
        state = built._engine.optimizer.state if stage == 0 else built._engine.optimizer.optimizer.state
        assert sum(each["exp_avg"].numel() for each in state.values()) == adapter_sizes


@pytest.mark.extended
@pytest.mark.parametrize(
    ("stage", "dtype"),
    [
        (0, "float32"),
        extended(2, "float32"),
        extended(3, "float32"),
        extended(2, "bfloat16"),
        (3, "bfloat16"),
    ],
)
def test_resuming_is_exact(engine: Any, tiny_model: Any, ids: Tensor, tmp_path: Path, stage: int, dtype: str) -> None:
    model = convert(tiny_model("llama"), UNEVEN)
    kind = {"zero_stage": stage, "dtype": dtype}
    if dtype == "bfloat16":
        model = model.to(torch.bfloat16)  # type: ignore[arg-type]
    whole = engine(copy.deepcopy(model), **kind)
    expected = run(whole, BatchStream(ids, 8))
    first, stream = engine(copy.deepcopy(model), **kind), BatchStream(ids, 8)
    head = run(first, stream, 0, 3)
    first.save(tmp_path, {"stream": stream.state_dict()})
    second, resumed = engine(copy.deepcopy(model), **kind), BatchStream(ids, 8)
    resumed.load_state_dict(second.load(tmp_path)["stream"])
    assert head + run(second, resumed, second.steps_done) == expected
    assert all(torch.equal(t, second.weights()[name]) for name, t in whole.weights().items())
    assert expected[0] - expected[-1] > 0.2
    with pytest.raises(ValueError, match=r"'lora_rank': 4.*'lora_rank': 2"):
        engine(copy.deepcopy(model), **kind, lora_rank=2).load(tmp_path)
    with pytest.raises(ValueError, match=r"'tuning': 'lora'.*start from the finished weights"):
        engine(copy.deepcopy(model), **kind, tuning="full").load(tmp_path)


@pytest.mark.parametrize("stage", [extended(1), 3])
def test_shared_heads_stay_shared_under_lora(engine: Any, tiny_model: Any, ids: Tensor, stage: int) -> None:
    """Neither lenders nor borrowers are adapted; all else is, and merging is exact."""
    model: Any = convert(tiny_model("llama", num_hidden_layers=3), SHARED)
    shared = sharing_modules(model)
    assert shared and not shared & set(adaptable(model))
    built = engine(copy.deepcopy(model), zero_stage=stage)
    losses = run(built, BatchStream(ids, 8))
    assert losses[-1] < losses[0] - 0.1
    weights = built.weights()
    assert all(torch.equal(t, weights[n]) for n, t in model.state_dict().items() if n.rpartition(".")[0] in shared)
    model.load_state_dict(weights)
    assert evaluate(model, ids).loss == pytest.approx(evaluate(built.model, ids).loss, abs=1e-5)


def test_composition_trains_with_the_adapters(engine: Any, tiny_model: Any, ids: Tensor) -> None:
    model = convert(tiny_model("llama"), replace(UNEVEN, composition=Composition()))
    built = engine(copy.deepcopy(model))
    run(built, BatchStream(ids, 8))
    weights = built.weights()
    moved = {name for name, t in model.state_dict().items() if not torch.equal(t, weights[name])}
    composed = {name for name in weights if ".composition." in name}
    assert moved == composed | {f"{name}.weight" for name in adaptable(model)}


def test_what_cannot_be_merged_is_refused(tiny_model: Any) -> None:
    class Odd(nn.Linear):
        pass

    model: Any = build(tiny_model("llama").config, UNEVEN)
    model.model.layers[1].mlp.up_proj = Odd(32, 48)
    with pytest.raises(ValueError, match=r"model.layers.1.mlp.up_proj is a Odd.*use tuning=full"):
        add_adapters(model, 4, 8.0, generator())
    assert all(p.requires_grad for p in model.parameters())


def test_relaxations_train_fully(tiny_model: Any) -> None:
    lora = TrainSettings(tuning="lora")
    with pytest.raises(ValueError, match="its tuning must be full, got 'lora'"):
        RelaxationSpec("lagrangian", (UNEVEN.to_json(),), 5, {}, lora)
    spec = RelaxationSpec("lagrangian", (UNEVEN.to_json(),), 5)
    job = TrainJob("m", "t", "e", "/o", "/s", "r", (5,), lora, relaxation=spec)
    assert (job.settings.tuning, job.relaxation_settings.tuning) == ("lora", "full")


@pytest.mark.parametrize("wrong", [{"lora_rank": 0}, {"lora_alpha": 0}, {"tuning": "half"}])
def test_impossible_settings_are_refused(wrong: dict[str, Any]) -> None:
    with pytest.raises(ValueError, match=next(iter(wrong))):
        TrainSettings(**wrong)


@pytest.mark.parametrize("workers", [1, extended(2)])
def test_a_job_writes_a_plain_checkpoint(on_group: Any, tiny_model: Any, tmp_path: Path, workers: int) -> None:
    """Through Ray Train; ZeRO 3, a relaxation before it, and the held-out loss of the written weights."""
    sequences = (torch.randint(0, 64, (60, 1), generator=generator()) + 3 * torch.arange(32)) % 64
    write_sequences(sequences[:40], tmp_path / "train")
    write_sequences(sequences[40:], tmp_path / "eval")
    checkpoint.save(tiny_model("llama"), tmp_path / "model")
    job = TrainJob(
        model_dir=str(tmp_path / "model"),
        train_file=str(tmp_path / "train"),
        eval_file=str(tmp_path / "eval"),
        out_dir=str(tmp_path / "out"),
        storage_path=str(tmp_path / "store"),
        run_name="lora",
        milestones=(5, 20),
        settings=TrainSettings(**LORA, num_workers=workers, zero_stage=3, cpus_per_worker=0.4),
        relaxation=RelaxationSpec("lagrangian", (UNEVEN.to_json(),), 5),
        max_failures=0,
    )
    metrics = on_group(job)
    trained, collapsed = checkpoint.load(job.out_dir), checkpoint.load(metrics["relaxed_dir"])
    assert checkpoint.plan_of(trained) == UNEVEN
    assert set(trained.state_dict()) == set(collapsed.state_dict())
    assert metrics["loss"] == pytest.approx(evaluate(trained, sequences[40:]).loss, abs=1e-4)
    assert metrics["loss"] < metrics["collapsed_loss"] - 0.3
    assert torch.equal(trained.get_input_embeddings().weight, collapsed.get_input_embeddings().weight)  # type: ignore[arg-type]
