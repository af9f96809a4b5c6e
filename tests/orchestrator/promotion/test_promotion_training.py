"""How the training of a trial is resumed when it is promoted."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from journals import write_journal
from promotions import sync_of, trial

from orchestrator.config.schema import ConfigError, SearchConfig, parse_config
from orchestrator.promotion import steps as steps_module
from orchestrator.promotion.state import PromotionEntry, PromotionState
from orchestrator.promotion.steps import PromotionSteps
from orchestrator.promotion.training import Training, TrainingResult
from orchestrator.search.candidates import Candidate
from orchestrator.search.trials.context import SearchSession, TrialContext
from orchestrator.storage.journal import load_trials
from orchestrator.storage.json_files import write_json
from orchestrator.storage.paths import SearchFolder
from orchestrator.tracking.runs import Tracker
from search_spaces.recipes.catalogue import recipe
from trainers.jobs import curve
from trainers.jobs.checkpoints import AddressAwayError, CheckpointStore

pytestmark = pytest.mark.usefixtures("in_this_process")


def training_of(
    config: SearchConfig,
    context: TrialContext,
    folder: SearchFolder,
    saved: Path,
    best: dict[str, Any] | None = None,
    **section: Any,
) -> Training:
    """The promotion of a trial of 4 steps to 10, with separate settings."""
    config = parse_config(config.model_dump() | {"promotion": {"steps": 6, "evaluations": 2, **section}})
    candidate = Candidate(recipe("headfold"), 0.5, 1e-3)
    write_json(folder.trial("head") / "recipe.json", candidate.config())
    last = {"step": 4, "loss": 2.2, "checkpoint_path": str(saved), "data_position": 32, "tokens": 512}
    rungs = [last | (best or {})]
    record = replace(trial("head", "headfold", 2.2), rungs=rungs)
    mlflow: Any = None
    return Training.of(record, 10, SearchSession(config, folder, context, mlflow, 1))


def test_a_promotion_resumes_from_the_trial_s_checkpoint_on_a_separate_schedule(
    config: SearchConfig, context: TrialContext, folder: SearchFolder, tmp_path: Path
) -> None:
    training = training_of(config, context, folder, tmp_path, train={"learning_rate": 1e-5}, checkpoint_steps=3)
    assert training.run is not None
    job = training.run.job
    assert (job.start_step, job.milestones, job.resume_from) == (4, (7, 10), str(tmp_path))
    assert job.start_tokens == 512, "those of the trial, whatever a step of the promotion takes"
    settings, first = job.settings, job.schedule_offset + job.start_step
    assert (first, job.schedule_steps) == (0, 6)
    rates = [settings.rate(first + done, job.schedule_steps) for done in range(6)]
    assert rates[0] == 1e-5 and rates[-1] < 0.2e-5
    assert (job.checkpoint_steps, training.run.offset) == (3, 0)


@pytest.mark.parametrize(("own", "minutes"), [({}, 7.0), ({"checkpoint_minutes": 2}, 2.0)])
def test_checkpoints_are_as_far_apart_as_those_of_trials_unless_it_says_otherwise(
    config: SearchConfig, context: TrialContext, folder: SearchFolder, tmp_path: Path, own: Any, minutes: float
) -> None:
    """And those of trials are as far apart as the configuration says."""
    context = replace(context, checkpoint_minutes=7.0)
    run = training_of(config, context, folder, tmp_path, **own).run
    assert run is not None and run.job.checkpoint_minutes == minutes
    trial_job = context.job("t", tmp_path, tmp_path, Candidate(recipe("headfold"), 0.5, 1e-3), [4])
    assert trial_job.checkpoint_minutes == 7.0
    assert config.resources.checkpoint_minutes == 30.0


@pytest.mark.parametrize(("workers", "shape"), [(4, (4, None)), ([2, 8], (8, 2))])
def test_it_resumes_from_the_checkpoint_on_other_workers_too(
    config: SearchConfig, context: TrialContext, folder: SearchFolder, tmp_path: Path, workers: Any, shape: Any
) -> None:
    run = training_of(config, context, folder, tmp_path, train={"num_workers": workers}).run
    assert run is not None
    job = run.job
    assert (job.start_step, job.resume_from) == (4, str(tmp_path))
    assert (job.shape.workers, job.shape.fewest) == shape


def test_split_otherwise_it_starts_from_the_weights_and_reads_on(
    config: SearchConfig, context: TrialContext, folder: SearchFolder, tmp_path: Path
) -> None:
    training = training_of(config, context, folder, tmp_path, train={"num_workers": 4, "zero_stage": 3})
    assert training.run is not None
    job = training.run.job
    assert (job.start_step, job.milestones, job.resume_from) == (0, (3, 6), None)
    assert job.model_dir == str(folder.trial("head") / "trained")
    assert (job.settings.num_workers, job.first_sequence, training.run.offset) == (4, 32, 4)
    fresh = replace(context, promotion_file="fresh.safetensors")
    run = training_of(config, fresh, folder, tmp_path, train={"zero_stage": 3}).run
    assert run is not None
    job = run.job
    assert (job.train_file, job.first_sequence) == ("fresh.safetensors", 0)


def test_a_promotion_with_other_settings_does_not_continue_the_one_before(
    config: SearchConfig, context: TrialContext, folder: SearchFolder, tmp_path: Path
) -> None:
    """Of that there may be checkpoints, reports and weights of the same name."""
    rate, workers = {"learning_rate": 1e-5}, {"num_workers": 2, "cpus_per_worker": 0.5}
    saved = tmp_path / "checkpoint_000004"
    saved.mkdir()

    def planned(**section: Any) -> tuple[Training, list[Path]]:
        training = training_of(config, context, folder, saved, **section)
        assert training.run is not None
        job = training.run.job
        left = [Path(job.storage_path) / job.run_name, Path(job.out_dir), Path(f"{job.out_dir}.best")]
        return training, [file / "file" for file in left]

    first, files = planned(train=rate)
    assert first.claim() == []
    for file in files:
        file.parent.mkdir(parents=True)
        file.touch()
    assert planned(train=rate)[0].claim() == planned(train=rate | workers)[0].claim() == []
    assert all(file.exists() for file in files)
    assert planned(train={"learning_rate": 1e-4})[0].claim() == ["learning_rate"]
    assert not any(file.exists() for file in files)
    assert planned(train=rate, evaluations=3)[0].claim() == ["learning_rate", "milestones"]
    saved.rmdir()  # the trial's checkpoint, from which it was to continue
    changed = planned(train=rate, evaluations=3)[0].claim()
    assert changed == ["first_sequence", "milestones", "schedule_offset", "start_step"]


def test_a_stopped_trial_whose_checkpoint_is_gone_resumes_from_its_best_weights(
    config: SearchConfig, context: TrialContext, folder: SearchFolder, tmp_path: Path
) -> None:
    best = folder.trial("head") / "trained.best" / "step-000002"
    (folder.trial("head") / "trained").rename(tmp_path / "weights")
    shutil.copytree(tmp_path / "weights", best)
    training = training_of(config, context, folder, tmp_path / "gone", best={"best_step": 2, "best_dir": str(best)})
    assert training.run is not None
    job = training.run.job
    assert (job.model_dir, job.start_step, job.milestones) == (str(best), 0, (4, 8))
    assert (training.start, training.run.offset, job.first_sequence, job.resume_from) == (2, 2, 32, None)


@pytest.mark.parametrize(
    ("train", "message"),
    [({"batch_size": 3, "num_workers": 2}, "batch_size must be a multiple"), ({"learning_rat": 1}, "learning_rat")],
)
def test_settings_of_a_promotion_are_checked(config: SearchConfig, train: dict[str, Any], message: str) -> None:
    changed = parse_config(config.model_dump() | {"promotion": {"train": train}})
    with pytest.raises(ConfigError, match=f"promotion.train.*(?s:.*){message}"):
        _ = changed.promotion_train


def test_an_update_of_mlflow_reads_and_sends_only_what_is_new_however_long_the_training_is(
    config: SearchConfig,
    context: TrialContext,
    folder: SearchFolder,
    tracker: Tracker,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    config = parse_config(config.model_dump() | {"promotion": {"steps": 100_000}})
    write_json(folder.trial("head") / "recipe.json", Candidate(recipe("headfold"), 0.5, 1e-3).config())
    write_journal(folder.root, [trial("head", "headfold", 2.2)])
    parent = tracker.start("search")
    session = SearchSession(config, folder, context, sync_of(tracker, folder, parent), 1)
    (record,) = load_trials(folder.root)
    entry = PromotionEntry.of(record, 100_004)
    steps = PromotionSteps(session, PromotionState({"head": entry}), {"head": record})

    sent: list[int] = []
    log_batch = tracker.client.log_batch

    def counting(run_id: str, **entities: Any) -> None:
        sent.extend(metric.step for metric in entities.get("metrics", ()))
        log_batch(run_id, **entities)

    monkeypatch.setattr(tracker.client, "log_batch", counting)
    parsed: list[str] = []

    class CountingJson:
        dumps = staticmethod(json.dumps)

        @staticmethod
        def loads(text: Any) -> Any:
            parsed.append(text)
            return json.loads(text)

    monkeypatch.setattr(curve, "json", CountingJson)
    updates: list[tuple[int, int]] = []

    def training_of_many_steps(
        trainings: list[Training], _: Any, done: Any, going_on: Callable[[Training], None]
    ) -> None:
        (training,) = trainings
        assert training.run is not None
        file = Path(training.run.job.storage_path) / training.run.job.run_name / "curve.jsonl"
        file.parent.mkdir(parents=True)
        first = 5
        for size in (3, 600, 3, 600, 3, 0):
            with file.open("a") as stream:
                for step in range(first, first + size):
                    stream.write(json.dumps({"step": step, "time": 1e9 + step, "batch_loss": 3.0}) + "\n")
                stream.write('{"step": ')  # a line that is being written
            first += size
            sent.clear()
            parsed.clear()
            going_on(training)
            updates.append((len(parsed), len(sent)))
            with file.open("r+") as stream:
                stream.truncate(file.stat().st_size - len('{"step": '))

    monkeypatch.setattr(steps_module, "run_all", training_of_many_steps)
    steps.train()
    assert updates == [(size, size) for size in (3, 600, 3, 600, 3, 0)]
    assert entry.run_id is not None
    history = tracker.client.get_metric_history(entry.run_id, "train_loss_step")
    assert sorted(metric.step for metric in history) == list(range(9, 1218)), "behind the trial's 4"
    sent.clear()
    steps.catch_up()
    steps.save()
    session.mlflow.put(steps.run_of(entry))
    assert not sent, "the whole course was sent already"
    planned = Training.of(record, 100_004, session)
    assert planned.run is not None and planned.run.offset == 4
    anew = replace(planned, run=replace(planned.run, offset=0))  # of other settings of the promotion
    monkeypatch.setattr(steps_module.Training, "of", lambda *_: anew)
    attempt = replace(entry, trained_at=1e9 + 700)
    again = PromotionSteps(session, PromotionState({"head": entry}, earlier=[attempt]), {"head": record})
    course = {
        point["step"] for point in again.run_of(attempt).points if "train_loss_step" in point or "batch_loss" in point
    }
    assert max(course) <= 704, "the rest is of the attempt after it"
    stored = PromotionEntry.from_record(json.loads(json.dumps(entry.to_record())))
    assert {point["step"] for point in steps.run_of(stored).points} == set(range(9, 1218))


def test_a_training_that_ends_while_its_reports_cannot_be_read_is_complete(
    config: SearchConfig,
    context: TrialContext,
    folder: SearchFolder,
    tracker: Tracker,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """They come with the result, and MLflow has them at the next run."""
    write_json(folder.trial("head") / "recipe.json", Candidate(recipe("headfold"), 0.5, 1e-3).config())
    write_journal(folder.root, [trial("head", "headfold", 2.2)])
    (record,) = load_trials(folder.root)
    entry = PromotionEntry.of(record, 10)
    session = SearchSession(config, folder, context, sync_of(tracker, folder, tracker.start("search")), 1)
    steps = PromotionSteps(session, PromotionState({"head": entry}), {"head": record})

    def away(_: Any) -> Any:
        raise AddressAwayError("no route to host")

    # Before its first update too: its run is put once they can be read
    track = PromotionSteps._track
    first: list[bool] = []

    def away_at_first(self: PromotionSteps, *args: Any) -> bool:
        first.append(True)
        return len(first) > 1 and track(self, *args)

    monkeypatch.setattr(PromotionSteps, "_track", away_at_first)

    def run_all(trainings: list[Training], _: Any, done: Any, going_on: Callable[[Training], None]) -> None:
        (training,) = trainings
        going_on(training)
        going_on(training)
        assert len(first) == 2 and entry.run_id is not None
        monkeypatch.setattr(CheckpointStore, "read", away)
        going_on(training)
        report = {"step": 10, "loss": 1.5, "kl": 0.1, "data_position": 80, "tokens": 1280}
        best = {"best_step": 10, "best_loss": 1.5, "best_kl": 0.1, "best_dir": str(folder.trial("head") / "trained")}
        done(training, TrainingResult(1.5, [report | best]), None)

    monkeypatch.setattr(steps_module, "run_all", run_all)
    steps.train()
    state = PromotionState.load(folder.promotion).candidates["head"]
    assert (state.status, state.loss, state.reasons) == ("trained", 1.5, [])
    assert state.trained is not None
    assert (state.trained.step, state.trained.data_position, state.trained.tokens) == (10, 80, 1280)


def test_a_resumed_training_counts_from_where_it_was(
    config: SearchConfig,
    context: TrialContext,
    folder: SearchFolder,
    tracker: Tracker,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """So that the time left is that of its other steps; what it has replaced is removed once it has been trained."""
    config = parse_config(config.model_dump() | {"promotion": {"steps": 96}})
    write_json(folder.trial("head") / "recipe.json", Candidate(recipe("headfold"), 0.5, 1e-3).config())
    write_journal(folder.root, [trial("head", "headfold", 2.2)])
    (record,) = load_trials(folder.root)
    session = SearchSession(config, folder, context, sync_of(tracker, folder, tracker.start("search")), 1)
    entry, former = PromotionEntry.of(record, 100), PromotionEntry.of(record, 1000)
    state = PromotionState({"head": entry}, earlier=[former])
    steps = PromotionSteps(session, state, {"head": record})
    runs = [Training.of(record, total, session).run for total in (100, 1000)]
    assert runs[0] is not None and runs[1] is not None
    folders = [Path(run.job.storage_path) / run.job.run_name for run in runs if run is not None]
    for run_folder in folders:
        run_folder.mkdir(parents=True)
    lines = [{"step": step, "time": 1e9 + step, "batch_loss": 3.0} for step in range(1, 61)]
    (folders[0] / "curve.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    opened: list[dict[str, Any]] = []
    stage = steps_module.stage

    def recorded(*arguments: Any, **settings: Any) -> Any:
        opened.append({"arguments": arguments, **settings})
        return stage(*arguments, **settings)

    def run_all(trainings: list[Training], _: Any, done: Any, going_on: Callable[[Training], None]) -> None:
        (training,) = trainings
        assert folders[1].exists()
        assert PromotionState.load(folder.promotion).candidates["head"].run_id is not None
        report = {"step": 100, "loss": 1.5, "kl": 0.1, "data_position": 80, "tokens": 1280}
        best = {"best_step": 100, "best_loss": 1.5, "best_kl": 0.1, "best_dir": str(folder.trial("head") / "trained")}
        done(training, TrainingResult(1.5, [report | best]), None)

    monkeypatch.setattr(steps_module, "stage", recorded)
    monkeypatch.setattr(steps_module, "run_all", run_all)
    steps.train()
    total = runs[0].job.milestones[-1]
    assert opened == [{"arguments": ("full trainings", total, "steps"), "start": 60}]
    assert not folders[1].exists()
    steps.catch_up()
    assert former.run_id is None, "it had not begun"
    steps._track(former)
    run_id = former.run_id
    assert run_id is not None and tracker.client.get_run(run_id).info.status == "RUNNING"
    steps.catch_up()
    assert tracker.client.get_run(run_id).info.status == "KILLED" and former.run_id == run_id
