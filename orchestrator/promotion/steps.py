"""The steps of a promotion: train, check, register. Each is written down when it is done."""

from __future__ import annotations

import contextlib
import json
import time
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import yaml

from attention.base.progress import ProgressStage, stage
from attention.io import checkpoint
from orchestrator.checkpoints import base_of
from orchestrator.cluster.placement import task_options
from orchestrator.cluster.ray_tasks import on_cluster
from orchestrator.promotion.gate import check_candidates, gate_settings
from orchestrator.promotion.measuring import artifacts_of, metrics_of
from orchestrator.promotion.model_card import write_promoted_card
from orchestrator.promotion.registry import (
    LINEAGE,
    gate_tags,
    lineage_of,
    lineage_tags,
    register_candidate,
    settle_aliases,
)
from orchestrator.promotion.state import (
    BASELINE,
    FAILED,
    PASSED,
    PENDING,
    PROMOTED,
    REFUSED,
    REGISTERED,
    TRAINED,
    BaselineModel,
    PromotionEntry,
    PromotionState,
    TrainedModel,
)
from orchestrator.promotion.training import Training, TrainingResult, best_model, run_all
from orchestrator.search.trials.context import SearchSession
from orchestrator.storage import records
from orchestrator.storage.json_files import write_json
from orchestrator.storage.records import TrialRecord
from orchestrator.tracking.errors import TrackingError
from orchestrator.tracking.logged_model import write_mlmodel
from orchestrator.tracking.metrics import MetricPoint, point
from orchestrator.tracking.run_metadata import datasets_of, trial_params
from orchestrator.tracking.runs import NOTE, Dataset
from orchestrator.tracking.sync import TrackedRun
from orchestrator.training.run import TrainingFollower, TrainingReport
from trainers.jobs.checkpoints import AddressAwayError


@dataclass(frozen=True)
class PromotionSteps:
    """The steps of a promotion, each written down when it is done."""

    session: SearchSession
    state: PromotionState
    trials: dict[str, TrialRecord]

    def save(self) -> None:
        """Write `promotion.json`."""
        self.session.control.check()
        self.state.save(self.session.folder.promotion)

    def train(self) -> None:
        """Train every pending entry to its number of steps.

        A trial that is candidate and baseline is trained once.
        """
        entries: dict[str, list[PromotionEntry]] = {}
        for entry in (*self.state.baselines.values(), *self.state.candidates.values()):
            if entry.status == PENDING:
                entries.setdefault(entry.trial_id, []).append(entry)
        trainings = [
            Training.of(self.trials[trial_id], alike[0].steps, self.session)
            for trial_id, alike in entries.items()
        ]
        self._begin_trainings(trainings, entries)

        def on_end(training: Training, result: TrainingResult | None, error: str | None) -> None:
            for entry in entries[training.trial.trial_id]:
                self._end_training(entry, training, result, error)
            self.save()
            if error is None and training.run is not None:  # only the weights are exported
                with contextlib.suppress(OSError):  # their address is away: they stay
                    training.run.remove_checkpoints()
                    for steps in self.state.replaced(training.trial.trial_id):
                        Training.of(training.trial, steps, self.session).clear()

        followers = {
            training.trial.trial_id: TrainingFollower(training.run, training.start)
            for training in trainings
            if training.run is not None
        }

        def on_progress(training: Training) -> None:
            self.session.control.check()
            # Where the address of its checkpoints is away: the next time
            with contextlib.suppress(OSError):
                trial_id = training.trial.trial_id
                milestones, lines = followers[trial_id].look()
                if trial_id in tracked:
                    self._add_points(entries[trial_id], self._course((*milestones, *lines)))
                elif all(self._track(entry) for entry in entries[trial_id]):
                    tracked.add(trial_id)
                progress.to(sum(followers[key].step for key in followers) - starts)

        tracked: set[str] = set()
        starts = sum(training.start for training in trainings if training.run is not None)
        progress = ProgressStage("full trainings")
        for training in trainings:
            if training.run is not None:
                on_progress(training)  # the run is there before the training is
        self.save()  # with the ids of the runs
        steps = sum(one.total - one.start for one in trainings)
        try:
            with stage("full trainings", steps, "steps", start=progress.done) as progress:
                run_all(trainings, self.session, on_end, on_progress)
        except (KeyboardInterrupt, SystemExit):
            for alike in entries.values():
                for entry in alike:
                    if entry.status == PENDING:
                        self._track(entry, records.KILLED)
            raise

    def _begin_trainings(
        self, trainings: list[Training], entries: Mapping[str, list[PromotionEntry]]
    ) -> None:
        """Claim the folders of the trainings, and enter from which step each one counts."""
        for training in trainings:
            if not self._is_trained(training.trial.trial_id, training.total):
                self._claim(training)
            for entry in entries[training.trial.trial_id]:
                entry.offset = training.run.offset if training.run else None
        if trainings:
            self.save()
            total = trainings[0].total
            print(f"\npromotion: {len(trainings)} training(s) to {total} steps", flush=True)

    def _is_trained(self, trial_id: str, steps: int) -> bool:
        """Whether another entry has the weights of this training already."""
        return any(
            (entry.trial_id, entry.steps) == (trial_id, steps)
            and entry.status not in (PENDING, FAILED)
            for entry in (*self.state.baselines.values(), *self.state.candidates.values())
        )

    def _claim(self, training: Training) -> None:
        if changed := training.claim():
            print(
                f"promotion: {training.trial.name} was begun with another {', '.join(changed)}; "
                "it starts again",
                flush=True,
            )

    def _end_training(
        self,
        entry: PromotionEntry,
        training: Training,
        result: TrainingResult | None,
        error: str | None,
    ) -> None:
        """Enter the result of a training.

        The best of all measured models of the trial is exported, and its loss is also the
        baseline's.
        """
        trial = training.trial
        entry.trained_at = time.time()
        best = None
        if result is not None:
            folder = self.session.folder.trial(trial.trial_id)
            best = best_model(trial, folder, result.reports)
        if result is None or best is None:
            entry.status = FAILED
            entry.reasons = [error or "no weights are left of any step that was measured"]
        else:
            entry.status = TRAINED
            entry.trained = TrainedModel(
                folder=str(best.folder),
                loss=best.loss,
                kl=best.kl,
                step=best.step,
                description=best.what,
                data_position=best.position,
                tokens=best.tokens,
                last_loss=result.loss,
                untrained_loss=trial.untrained.get("loss") if trial.untrained else None,
                original_loss=self.session.context.original_loss,
            )
            if best.step == 0:
                note = f"training did not improve it; the {best.what} is kept"
                print(f"promotion: {trial.name}: {note}", flush=True)
        self.save()
        self._track(entry)

    def catch_up(self) -> None:
        """Bring MLflow up to date: a driver may have been killed, or the store away."""
        state = self.state
        for entry in (*state.earlier, *state.baselines.values(), *state.candidates.values()):
            if entry.trained_at is not None:
                self._track(entry)
        for entry in state.earlier:
            if entry.trained_at is None and entry.run_id is not None:  # replaced in its training
                self._track(entry, records.KILLED)

    def _track(self, entry: PromotionEntry, status: str | None = None) -> bool:
        """Write the MLflow run of an entry; `status`, if it is not that of the entry.

        Returns:
            False where the address of its reports is away: `catch_up` of the next run does it.
        """
        try:
            run = self.run_of(entry)
        except AddressAwayError:
            return False
        run = replace(run, status=status or run.status)
        entry.run_id = self.session.mlflow.put(run) or entry.run_id
        return True

    def run_of(self, entry: PromotionEntry) -> TrackedRun:
        """Return the MLflow run of an entry."""
        trial = self.trials[entry.trial_id]
        training = Training.of(trial, entry.steps, self.session)
        if training.run is not None and entry.offset is not None:
            # Where it began may be gone, and the settings of the promotion other ones by now
            training = replace(training, run=replace(training.run, offset=entry.offset))
        texts: dict[str, str] = {}
        if entry.gate is not None:
            texts["gate.yaml"] = yaml.safe_dump(dict(entry.gate.checks), sort_keys=True)
            texts[LINEAGE] = json.dumps(entry.lineage or {}, indent=1, sort_keys=True)
            texts |= artifacts_of(entry.gate)
        files = [self.session.folder.trial(entry.trial_id) / "plan.json"]
        if entry.model:
            files.append(Path(entry.model) / "README.md")
        return TrackedRun(
            f"{entry.name} · {entry.role}",
            self._tags(entry),
            _run_status(entry),
            {**trial_params(trial), **training.params, "promotion_steps": entry.steps},
            self._points(entry, training),
            texts,
            files,
            self._datasets(),
        )

    def _tags(self, entry: PromotionEntry) -> dict[str, Any]:
        note = (
            f"Full training of trial `{entry.trial_id}` as {entry.role} of a promotion: "
            f"{entry.name} of the KV cache."
        )
        tags: dict[str, Any] = {
            "headfold.kind": f"promotion {entry.role}",
            "trial_id": entry.trial_id,
            "promotion_steps": entry.steps,
        }
        if (attempt := self.state.attempt(entry)) > 1:
            tags["promotion_attempt"] = attempt
        if entry.trained is not None and entry.trained.description is not None:
            tags["shipped"] = entry.trained.description
            note += f"\n\nShipped: {entry.trained.description}."
        if entry.status == FAILED:
            tags["error"] = entry.reasons[0]
        if entry.gate is not None and entry.lineage is not None:
            tags |= lineage_tags(entry.lineage)
            tags |= gate_tags(entry.gate)
            tags["reasons"] = "; ".join(entry.reasons)
        if entry.status == PROMOTED:
            tags["gate"] = PROMOTED
            tags["version"] = entry.version
        tags[NOTE] = note
        return tags

    def _points(self, entry: PromotionEntry, training: Training) -> list[dict[str, Any]]:
        """Return the course of a training, and a last point once it has ended."""
        reports = training.reports()
        original = self.session.context.original_loss
        course = (*reports, *training.curve())
        if any(entry is earlier for earlier in self.state.earlier):
            # A later attempt writes to the same folder
            course = [report for report in course if report["time"] <= (entry.trained_at or 0)]
        points = self._course(course)
        if entry.trained_at is not None:
            trial = self.trials[entry.trial_id]
            metrics: dict[str, Any] = {**entry.comparison, "best_loss": entry.loss}
            if entry.gate is not None:
                metrics |= metrics_of(entry.gate)
            if not reports:  # the trial had reached these steps before
                last_loss = entry.trained.last_loss if entry.trained else None
                metrics |= _report_metrics({"loss": last_loss}, original)
            metrics["kv_bytes_per_token"] = entry.kv_bytes_per_token or trial.kv_bytes_per_token
            points.append(point(metrics, entry.steps, entry.trained_at))
        return points

    def _add_points(self, entries: Iterable[PromotionEntry], points: list[MetricPoint]) -> None:
        """Add points to the runs of the entries."""
        for entry in entries:
            run_id = self.session.mlflow.add_points(self._tags(entry), points)
            entry.run_id = run_id or entry.run_id

    def _course(self, reports: Iterable[TrainingReport]) -> list[MetricPoint]:
        """Return a point for each report of a training."""
        original = self.session.context.original_loss
        return [
            point(_report_metrics(report, original), report["step"], report["time"])
            for report in reports
        ]

    def _datasets(self) -> list[Dataset]:
        """Return the texts of a promotion, whose training text may be its own."""
        context = self.session.context
        files = {
            "train": context.promotion_file or context.train_file,
            "eval": context.eval_file,
            "calibration": context.calibration_file,
        }
        if context.test_file is not None:
            files["test"] = context.test_file
        return datasets_of(self.session.config, files, promotion=True)

    def check(self) -> None:
        """Check the trained candidates; one that is refused stays, with the reasons.

        It is checked again once the gate's settings are others, or its baseline is there that was
        missing.
        """
        settings = gate_settings(self.session.config)
        entries = [e for e in self.state.candidates.values() if self._is_due(e, settings)]
        for entry in entries:
            if (trained := self._trained_baseline(entry)) is not None:
                entry.baseline = BaselineModel(trained.folder, trained.loss, trained.step)
        if not entries:
            return
        for entry, result in check_candidates(entries, self.session):
            if isinstance(result, str):  # it stays trained: the next run checks it again
                entry.reasons = [f"its checks failed: {result}"]
                print(f"promotion: {entry.name}: {entry.reasons[0]}", flush=True)
                self.save()
                continue
            trial = self.trials[entry.trial_id]
            entry.gate = result.record
            entry.reasons = result.reasons
            entry.gate_settings = settings
            entry.lineage = lineage_of(entry, trial, result.digests, self.session)
            passed = not entry.reasons
            if result.record.model is not None:
                self._complete_folders(entry, result.record.model, result.record.served, passed)
            entry.status = PASSED if passed else REFUSED
            self.save()
            self._track(entry)

    def _trained_baseline(self, entry: PromotionEntry) -> TrainedModel | None:
        """Return the baseline that was trained for as many steps as a candidate, if it is there."""
        goal = (BASELINE, entry.kv_ratio, entry.steps)
        for other in (*self.state.baselines.values(), *reversed(self.state.earlier)):
            if (other.role, other.kv_ratio, other.steps) == goal and other.trained is not None:
                return other.trained
        return None

    def _is_due(self, entry: PromotionEntry, settings: Mapping[str, Any]) -> bool:
        """Return whether a candidate is to be checked, perhaps again."""
        if entry.status != REFUSED:
            return entry.status == TRAINED
        missed = entry.baseline is None and self._trained_baseline(entry) is not None
        if not missed and entry.gate_settings == settings:
            return False
        if entry.trained is None or not Path(entry.trained.folder).is_dir():
            print(f"promotion: {entry.name} stays refused: its weights are gone", flush=True)
            return False
        how = "against its baseline" if missed else "by other settings"
        print(f"promotion: {entry.name} is checked again {how}", flush=True)
        return True

    def _complete_folders(
        self, entry: PromotionEntry, model: str, served: str | None, passed: bool
    ) -> None:
        """Write lineage, model card and digests into what the gate has exported."""
        assert entry.lineage is not None
        config = self.session.config
        write_json(Path(model) / LINEAGE, entry.lineage)
        if passed:
            write_mlmodel(model, str(base_of(entry.lineage["model"]["path"])["base"]))
        for folder in filter(None, (model, served)):
            if passed:
                write_promoted_card(entry, config, self.session.folder.original, folder)
            on_cluster(task_options(config), "digests", checkpoint.write_digests, folder)

    def register(self) -> None:
        """Register versions, then set aliases.

        If the registry refuses, that is reported; the next run tries again.
        """
        entries = list(self.state.candidates.values())
        if not any(entry.status in (PASSED, REGISTERED) for entry in entries):
            return
        try:
            registry = self.session.mlflow.registry()
            for entry in entries:
                if entry.status == PASSED:
                    self._track(entry)  # its version needs the id of its run
                    register_candidate(entry, self.session, registry)
                    self.save()
            settle_aliases(self.state, self.session.config, registry)
        except TrackingError as error:
            for entry in entries:
                if entry.status in (PASSED, REGISTERED):
                    entry.reasons = [str(error)]
            remedy = f"run `headfold promote {self.session.folder.root}` to finish it"
            print(f"promotion: {error}; {remedy}", flush=True)
            self.save()
            return
        for entry in entries:
            if entry.status == PROMOTED:
                entry.reasons = []
                self._track(entry)


def _run_status(entry: PromotionEntry) -> str:
    if entry.status == FAILED:
        return records.FAILED
    ended = entry.status in (REFUSED, PROMOTED)
    if ended or (entry.role == BASELINE and entry.status == TRAINED):
        return records.DONE
    return records.RUNNING


def _report_metrics(report: Mapping[str, Any], original_loss: float) -> dict[str, Any]:
    """Return a report with the increase of its loss over the original model's.

    The best step is left out: it has a separate point at the end.
    """
    metrics = {key: value for key, value in report.items() if not key.startswith("best_")}
    if metrics.get("loss") is not None:
        metrics["loss_increase"] = metrics["loss"] - original_loss
    return metrics
