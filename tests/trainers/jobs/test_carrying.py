"""A job in this process, without Ray: damage to checkpoints, too little memory, and no leftovers.

Out of memory is an injected torch.OutOfMemoryError: there is no GPU here to fill.
"""

from __future__ import annotations

import gc
import itertools
import os
import shutil
import threading
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from attention.io import checkpoint
from attention.plan import AttentionPlan, HeadShare, LayerPlan
from trainers.engine import TrainEngine
from trainers.evaluation import evaluate
from trainers.jobs import share, training
from trainers.jobs.checkpoints import CheckpointStore
from trainers.jobs.memory import JobOutOfMemoryError, as_it_fits, lower_micro_batch, lowered
from trainers.jobs.run import run_job
from trainers.jobs.worker import TrainJob
from trainers.relaxations.stage import RelaxationSpec
from trainers.settings import TrainSettings
from trainers.text.data import read_sequences
from trainers.zero import group_of_one

PLAN = AttentionPlan((LayerPlan((0, 0, 1, 1), (0, 1, 1, 0)), LayerPlan((0, 1, 2, 3), (0, 0, 0, 0))), head_dim=8)
SAME = ("loss", "kl", "train_loss", "step", "tokens", "weights_digest")


class Alone:
    """The link of one worker in this process. It stops the job once `until` reports have come."""

    rank, world_size = 0, 1

    def __init__(self, until: int = 99) -> None:
        self.reports: list[dict[str, Any]] = []
        self.speeds: dict[str, float] = {}
        self.until = until

    def report(self, metrics: dict[str, Any], last: bool) -> bool:
        self.reports.append(dict(metrics))
        return len(self.reports) < self.until

    def leaving(self) -> bool:
        return False

    def show(self, job: TrainJob, line: dict[str, Any]) -> None:
        self.speeds[job.run_name] = line["tokens_per_second"]

    @property
    def steps(self) -> list[int]:
        return [report["step"] for report in self.reports]


@pytest.fixture(scope="module")
def job(tiny_job: Any, tmp_path_factory: pytest.TempPathFactory) -> TrainJob:
    group_of_one()
    generator = torch.Generator().manual_seed(0)
    train, held_out = (torch.randint(0, 64, (rows, 16), generator=generator) for rows in (100, 9))
    settings = TrainSettings(learning_rate=3e-3, seed=1)
    return tiny_job(tmp_path_factory.mktemp("carried"), PLAN, train, held_out, settings, milestones=(2, 4, 6))


@pytest.fixture(scope="module")
def whole(job: TrainJob) -> dict[str, Any]:
    return run_job(job, Alone())["metrics"]


def test_the_speed_counts_the_steps_alone(job: TrainJob, monkeypatch: pytest.MonkeyPatch) -> None:
    """On a clock that ticks when it is read, and for a long time before the first step."""
    now = itertools.count()

    def long_start(*_: Any) -> None:
        for _second in range(1000):
            next(now)

    monkeypatch.setattr(share, "time", SimpleNamespace(perf_counter=lambda: next(now)))
    monkeypatch.setattr(training, "checkpoint_cost", long_start)
    link = Alone()
    timed = replace(job, run_name="timed", out_dir=f"{job.out_dir}-timed")
    run_job(timed, link)
    speeds = [report["tokens_per_second"] for report in link.reports]
    assert speeds == [job.settings.batch_size * 16] * 3


@pytest.fixture
def other(job: TrainJob, request: pytest.FixtureRequest) -> TrainJob:
    """The same job under another name."""
    name = request.node.name.replace("[", "-").rstrip("]")
    return replace(job, run_name=name, out_dir=str(Path(job.out_dir).parent.parent / name / "out"))


def test_a_stopped_job_resumes_and_repeats_its_reports(other: TrainJob, whole: dict[str, Any]) -> None:
    first, second = Alone(until=2), Alone()
    assert run_job(other, first) == {"stopped": 4}
    assert not Path(other.out_dir).exists()
    ended = run_job(other, second)
    assert second.steps == [2, 4, 6]
    assert second.reports[:2] == first.reports
    assert first.speeds.keys() == {other.run_name} and first.speeds[other.run_name] > 0
    assert {name: ended["metrics"][name] for name in SAME} == {name: whole[name] for name in SAME}


def test_an_ended_job_is_reported_and_not_done_again(
    job: TrainJob, whole: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(checkpoint, "load", None)
    again = Alone()
    assert run_job(job, again)["metrics"] == whole
    assert again.steps == [2, 4, 6]


def test_weights_that_were_lost_are_written_again(other: TrainJob, whole: dict[str, Any]) -> None:
    run_job(other, Alone())
    weights = Path(other.out_dir) / "model.safetensors"
    weights.write_bytes(weights.read_bytes()[:-1] + b"\0")
    assert run_job(other, Alone())["metrics"]["weights_digest"] == whole["weights_digest"]
    assert checkpoint.weights_digest(other.out_dir) == whole["weights_digest"]


@pytest.mark.parametrize("damage", ["changed", "missing", "all"])
def test_a_damaged_checkpoint_is_passed_over_for_the_one_before(
    other: TrainJob, whole: dict[str, Any], damage: str
) -> None:
    run_job(other, Alone(until=2))
    root = Path(other.storage_path) / other.run_name
    newest, before = root / "checkpoint_000004", root / "checkpoint_000002"
    for folder in (newest, before) if damage == "all" else (newest,):
        file = max(folder.rglob("*.pt"), key=lambda path: path.stat().st_size)
        if damage == "missing":
            file.unlink()
        else:
            content = bytearray(file.read_bytes())
            content[len(content) // 2] ^= 1
            file.write_bytes(content)
    again = Alone()
    ended = run_job(other, again)["metrics"]
    assert {name: ended[name] for name in SAME} == {name: whole[name] for name in SAME}
    assert again.steps == [2, 4, 6]
    report = ended["notes"][0]
    assert report.startswith("checkpoint of step 4 passed over: ")
    assert ("cannot be read" if damage == "missing" else "is not what was written") in report
    assert len(ended["notes"]) == (2 if damage == "all" else 1)


def test_a_killed_save_leaves_the_checkpoint_before(tmp_path: Path) -> None:
    store = CheckpointStore(str(tmp_path), "run")

    def write(text: str) -> Any:
        return lambda folder: (folder / "state.pt").write_text(text)

    def killed(folder: Path) -> None:
        write("half")(folder)
        raise KeyboardInterrupt

    store.save(1, write("one"), {"step": 1})
    with pytest.raises(KeyboardInterrupt):
        store.save(2, killed, {"step": 2})
    checkpoints, reports, damage = store.newest_whole()
    assert checkpoints is not None and (checkpoints.step, [r["step"] for r in reports], damage) == (1, [1], [])
    for step in (2, 3, 4):
        store.save(step, write(f"{step}"), {"step": step})
    assert {p.name for p in (tmp_path / "run").iterdir()} == {
        "checkpoints.json",
        "checkpoint_000003",
        "checkpoint_000004",
    }
    assert [r["step"] for r in store.read()[1]] == [1, 2, 3, 4]
    assert (store.folder(store.read()[0][-1]) / "state.pt").read_text() == "4"


# ---- too little memory ---------------------------------------------------------------------------------------------


@pytest.fixture
def small_memory(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[int]]:
    """A step with more than `limit[0]` rows at once runs out of memory, from the third step of an engine on."""
    limit, step = [4], TrainEngine.step

    def limited(self: TrainEngine, batch: torch.Tensor, loss_fn: Any) -> float:
        if self.settings.device_batch_size > limit[0] and self.steps_done >= 2:
            raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB.\nand more")
        return step(self, batch, loss_fn)

    monkeypatch.setattr(TrainEngine, "step", limited)
    yield limit


def test_out_of_memory_continues_with_half_the_micro_batch(
    other: TrainJob, whole: dict[str, Any], small_memory: list[int]
) -> None:
    link = Alone()
    metrics = run_job(other, link)["metrics"]
    assert link.steps == [2, 2, 4, 6]  # the report before it is repeated
    assert metrics["notes"] == [
        "out of memory with micro_batch_size 8: trained with 4 and 2 accumulation steps instead of 1"
    ]
    assert "notes" not in link.reports[0]
    for name in ("loss", "kl", "train_loss"):
        assert metrics[name] == pytest.approx(whole[name], abs=1e-4)
    assert metrics["tokens"] == whole["tokens"]
    started_again = replace(other, run_name=f"{other.run_name}-again")
    second = Alone()
    run_job(started_again, second)
    assert second.steps == [2, 4, 6]  # it knows, and does not run out again first


def test_out_of_memory_twice_ends_the_job(other: TrainJob, small_memory: list[int]) -> None:
    small_memory[0] = 2
    with pytest.raises(
        JobOutOfMemoryError, match=r"micro_batch_size 4, which was lowered to already: CUDA out of memory. Tried .*;"
    ):
        run_job(other, Alone())


def test_a_relaxation_that_runs_out_of_memory(other: TrainJob, small_memory: list[int]) -> None:
    """It resumes from its own checkpoints, also with other settings."""
    halved = AttentionPlan((LayerPlan((0, 1, 0, 1), (0, 0, 1, 1)),) * 2, head_dim=8)
    spec = RelaxationSpec("lagrangian", (halved.to_json(),), 4, settings=TrainSettings(), save_every=1)
    relaxed = replace(other, model_dir=str(other.teacher_dir), relaxation=spec)
    metrics = run_job(relaxed, Alone())["metrics"]
    assert metrics["relaxation_steps"] == 4
    assert [point["step"] for point in metrics["relaxation_history"]] == [1, 2, 3, 4]
    assert "trained with 4" in metrics["notes"][0]


def test_a_relaxation_without_recovery(other: TrainJob, tmp_path: Path) -> None:
    """Pull, then share: measured once, at step 0 after the pull, with the weights that the pull has left."""
    plan = AttentionPlan((LayerPlan.identity(4),) * 2, 8, (HeadShare(1, 0, 0, 2),))
    spec = RelaxationSpec("pull_together", (plan.to_json(),), 4, {"rate": 0.5})
    pulled = replace(other, model_dir=str(other.teacher_dir), relaxation=spec, milestones=(0,))
    link = Alone()
    metrics = run_job(pulled, link)["metrics"]
    assert link.steps == [0] and metrics["relaxation_steps"] == 4
    assert metrics["loss"] == metrics["collapsed_loss"] and metrics["tokens"] == 4 * 8 * 16
    assert metrics["tokens_per_second"] > 0 and metrics["train_loss"] > 0
    assert [point["step"] for point in metrics["relaxation_history"]] == [1, 2, 3, 4]
    assert metrics["relaxation_history"][-1]["distance"] < 0.1
    assert checkpoint.plan_of(checkpoint.load(metrics["out_dir"])) == plan
    again = Alone()
    assert run_job(pulled, again)["metrics"] == metrics and again.steps == [0]


def test_which_micro_batch_is_tried(job: TrainJob, tmp_path: Path) -> None:
    def rows(**settings: Any) -> int | None:
        result = lowered(TrainSettings(**settings))
        return None if result is None else result.micro_batch_size

    assert (rows(batch_size=8), rows(batch_size=8, micro_batch_size=4), rows(batch_size=8, micro_batch_size=1)) == (
        4,
        2,
        None,
    )
    assert rows(batch_size=9) == 3
    assert rows(batch_size=12, num_workers=2, micro_batch_size=6) == 3
    elastic = TrainSettings(batch_size=16, micro_batch_size=4, num_workers=[2, 8])  # pyright: ignore[reportArgumentType]
    less = lowered(elastic.on(8))
    assert less is not None and less.micro_batch_size == 1, "each of eight has two sequences"
    single = replace(job, out_dir=str(tmp_path / "out"), settings=TrainSettings(batch_size=1))
    with pytest.raises(
        JobOutOfMemoryError, match="micro_batch_size 1: full; lower train.micro_batch_size or data.sequence_length"
    ):
        lower_micro_batch(single, "full", already=False)
    eight = replace(single, settings=TrainSettings(batch_size=8))
    lower_micro_batch(eight, "full", already=False)
    assert as_it_fits(eight)[0].settings.micro_batch_size == 4
    assert as_it_fits(single) == (single, [])  # the note is of other settings


def test_a_relaxation_of_more_sequences_can_be_lowered_alone(job: TrainJob, tmp_path: Path) -> None:
    halved = AttentionPlan((LayerPlan((0, 0, 1, 1), (0, 0, 1, 1)),) * 2, head_dim=8)
    spec = RelaxationSpec("lagrangian", (halved.to_json(),), 4, settings=TrainSettings(batch_size=8))
    settings = TrainSettings(batch_size=1)
    one = replace(job, out_dir=str(tmp_path / "out"), settings=settings, relaxation=spec, teacher_dir=job.model_dir)
    lower_micro_batch(one, "full", already=False)
    fitting, notes = as_it_fits(one)
    assert fitting.settings == settings and fitting.relaxation_settings.micro_batch_size == 4
    assert notes == ["out of memory with micro_batch_size 1: halved in the relaxation alone"]


def test_divergence_reports_step_and_loss(other: TrainJob) -> None:
    broken = checkpoint.load(other.model_dir)
    with torch.no_grad():
        broken.get_output_embeddings().weight[5] = torch.inf
    diverging = replace(other, model_dir=str(checkpoint.save(broken, Path(other.out_dir).parent / "broken")))
    link = Alone()
    assert run_job(diverging, link)["diverged"].startswith("training loss at step 1 of 6 is nan")
    assert not link.reports and not Path(other.out_dir).exists()


# ---- nothing stays -------------------------------------------------------------------------------------------------


def held() -> dict[str, int]:
    """Resources that a process may leak: live tensors and their bytes, open files, threads, resident memory."""
    gc.collect()
    tensors = [o for o in gc.get_objects() if type(o) in (torch.Tensor, torch.nn.Parameter)]
    pages = int(Path("/proc/self/statm").read_text().split()[1])
    return {
        "tensors": len(tensors),
        "files": len(os.listdir("/proc/self/fd")),  # noqa: PTH208 - names of open files, not paths
        "threads": threading.active_count(),
        "memory": pages * os.sysconf("SC_PAGE_SIZE"),
    }


@pytest.mark.extended
@pytest.mark.parametrize(("stage", "jobs"), [(1, 100), (3, 50)])
def test_a_hundred_jobs_leave_nothing_in_a_process(other: TrainJob, stage: int, jobs: int) -> None:
    settings = other.settings.model_copy(update={"zero_stage": stage, "distillation": "kl"})
    seen, digests = {}, set()
    for number in range(jobs):
        name = f"{other.run_name}-{number}"
        place = Path(other.out_dir).parent / str(number) / "out"
        each = replace(other, run_name=name, out_dir=str(place), milestones=(1,), settings=settings)
        digests.add(run_job(each, Alone())["metrics"]["weights_digest"])
        if number in (20, jobs - 1):
            seen[number] = held()
    assert len(digests) == 1, "what ran before in the process changes nothing"
    for what, by_chance in {"tensors": 0, "files": 2, "threads": 0}.items():  # a leak would be one a job
        assert seen[jobs - 1][what] <= seen[20][what] + by_chance, what
    # DeepSpeed keeps a little of every engine with ZeRO 3 (0.19: megabytes); a model a job would be far more
    assert seen[jobs - 1]["memory"] - seen[20]["memory"] < (jobs - 21) * 0.3e6, seen


def test_a_teacher_is_read_once_and_only_where_something_is_distilled(
    other: TrainJob, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    loaded: list[str] = []
    load = checkpoint.load
    monkeypatch.setattr(checkpoint, "load", lambda path, *rest: (loaded.append(str(path)), load(path, *rest))[1])
    assert run_job(other, Alone())["metrics"]["kl"] is None
    assert loaded == [other.model_dir]
    teacher = str(shutil.copytree(str(other.teacher_dir), tmp_path / "teacher"))  # that no other test has read
    settings = other.settings.model_copy(update={"distillation": "kl"})
    for name in ("first", "second"):
        place = str(Path(other.out_dir).with_name(name))
        metrics = run_job(
            replace(other, run_name=name, out_dir=place, settings=settings, teacher_dir=teacher), Alone()
        )["metrics"]
        measured = evaluate(load(place), read_sequences(other.eval_file)[:], teacher=load(teacher))
        assert metrics["kl"] == pytest.approx(measured.kl, abs=1e-5)
    assert loaded.count(teacher) == 1
