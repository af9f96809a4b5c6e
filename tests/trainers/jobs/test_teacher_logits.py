"""A teacher's predictions that are stored on disk, against the teacher itself."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from test_carrying import PLAN, Alone

from trainers.jobs import teacher_logits
from trainers.jobs.run import run_job
from trainers.jobs.share import frozen_model
from trainers.jobs.teacher_logits import stored_teacher
from trainers.jobs.train_job import TrainJob
from trainers.losses import kl, stored_kl
from trainers.settings import TrainSettings
from trainers.text.data import BatchStream, read_sequences
from trainers.zero import group_of_one

VOCABULARY = 64


def packed(logits: torch.Tensor, k: int) -> torch.Tensor:
    everything = logits.log_softmax(-1)
    largest, indices = everything.topk(k, -1)
    rest = everything.scatter(-1, indices, -torch.inf).logsumexp(-1, keepdim=True)
    return torch.cat([largest, indices.to(logits.dtype), rest], -1)


def test_the_divergence_is_that_of_all_logits_where_all_are_kept_and_a_lower_bound_elsewhere() -> None:
    generator = torch.Generator().manual_seed(0)
    student, teacher = (3 * torch.randn(20, VOCABULARY, generator=generator, dtype=torch.float64) for _ in range(2))
    student.requires_grad_()
    whole = kl(student, teacher)
    (gradient,) = torch.autograd.grad(whole, student)
    every = stored_kl(student, packed(teacher, VOCABULARY))
    assert every.item() == pytest.approx(whole.item(), rel=1e-6)
    assert torch.allclose(torch.autograd.grad(every, student)[0], gradient, atol=1e-7)
    result = [stored_kl(student, packed(teacher, k)).item() for k in (1, 4, 16, 32, 60)]
    assert result == sorted(result) and result[0] > 0 and result[-1] <= whole.item() + 1e-6
    assert result[-1] == pytest.approx(whole.item(), rel=1e-2)
    assert stored_kl(teacher, packed(teacher, 4)).item() == pytest.approx(0, abs=1e-6)


@pytest.fixture(scope="module")
def make(tiny_job: Any, tmp_path_factory: pytest.TempPathFactory) -> Callable[..., TrainJob]:
    group_of_one()
    folder, generator = tmp_path_factory.mktemp("kept"), torch.Generator().manual_seed(0)
    train, held_out = (torch.randint(0, VOCABULARY, (rows, 16), generator=generator) for rows in (50, 9))
    settings = TrainSettings(learning_rate=3e-3, distillation="kl", micro_batch_size=3, batch_size=6)
    job = tiny_job(folder, PLAN, train, held_out, settings, milestones=(4,))

    def named(name: str, **settings: Any) -> TrainJob:
        changed = TrainSettings.model_validate(job.settings.model_dump() | settings)
        return replace(job, run_name=name, out_dir=str(folder / name / "out"), settings=changed)

    return named


def test_a_training_has_the_same_losses_from_disk_and_no_teacher(
    make: Callable[..., TrainJob], monkeypatch: pytest.MonkeyPatch
) -> None:
    live = run_job(make("live"), Alone())["metrics"]
    monkeypatch.setattr(teacher_logits, "_SHARD_BYTES", 15 * 64 * 8 * 7)  # seven sequences
    stored = run_job(make("kept", teacher_logits="cached"), Alone())["metrics"]
    assert stored["train_loss"] == pytest.approx(live["train_loss"], abs=1e-5)
    assert stored["loss"] == pytest.approx(live["loss"], abs=1e-4)
    assert stored["kl"] is None and live["kl"] > 0
    (folder,) = Path(make("kept").train_file).parent.glob("train-teacher-*")
    assert len(list(folder.glob("*.safetensors"))) == 8
    assert json.loads((folder / "index.json").read_text())["digest"] == stored["teacher_logits_digest"]
    with monkeypatch.context() as patch:
        patch.setattr(teacher_logits, "teacher_of", None)  # a call would fail
        again = run_job(make("again", teacher_logits="cached"), Alone())["metrics"]
    assert again["weights_digest"] == stored["weights_digest"]
    fewer = run_job(make("fewer", teacher_logits="cached", teacher_logits_k=8), Alone())["metrics"]
    assert 0 < live["train_loss"] - fewer["train_loss"] < 0.2, "a lower bound of the divergence"


def test_bild_needs_all_logits() -> None:
    with pytest.raises(ValueError, match="teacher_logits cached has no logits for kl_bild"):
        TrainSettings(distillation="kl_bild", teacher_logits="cached")


def kept_by(rank: int, job: TrainJob) -> tuple[str, list[list[float]]]:
    """The digest of what two workers keep of a teacher that is split over them, and their own last rows."""
    stream = BatchStream(read_sequences(job.train_file), 6, rank=rank, world_size=2)
    stored = stored_teacher(job, stream, torch.device("cpu"))
    states = stored(stream.next()).states
    return stored.digest, states[:, 0].tolist()


@pytest.mark.extended
def test_workers_share_the_work_also_where_the_teacher_is_split_over_them(
    make: Callable[..., TrainJob], on_all: Callable[..., list[Any]], tmp_path: Path
) -> None:
    job = make("split", teacher_logits="cached", teacher_logits_k=5, num_workers=2, zero_stage=3)
    (first, rows), (second, others) = on_all(2, tmp_path / "run", kept_by, job)
    assert first == second
    with frozen_model(str(job.teacher_dir), TrainSettings(), torch.device("cpu")) as teacher:
        stream = BatchStream(read_sequences(job.train_file), 6)
        logits = teacher(stream.next()).logits[:, 0]
    assert torch.allclose(torch.tensor([*rows, *others]), packed(logits, 5), atol=1e-4)
