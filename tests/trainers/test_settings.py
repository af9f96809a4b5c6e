"""Settings refuse what cannot work; the schedule is a function of the position alone."""

from __future__ import annotations

from itertools import pairwise
from typing import Any

import pytest
from pydantic import ValidationError

from attention.plan import AttentionPlan, LayerPlan
from trainers.jobs.train_job import TrainJob
from trainers.relaxations.stage import RelaxationSpec
from trainers.settings import TrainSettings

PLANS = [AttentionPlan((LayerPlan(heads, heads),), head_dim=8).to_json() for heads in ((0, 0, 1, 1), (0, 0, 0, 0))]
RELAXATION = RelaxationSpec("lagrangian", tuple(PLANS), 30)


def job(**changes: Any) -> TrainJob:
    settings = {
        "model_dir": "m",
        "train_file": "t",
        "eval_file": "e",
        "out_dir": "/o",
        "storage_path": "/s",
        "run_name": "r",
    }
    return TrainJob(**{**settings, "milestones": (5, 10), **changes})


@pytest.mark.parametrize(
    ("wrong", "message"),
    [
        (
            {"dtype": "bf16", "zero_stage": 0},
            "bfloat16 needs zero_stage 1, 2 or 3, got 0.*zero_stage=1 or dtype=float32",
        ),
        ({"batch_size": 8, "micro_batch_size": 3}, r"multiple of num_workers x micro_batch_size = 1 x 3 = 3, got 8"),
        ({"batch_size": 3, "num_workers": 2}, "got 3"),
        ({"batch_size": 2, "num_workers": 4}, "got 2"),
        ({"num_workers": [3, 2]}, r"fewest must not be more than the most.*got \[3, 2\]"),
        ({"batch_size": 4, "num_workers": [1, 5]}, r"more than batch_size 4, got \[1, 5\]"),
        ({"num_workers": [1, 2, 3]}, r"fewest and the most of them, got \[1, 2, 3\]"),
        ({"num_workers": [0, 2]}, "greater than or equal to 1"),
        ({"num_workers": [1, 2], "gpus_per_worker": 0.5}, "no two workers on one GPU"),
        ({"dtype": "fp16"}, "'float32' or 'bfloat16'"),
        ({"zero_stage": 4}, "0, 1, 2 or 3"),
        ({"learning_rate": 0}, "greater than 0"),
        ({"lr": 1e-3}, "Extra inputs are not permitted"),
    ],
)
def test_impossible_settings_are_refused(wrong: dict[str, Any], message: str) -> None:
    with pytest.raises(ValidationError, match=message):
        TrainSettings(**wrong)


def test_both_names_of_a_dtype_are_one_setting() -> None:
    assert TrainSettings(dtype="bf16") == TrainSettings(dtype="bfloat16")  # pyright: ignore[reportArgumentType]
    assert TrainSettings(dtype="fp32").model_dump()["dtype"] == "float32"  # pyright: ignore[reportArgumentType]


def test_batch_is_divided_over_workers_and_passes() -> None:
    settings = TrainSettings(batch_size=24, micro_batch_size=3, num_workers=2)
    assert (settings.device_batch_size, settings.gradient_accumulation_steps) == (3, 4)
    settings = TrainSettings(batch_size=24, num_workers=2)
    assert (settings.device_batch_size, settings.gradient_accumulation_steps) == (12, 1)


def test_a_range_of_workers() -> None:
    settings = TrainSettings(batch_size=8, num_workers=[2, 5])  # pyright: ignore[reportArgumentType]
    assert (settings.min_workers, settings.num_workers, settings.shape.fewest) == (2, 5, 2)
    assert TrainSettings(**settings.model_dump()) == settings
    each = {workers: settings.on(workers) for workers in (2, 3, 5)}
    assert [one.min_workers for one in each.values()] == [None] * 3
    assert {workers: one.device_batch_size for workers, one in each.items()} == {2: 4, 3: 3, 5: 2}
    assert not each[2].shape.elastic


def test_schedule_rises_then_falls_to_its_final_fraction() -> None:
    settings = TrainSettings(learning_rate=1.0, warmup_fraction=0.2, min_lr_ratio=0.1)
    rates = [settings.rate(step, 50) for step in range(51)]
    assert rates[:3] == pytest.approx([0.1, 0.2, 0.3])
    assert max(rates) == rates[9] == rates[10] == 1.0
    assert all(a > b for a, b in pairwise(rates[10:]))
    assert rates[30] == pytest.approx(0.55)
    assert rates[50] == pytest.approx(0.1)


def test_schedule_without_warmup_starts_at_the_full_rate() -> None:
    assert TrainSettings(learning_rate=2.0, warmup_fraction=0).rate(0, 10) == 2.0


def test_jobs_survive_json() -> None:
    whole = job(settings=TrainSettings(dtype="bf16", num_workers=2), teacher_dir="x", total_steps=20, seed=3)
    assert TrainJob.from_json(whole.to_json()) == whole


@pytest.mark.parametrize(
    ("wrong", "message"),
    [
        ({"milestones": ()}, r"milestones must increase from above start_step 0, got \(\)"),
        ({"milestones": (5, 5)}, "must increase"),
        ({"milestones": (5,), "start_step": 5, "resume_from": "x"}, "above start_step 5"),
        ({"start_step": 3}, "needs the checkpoint it was reached with"),
        ({"total_steps": 9}, "must reach the last milestone 10, got 9"),
        ({"settings": TrainSettings(distillation="kl")}, "'kl' needs a teacher_dir"),
        ({"out_dir": "runs/x"}, "out_dir must be an absolute path"),
        ({"storage_path": "runs"}, "storage_path must be an absolute path"),
        ({"storage_path": "s3://bucket/x"}, "storage_path must be an absolute path"),
        ({"schedule_offset": -1}, r"schedule_offset must be at least 0 \(minus start_step\)"),
        ({"schedule_offset": 3, "relaxation": RELAXATION}, "is 0 for a job with its own relaxation, got 3"),
    ],
)
def test_impossible_jobs_are_refused(wrong: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        job(**wrong)


def test_only_behind_a_relaxation_may_a_job_take_no_step() -> None:
    assert job(relaxation=RELAXATION, milestones=(0,)).schedule_steps == 60
    assert job(schedule_offset=60, milestones=(0,)).schedule_steps == 60
    with pytest.raises(ValueError, match="milestones must increase from above start_step 0"):
        job(milestones=(0,))


def test_one_schedule_spans_relaxation_and_recovery() -> None:
    whole = job(relaxation=RELAXATION, total_steps=20)
    assert RELAXATION.total_steps == 60
    assert whole.schedule_steps == 80
    assert job(relaxation=RELAXATION).schedule_steps == 70
    rest = whole.after_relaxation("collapsed")
    assert (rest.model_dir, rest.relaxation) == ("collapsed", None)
    assert (rest.schedule_offset, rest.schedule_steps, rest.milestones) == (60, 80, (5, 10))
    assert job().after_relaxation("other") == job()


def test_gpus_are_used_unless_the_cpu_is_requested() -> None:
    assert TrainSettings(gpus_per_worker=1).shape.device == "cuda"
    assert TrainSettings(gpus_per_worker=1, device="cpu").shape.device == "cpu"
    assert TrainSettings().shape.device == TrainSettings(device="cpu").shape.device == "cpu"


def test_a_training_is_known_by_what_decides_its_result() -> None:
    """Records of trainings that were begun before some keys were there stay true."""
    before = TrainSettings().model_dump(mode="json") | {"activation_checkpointing": False}
    later = (
        "document_mask",
        "assistant_only_loss",
        "compile",
        "collective_seconds",
        "teacher_logits",
        "teacher_logits_k",
    )
    for name in later:
        del before[name]
    same = ({}, {"activation_checkpointing": "selective"}, {"activation_checkpointing": False})
    assert all(TrainSettings(**settings).identity() == before for settings in same)
    other = (
        {"document_mask": True},
        {"assistant_only_loss": True},
        {"compile": True},
        {"activation_checkpointing": True},
        {"seed": 1},
    )
    assert all(TrainSettings(**settings).identity() != before for settings in other)
    assert TrainSettings.model_validate(TrainSettings(compile=True).identity()).compile


@pytest.mark.parametrize(("cpus", "threads"), [(0.95, 1), (1.9, 2), (1.4, 1), (15, 15), (0.1, 1)])
def test_a_worker_computes_on_all_the_cores_that_its_cpus_are_nearly(cpus: float, threads: int) -> None:
    assert TrainSettings(cpus_per_worker=cpus).threads == threads
