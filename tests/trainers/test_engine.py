"""The real DeepSpeed engine in this process, a group of one: against plain torch, at every ZeRO stage."""

from __future__ import annotations

import copy
import gc
import math
import os
import weakref
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from decay import groups_by_decay
from deepspeed.accelerator import get_accelerator, real_accelerator
from parameters import extended
from torch import Tensor

from attention.conversion.convert import convert
from attention.plan import AttentionPlan, LayerPlan
from trainers.deepspeed_config import DECAY, LAYOUT, decays_everything
from trainers.engine import TrainEngine, _step_seed
from trainers.evaluation import evaluate
from trainers.loop import TrainingDiverged, train_model
from trainers.losses import objective
from trainers.settings import TrainSettings
from trainers.text.data import BatchStream, load_sequences
from trainers.zero import computing_on

STEPS = 6
KINDS = [
    (1, "float32"),
    (3, "float32"),
    (2, "bfloat16"),
    extended(0, "float32"),
    extended(2, "float32"),
    extended(1, "bfloat16"),
    extended(3, "bfloat16"),
]
PLAN = AttentionPlan((LayerPlan((0, 0, 1, 1), (0, 1, 1, 0)), LayerPlan((0, 1, 2, 3), (0, 0, 0, 0))), head_dim=8)


def test_the_device_is_the_requested_one_whatever_was_found_before(monkeypatch: pytest.MonkeyPatch) -> None:
    """DeepSpeed looks once what there is, and would take a GPU by itself."""
    other = object()
    monkeypatch.setenv("DS_ACCELERATOR", "cuda")
    monkeypatch.setattr(real_accelerator, "ds_accelerator", other)
    with computing_on("cpu"):
        assert get_accelerator().device_name() == "cpu"
    with computing_on("cuda:1"):
        assert os.environ["DS_ACCELERATOR"] == "cuda" and os.environ["LOCAL_RANK"] == "1"
    assert get_accelerator() is other and os.environ["DS_ACCELERATOR"] == "cuda"


@pytest.fixture(scope="module")
def ids() -> Tensor:
    return torch.randint(0, 64, (20, 16), generator=torch.Generator().manual_seed(0))


@pytest.fixture
def engine(tiny_model: Any) -> Iterator[Callable[..., TrainEngine]]:
    """Engines on a converted tiny model with unequal key and value heads; closed afterwards."""
    created = []

    def make(
        model: Any = None,
        *,
        total_steps: int = STEPS,
        schedule_offset: int = 0,
        decay_everything: bool = False,
        **settings: Any,
    ) -> TrainEngine:
        model = convert(tiny_model("llama"), PLAN) if model is None else model
        chosen = TrainSettings(**{"learning_rate": 3e-3, **settings})
        options: Any = {"schedule_offset": schedule_offset, "decay_everything": decay_everything}
        created.append(TrainEngine(model, chosen, total_steps, **options))
        return created[-1]

    yield make
    for each in created:
        each.close()


def run(
    engine: TrainEngine, ids: Tensor, start: int = 0, stop: int = STEPS, stream: BatchStream | None = None
) -> list[float]:
    losses: list[float] = []
    stream = BatchStream(ids, 8) if stream is None else stream
    train_model(
        engine, stream, steps=stop, start_step=start, loss_fn=objective(), on_step=lambda _, x: losses.append(x)
    )
    return losses


def plain_torch(model: Any, ids: Tensor, settings: TrainSettings) -> list[float]:
    """The same training without DeepSpeed."""
    optimizer = torch.optim.AdamW(groups_by_decay(model, settings.weight_decay))
    stream, losses, loss_fn = BatchStream(ids, 8), [], objective()
    for step in range(STEPS):
        for group in optimizer.param_groups:
            group["lr"] = settings.rate(step, STEPS)
        loss = loss_fn(model, stream.next())
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), settings.max_grad_norm)
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    return losses


@pytest.mark.parametrize(("stage", "dtype"), KINDS)
def test_trains_as_plain_torch_does(engine: Any, tiny_model: Any, ids: Tensor, stage: int, dtype: str) -> None:
    model = convert(tiny_model("llama"), PLAN)
    built = engine(copy.deepcopy(model), zero_stage=stage, dtype=dtype)
    expected = plain_torch(model.train(), ids, built.settings)
    losses = run(built, ids)
    assert losses == pytest.approx(expected, abs=1e-4 if dtype == "float32" else 0.1)
    assert expected[0] - expected[-1] > 0.3  # so that a step of the wrong size would show
    weights = built.weights()
    assert set(weights) == set(model.state_dict())
    if dtype == "float32":
        for name, tensor in model.state_dict().items():
            torch.testing.assert_close(weights[name], tensor, atol=2e-4, rtol=0)


def test_the_norm_of_gradients_is_that_before_clipping(engine: Any, ids: Tensor) -> None:
    norms = []
    for stage in (0, 1):
        built = engine(zero_stage=stage)
        assert built.gradient_norm is None
        built.step(ids[:8], objective())
        norms.append(built.gradient_norm)
    assert norms[0] == pytest.approx(norms[1], rel=1e-4) and norms[0] > 0


def test_a_part_of_a_longer_training_takes_its_part_of_the_schedule(engine: Any, ids: Tensor) -> None:
    settings = TrainSettings(learning_rate=3e-3, warmup_fraction=0.25)
    built = engine(total_steps=12, schedule_offset=2, warmup_fraction=0.25)
    rates = []
    for _ in range(4):
        run(built, ids, 0, 1)
        rates.append(built._engine.optimizer.param_groups[0]["lr"])
    assert rates == [settings.rate(step, 12) for step in range(2, 6)]
    with pytest.raises(ValueError, match="schedule_offset <= total_steps, got 7 and 6"):
        engine(schedule_offset=7)


def test_a_separate_schedule_warms_up_where_a_training_resumes(engine: Any, ids: Tensor, tmp_path: Path) -> None:
    first = engine(total_steps=4)
    run(first, ids, 0, 4)
    first.save(tmp_path / "at-4")
    second = engine(total_steps=8, schedule_offset=-4, warmup_fraction=0.25)
    second.load(tmp_path / "at-4")
    rates = []
    for step in range(4, 8):
        rates.append(second.rate)
        run(second, ids, step, step + 1)
        assert second.last_rate == rates[-1] and (second.gradient_norm or 0) > 0
    assert rates == [second.settings.rate(step, 8) for step in range(4)]
    assert rates[0] < rates[1]


def test_the_betas_are_those_of_the_settings(engine: Any) -> None:
    for given, expected in (({}, (0.9, 0.999)), ({"beta2": 0.95}, (0.9, 0.95))):
        assert tuple(engine(**given)._engine.optimizer.param_groups[0]["betas"]) == expected


@pytest.mark.parametrize("stage", [0, 1, 2, 3])
def test_a_checkpoint_changes_neither_betas_nor_clipping(engine: Any, ids: Tensor, tmp_path: Path, stage: int) -> None:
    """A promotion continues a trial's optimiser by its own settings."""
    first = engine(zero_stage=stage)
    run(first, ids, stop=2)
    first.save(tmp_path, {})
    second = engine(zero_stage=stage, beta2=0.95, max_grad_norm=0.25)
    second.load(tmp_path)
    optimiser = second._engine.optimizer
    assert all(tuple(group["betas"]) == (0.9, 0.95) for group in optimiser.param_groups)
    assert second._engine.gradient_clipping() == 0.25
    assert getattr(optimiser, "clip_grad", 0.25) == 0.25


@pytest.mark.parametrize("stage", [0, 1, 2, 3])
def test_a_closed_engine_frees_its_optimiser_though_its_model_lives(
    engine: Any, tiny_model: Any, ids: Tensor, stage: int
) -> None:
    """Else the next engine starts with the moments of this one in memory."""
    model = convert(tiny_model("llama"), PLAN)
    closed = engine(model, zero_stage=stage)
    run(closed, ids, stop=1)
    moments = [weakref.ref(state["exp_avg"]) for state in closed._engine.basic_optimizer.state.values()]
    gc.disable()
    try:
        closed.close()
    finally:
        gc.enable()
    assert moments and all(moment() is None for moment in moments)
    assert model.get_input_embeddings() is not None


@pytest.mark.parametrize(
    ("stage", "family"), [(1, "qwen2"), (3, "gpt2"), extended(0, "gpt_oss"), extended(2, "opt"), extended(3, "gpt_oss")]
)
def test_weight_decay_is_on_matrices_alone(engine: Any, tiny_model: Any, ids: Tensor, stage: int, family: str) -> None:
    """If no gradient flows a step is the decay: of matrices, and not of norms, biases, embeddings and sinks."""
    model = tiny_model(family)
    before = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    embeddings = {f"{name}.weight" for name, part in model.named_modules() if isinstance(part, torch.nn.Embedding)}
    tied = model.config.tie_word_embeddings
    rate, decay = 1e-2, 0.5
    built = engine(model, learning_rate=rate, warmup_fraction=0.0, weight_decay=decay, zero_stage=stage)
    built.step(ids[:8], lambda *batch: objective()(*batch) * 0)
    after = built.weights()
    trained = {name for name, _ in model.named_parameters()}
    shares = {}
    for name in trained:
        plain = before[name].ndim < 2 or name.endswith("bias") or name in embeddings
        shares[name] = 1 if plain else 1 - rate * decay
        torch.testing.assert_close(after[name], before[name] * shares[name], rtol=1e-5, atol=1e-7)
    assert set(shares.values()) == {1, 1 - rate * decay}
    assert tied or shares["lm_head.weight"] < 1


@pytest.mark.parametrize("stage", [1, extended(0), extended(2), extended(3)])
def test_a_checkpoint_from_before_resumes_as_it_was_begun(engine: Any, ids: Tensor, tmp_path: Path, stage: int) -> None:
    def former(**settings: Any) -> TrainEngine:
        return engine(zero_stage=stage, weight_decay=0.5, decay_everything=True, **settings)

    whole = run(former(), ids)
    first, stream = former(), BatchStream(ids, 8)
    head = run(first, ids, 0, 3, stream)
    first.save(tmp_path)
    layout = (tmp_path / LAYOUT).read_text()
    assert DECAY not in layout and decays_everything(layout)
    with pytest.raises(ValueError, match="written with .*, these settings are .*matrices"):
        engine(zero_stage=stage, weight_decay=0.5).load(tmp_path)
    second = former()
    second.load(tmp_path)
    assert head + run(second, ids, 3, STEPS, stream) == whole
    assert whole != run(engine(zero_stage=stage, weight_decay=0.5), ids)
    engine(zero_stage=stage).save(tmp_path / "now")
    assert not decays_everything((tmp_path / "now" / LAYOUT).read_text())


@pytest.mark.parametrize("micro_batch_size", [1, 4])
def test_accumulated_passes_are_one_step(engine: Any, ids: Tensor, micro_batch_size: int) -> None:
    assert run(engine(micro_batch_size=micro_batch_size), ids) == pytest.approx(run(engine(), ids), abs=1e-4)


@pytest.mark.parametrize(
    ("stage", "dtype"), [extended(0, "float32"), (1, "float32"), extended(2, "bfloat16"), (3, "bfloat16")]
)
def test_resuming_is_exact(engine: Any, ids: Tensor, tmp_path: Path, stage: int, dtype: str) -> None:
    whole = run(engine(zero_stage=stage, dtype=dtype), ids)
    first, stream = engine(zero_stage=stage, dtype=dtype), BatchStream(ids, 8)
    head = run(first, ids, 0, 3, stream)
    first.save(tmp_path, {"stream": stream.state_dict(), "note": "x"})
    second, resumed = engine(zero_stage=stage, dtype=dtype), BatchStream(ids, 8)
    state = second.load(tmp_path)
    resumed.load_state_dict(state["stream"])
    assert state["note"] == "x"
    assert head + run(second, ids, second.steps_done, STEPS, resumed) == whole


def test_dropout_after_a_resume_is_what_it_would_have_been(
    engine: Any, tiny_model: Any, ids: Tensor, tmp_path: Path
) -> None:
    model = tiny_model("llama", attention_dropout=0.3)
    whole = run(engine(copy.deepcopy(model)), ids)
    first, stream = engine(copy.deepcopy(model)), BatchStream(ids, 8)
    run(first, ids, 0, 3, stream)
    first.save(tmp_path)
    torch.rand(7)
    second = engine(copy.deepcopy(model))
    second.load(tmp_path)
    assert run(second, ids, 3, STEPS, stream) == whole[3:]
    assert whole != run(engine(tiny_model("llama")), ids)


def test_every_seed_that_settings_allow_can_be_trained_with(engine: Any, ids: Tensor) -> None:
    seeds = [281_469_837, 2**32 - 1]  # of the first the product fits into 64 bits, as of all before it
    for seed in seeds:
        assert run(engine(seed=seed), ids, 0, 1) == run(engine(), ids, 0, 1)  # nothing is random here
    assert _step_seed(3, 7, 1) == (3 * 1_000_003 + 7) * 65_537 + 1
    assert len({_step_seed(seed, step, 0) for seed in seeds for step in range(9)}) == 18


def test_another_split_over_workers_is_refused(engine: Any, ids: Tensor, tmp_path: Path) -> None:
    engine(zero_stage=1).save(tmp_path)
    with pytest.raises(ValueError, match=r"written with .*'zero_stage': 1.*start from the finished weights"):
        engine(zero_stage=2).load(tmp_path)
    with pytest.raises(ValueError, match=r"found no layout\.json"):
        engine().load(tmp_path / "none")


def test_divergence_is_an_error_and_leaves_the_weights(engine: Any, ids: Tensor) -> None:
    built = engine()
    before = {k: v.clone() for k, v in built.weights().items()}
    with pytest.raises(TrainingDiverged, match=r"step 1 of 6 is nan; lower learning_rate"):
        train_model(built, BatchStream(ids, 8), steps=STEPS, loss_fn=lambda *batch: objective()(*batch) * math.nan)
    assert all(torch.equal(v, before[k]) for k, v in built.weights().items())
    assert built.steps_done == 0


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_gradients_that_stay_without_a_norm_are_divergence(
    engine: Any, tiny_model: Any, ids: Tensor, dtype: str
) -> None:
    """DeepSpeed leaves such steps out: without this the untrained weights would come out as trained."""
    model, steps = tiny_model("llama"), iter([True, False, True, True, True])
    model.model.norm.weight.register_hook(lambda gradient: gradient * math.nan if next(steps) else gradient)
    built, losses = engine(model, zero_stage=1, dtype=dtype), []
    with pytest.raises(TrainingDiverged, match="step 5 of 6 is nan"):
        losses = run(built, ids)
    assert not losses and next(steps, None) is None


@pytest.mark.parametrize("micro_batch_size", [1, 2, 4])
def test_the_mean_over_answers_is_that_of_the_whole_step(engine: Any, ids: Tensor, micro_batch_size: int) -> None:
    """However its sequences are divided: some pieces have no answer, which counts as none."""

    def answers(batch: Tensor) -> Tensor:
        return (batch < 24) & (batch[:, :1] % 2 == 0)

    counts = [int(answers(row[None])[:, 1:].sum()) for row in ids[:8]]
    assert 0 in counts and max(counts) > min(filter(None, counts))
    built, whole = (engine(micro_batch_size=rows, zero_stage=0) for rows in (micro_batch_size, 8))
    for _ in range(3):
        loss = built.step(ids[:8], objective(answers=answers))
        assert loss == pytest.approx(whole.step(ids[:8], objective(answers=answers)), abs=1e-4)


def test_a_wrong_world_or_batch_is_refused(engine: Any, ids: Tensor) -> None:
    with pytest.raises(ValueError, match="num_workers 2, the group has 1"):
        engine(num_workers=2)
    with pytest.raises(ValueError, match="a worker takes 8 / 1 sequences per step, got 4"):
        engine(micro_batch_size=4).step(ids[:4], objective())


def test_fine_tuning_recovers_the_demo_model_after_fusing(engine: Any, demo_model: Any, demo_tokenizer: Any) -> None:
    pairs = tuple(h // 2 for h in range(8))
    plan = AttentionPlan((LayerPlan(pairs, pairs),) * 4, head_dim=32)
    settings: dict[str, Any] = {"tokens": 4096, "sequence_length": 64}
    text = load_sequences("stdlib", demo_tokenizer, split="train", **settings)
    cached = load_sequences("stdlib", demo_tokenizer, split="eval", **settings)[::4]
    built = engine(convert(demo_model, plan), learning_rate=1e-3)
    before = evaluate(built.model, cached).loss
    milestones: list[tuple[int, float]] = []
    train_model(
        built,
        BatchStream(text, 8),
        steps=STEPS,
        loss_fn=objective("kl", 0.5, demo_model),
        milestones=(3, 6),
        on_milestone=lambda step, loss: milestones.append((step, loss)),
    )
    assert evaluate(built.model, cached).loss < before - 0.3
    assert [step for step, _ in milestones] == [3, 6]
    assert milestones[1][1] < milestones[0][1]
