"""Training checkpoints on another number of workers, and batches that do not divide over them: the same training."""

from __future__ import annotations

from contextlib import closing
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from parameters import extended

from attention.io import checkpoint
from trainers.engine import TrainEngine
from trainers.loop import ParameterGroup
from trainers.losses import objective
from trainers.settings import TrainSettings
from trainers.text.data import BatchStream
from trainers.zero import load_trainable

HALF, ALL, ROWS = 3, 6, 6
IDS = torch.randint(0, 64, (40, 16), generator=torch.Generator().manual_seed(0))


def settings_of(workers: int, **settings: Any) -> TrainSettings:
    return TrainSettings(**{"learning_rate": 1e-2, "batch_size": ROWS, "num_workers": 6, **settings}).on(workers)


def work(
    rank: int, model: Path, settings: TrainSettings, until: int, load: Path | None, save: Path | None, own_rate: bool
) -> tuple[list[float], dict[str, Any], Any]:
    """Losses up to step `until`, the weights then (rank 0), and the step that a checkpoint was resumed from."""
    net = load_trainable(model, settings)
    bias = tuple(p for name, p in net.named_parameters() if name.endswith("norm.weight"))
    groups = [ParameterGroup(bias, 3e-2)] if own_rate else []
    with closing(TrainEngine(net, settings, ALL, groups)) as engine:
        stream = BatchStream(IDS, ROWS, rank=rank, world_size=settings.num_workers)
        output = engine.load(load) if load else None
        stream.skip(engine.steps_done * ROWS)
        losses = [engine.step(stream.next(), objective()) for _ in range(engine.steps_done, until)]
        if save:
            engine.save(save, {"said": "here"})
        return losses, {name: tensor.float().numpy() for name, tensor in engine.weights().items()}, output


@pytest.fixture
def model(tiny_model: Any, tmp_path: Path) -> Path:
    return checkpoint.save(tiny_model("llama"), tmp_path / "model")


def difference(one: list[float], other: list[float]) -> float:
    return max(abs(a - b) for a, b in zip(one, other, strict=True))


@pytest.mark.parametrize(
    ("stage", "dtype", "options", "own_rate"),
    [
        extended(1, "float32", {}, True),
        extended(3, "bfloat16", {"deepspeed": {"zero_optimization": {"sub_group_size": 4000}}}, True),
        extended(0, "float32", {}, False),
        extended(1, "bfloat16", {}, False),
        extended(1, "float32", {"tuning": "lora"}, False),
        extended(2, "float32", {}, False),
        extended(2, "bfloat16", {}, True),
        extended(3, "float32", {"deepspeed": {"zero_optimization": {"sub_group_size": 4000}}}, True),
        extended(3, "float32", {"tuning": "lora"}, False),
    ],
)
def test_training_continues_with_another_number_of_workers(
    on_all: Any, model: Path, tmp_path: Path, stage: int, dtype: str, options: dict[str, Any], own_rate: bool
) -> None:
    def run(workers: int, name: str, until: int, load: Path | None = None, save: Path | None = None) -> Any:
        settings = settings_of(workers, zero_stage=stage, dtype=dtype, **options)
        return on_all(workers, tmp_path / name, work, model, settings, until, load, save, own_rate)

    saved = tmp_path / "checkpoint"
    expected, weights, _ = run(1, "whole", ALL)[0]
    first = run(2, "first", HALF, save=saved)[0][0]
    near = 1e-5 if dtype == "float32" else 1e-2
    assert difference(first, expected[:HALF]) < near
    for workers in (1, 4):  # 4: two of them have one row of a step, two have two
        results = run(workers, f"then-{workers}", ALL, load=saved)
        losses, after, output = results[0]
        assert output == {"said": "here"}
        assert difference(losses, expected[HALF:]) < near
        assert [result[0] for result in results] == [losses] * workers
        # A gradient near 0 may have either sign, and Adam makes a whole step of it; in float32 for 1 of 21,664 weights
        apart = np.concatenate([abs(after[name] - weights[name]).ravel() for name in weights])
        if dtype == "float32":
            assert (apart > 1e-5).mean() < 1e-4 and apart.max() < 1e-3
        else:
            assert (apart > 2e-2).mean() < 1e-3 and apart.max() < 0.1
    assert not list(tmp_path.glob(".checkpoint*"))


@pytest.mark.extended
def test_the_optimiser_state_matters_to_the_comparison_above(on_all: Any, model: Path, tmp_path: Path) -> None:
    """Without its moments a training goes another way, by more than what is allowed above."""
    settings = settings_of(1)
    expected = on_all(1, tmp_path / "whole", work, model, settings, ALL, None, None, False)[0][0]
    on_all(1, tmp_path / "first", work, model, settings, HALF, None, tmp_path / "saved", False)
    state = tmp_path / "saved" / "engine"
    forget(next(state.glob("*optim_states.pt")))
    losses = on_all(1, tmp_path / "then", work, model, settings, ALL, tmp_path / "saved", None, False)[0][0]
    assert difference(losses, expected[HALF:]) > 1e-3


def forget(file: Path) -> None:
    """Adam's moments of a training checkpoint, made zero."""
    record = torch.load(file, weights_only=False)  # this test has written it
    for state in record["optimizer_state_dict"]["base_optimizer_state"]["state"].values():
        state["exp_avg"].zero_()
        state["exp_avg_sq"].zero_()
    torch.save(record, file)


@pytest.mark.extended
def test_a_checkpoint_that_cannot_be_read_is_reported_by_all_workers(on_all: Any, model: Path, tmp_path: Path) -> None:
    saved = tmp_path / "checkpoint"
    on_all(2, tmp_path / "first", work, model, settings_of(2), 1, None, saved, False)
    broken = next((saved / "engine").glob("*optim_states.pt"))
    broken.write_bytes(broken.read_bytes()[:1000])
    with pytest.raises(RuntimeError, match=r"OSError.*checkpoint cannot be split over 3 workers"):
        on_all(3, tmp_path / "then", work, model, settings_of(3), 2, saved, None, False)
    assert not list(tmp_path.glob(".checkpoint*"))


@pytest.mark.extended
@pytest.mark.parametrize(("rows", "micro"), [extended(3, None), (5, 1), extended(7, 2)])
def test_a_batch_that_does_not_divide_is_the_same_step(
    on_all: Any, model: Path, tmp_path: Path, rows: int, micro: int | None
) -> None:
    def run(workers: int) -> Any:
        settings = settings_of(workers, batch_size=rows, num_workers=[1, 2], micro_batch_size=micro)
        return on_all(workers, tmp_path / str(workers), some_steps, model, settings)

    alone, several = run(1), run(2)
    assert difference(several[0], alone[0]) < 1e-5
    assert several[0] == several[1]


def some_steps(rank: int, model: Path, settings: TrainSettings) -> list[float]:
    with closing(TrainEngine(load_trainable(model, settings), settings, ALL)) as engine:
        stream = BatchStream(IDS, settings.batch_size, rank=rank, world_size=settings.num_workers)
        return [engine.step(stream.next(), objective()) for _ in range(HALF)]
