"""The steps of a promotion: train, check, register. Each is written down when it is done, and done once."""

from __future__ import annotations

import contextlib
import json
import time
from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import yaml

from attention.base.progress import ProgressStage, stage
from attention.io import checkpoint
from orchestrator.checkpoints import base_of
from orchestrator.cluster.placement import task_options
from orchestrator.cluster.tasks import on_cluster
from orchestrator.promotion.gate import check_candidate
from orchestrator.promotion.measuring import artifacts_of, metrics_of
from orchestrator.promotion.model_card import write_promoted_card
from orchestrator.promotion.registry import LINEAGE, gate_tags, lineage_of, lineage_tags, register, settle_aliases
from orchestrator.promotion.state import (
    BASELINE,
    FAILED,
    PASSED,
    PENDING,
    PROMOTED,
    REFUSED,
    REGISTERED,
    TRAINED,
    Entry,
    PromotionState,
)
from orchestrator.promotion.training import Training, best_model, run_all
from orchestrator.search.trials.context import SearchSession
from orchestrator.storage import records
from orchestrator.storage.json_files import write_json
from orchestrator.storage.records import TrialRecord
from orchestrator.tracking.errors import TrackingError
from orchestrator.tracking.logged_model import write_mlmodel
from orchestrator.tracking.metrics import point
from orchestrator.tracking.run_metadata import NOTE, datasets_of, trial_params
from orchestrator.tracking.runs import Dataset
from orchestrator.tracking.sync import TrackedRun


@dataclass(frozen=True)
class PromotionSteps:
    """The steps of a promotion, each written down when it is done."""

    session: SearchSession
    state: PromotionState
    trials: dict[str, TrialRecord]

    def save(self) -> None:
        self.state.save(self.session.folder.promotion)

    def train(self) -> None:
        """Bring every pending entry to its full number of steps; a trial that is candidate and baseline once."""
        entries: dict[str, list[Entry]] = {}
        for entry in (*self.state.baselines.values(), *self.state.candidates.values()):
            if entry.status == PENDING:
                entries.setdefault(entry.trial_id, []).append(entry)
        trainings = [Training.of(self.trials[i], mine[0].steps, self.session) for i, mine in entries.items()]
        if trainings:
            print(f"\npromotion: {len(trainings)} training(s) to {trainings[0].total} steps", flush=True)

        def done(training: Training, loss: float | None, error: str | None) -> None:
            for entry in entries[training.trial.trial_id]:
                self._trained(entry, training, loss, error)
            self.save()
            if error is None and training.run is not None:  # what is shipped are the weights
                training.run.remove_checkpoints()

        def going_on(training: Training) -> None:
            with contextlib.suppress(OSError):  # the address of its checkpoints is away: the next time
                for entry in entries[training.trial.trial_id]:
                    self._tell(entry)
                told.to(sum(one.latest_step() - one.start for one in trainings))

        told = ProgressStage("full trainings")
        for training in (t for t in trainings if t.run is not None):
            going_on(training)  # the run is there before the training is
        try:
            with stage("full trainings", sum(one.total - one.start for one in trainings), "steps") as told:
                run_all(trainings, self.session, done, going_on)
        except (KeyboardInterrupt, SystemExit):
            for entry in (entry for mine in entries.values() for entry in mine if entry.status == PENDING):
                self.session.mlflow.put(replace(self.run_of(entry), status=records.KILLED))
            raise

    def _trained(self, entry: Entry, training: Training, last_loss: float | None, error: str | None) -> None:
        """Take over what a training gave. The best of all that was measured on a trial's way is what is shipped, and
        what a baseline counts with."""
        trial, entry.trained_at = training.trial, time.time()
        best = None
        if last_loss is not None:
            best = best_model(trial, self.session.folder.trial(trial.trial_id), training.reports())
        if best is None:
            entry.status, entry.reasons = FAILED, [error or "no weights are left of any step that was measured"]
        else:
            entry.status, entry.folder, entry.best_step, entry.shipped = TRAINED, str(best.folder), best.step, best.what
            entry.loss, entry.kl, entry.data_position, entry.last_loss = best.loss, best.kl, best.position, last_loss
            entry.untrained_loss = (trial.untrained or {}).get("loss")
            entry.original_loss = self.session.context.original_loss
            if best.step == 0:
                words = f"no training made it better; what counts is the {best.what}"
                print(f"promotion: {training.trial.name}: {words}", flush=True)
        self.save()
        self._tell(entry)

    def catch_up(self) -> None:
        """Bring MLflow to where the promotion is: a driver may have been killed, or the store away."""
        for entry in (*self.state.earlier, *self.state.baselines.values(), *self.state.candidates.values()):
            if entry.trained_at is not None:
                self._tell(entry)

    def _tell(self, entry: Entry) -> None:
        entry.run_id = self.session.mlflow.put(self.run_of(entry)) or entry.run_id

    def run_of(self, entry: Entry) -> TrackedRun:
        """What MLflow is to hold of an entry."""
        trial_id, steps = entry.trial_id, entry.steps
        tags = {"headfold.kind": f"promotion {entry.role}", "trial_id": trial_id, "promotion_steps": steps}
        goal = (trial_id, entry.role, steps)
        if again := sum((e.trial_id, e.role, e.steps) == goal for e in self.state.before(entry)):
            tags["promotion_attempt"] = again + 1
        training, texts = Training.of(self.trials[trial_id], steps, self.session), {}
        reports = training.reports()
        original = self.session.context.original_loss
        points = [point(_of_report(r, original), r["step"], r["time"]) for r in (*reports, *training.curve())]
        if entry.trained_at is not None:
            values = entry.compared | {"best_loss": entry.loss} | metrics_of(entry)
            if not reports:  # the trial had got there before
                values |= _of_report({"loss": entry.last_loss}, original)
            values |= {"kv_bytes_per_token": entry.kv_bytes_per_token or self.trials[trial_id].kv_bytes_per_token}
            points.append(point(values, steps, entry.trained_at))
        if entry.shipped is not None:
            tags["shipped"] = entry.shipped
        if entry.status == FAILED:
            tags["error"] = entry.reasons[0]
        if entry.gate:
            tags |= {**lineage_tags(entry.lineage), **gate_tags(entry), "reasons": "; ".join(entry.reasons)}
            texts = {
                "gate.yaml": yaml.safe_dump(entry.checks, sort_keys=True),
                LINEAGE: json.dumps(entry.lineage, indent=1, sort_keys=True),
            }
        texts |= artifacts_of(entry)
        if entry.status == PROMOTED:
            tags |= {"gate": PROMOTED, "version": entry.version}
        over = entry.status in (REFUSED, PROMOTED) or (entry.role == BASELINE and entry.status == TRAINED)
        status = records.FAILED if entry.status == FAILED else records.DONE if over else records.RUNNING
        trial = self.trials[trial_id]
        params = {**trial_params(trial), **training.params, "promotion_steps": steps}
        what = (
            f"Full training of trial `{trial_id}` as {entry.role} of a promotion: {entry.name} of the checkpoint's KV"
        )
        tags[NOTE] = f"{what}.\n\nShipped: {entry.shipped}." if entry.shipped else f"{what}."
        files = [self.session.folder.trial(trial_id) / "plan.json"]
        files += [Path(entry.model) / "README.md"] if entry.model else []
        return TrackedRun(f"{entry.name} · {entry.role}", tags, status, params, points, texts, files, self._datasets())

    def _datasets(self) -> list[Dataset]:
        """The texts of a promotion, whose training text may be its own."""
        context = self.session.context
        files = {"train": context.promotion_file or context.train_file, "eval": context.eval_file}
        return datasets_of(self.session.config, files | {"calibration": context.calibration_file}, promotion=True)

    def check(self, entry: Entry) -> None:
        """The gate, for a trained candidate; what it refuses is kept with the reasons."""
        if entry.status != TRAINED:
            return
        baseline = self.state.baselines.get(f"{entry.kv_ratio:g}")
        if baseline is not None and baseline.folder is not None:
            entry.baseline_loss, entry.baseline_step = baseline.loss, baseline.best_step
            entry.baseline_folder = baseline.folder
        digests = check_candidate(entry, self.session)
        entry.lineage = lineage_of(entry, self.trials[entry.trial_id], digests, self.session)
        if entry.model is not None:
            write_json(Path(entry.model) / LINEAGE, entry.lineage)
            if not entry.reasons:
                write_mlmodel(entry.model, str(base_of(entry.lineage["model"]["path"])["base"]))
            for written in filter(None, (entry.model, entry.served)):
                if not entry.reasons:
                    write_promoted_card(entry, self.session.config, self.session.folder.original, written)
                on_cluster(task_options(self.session.config), "digests", checkpoint.write_digests, written)
        entry.status = REFUSED if entry.reasons else PASSED
        self.save()
        self._tell(entry)

    def register(self) -> None:
        """Versions, then aliases. A registry that refuses is told; the next run goes on from the same place."""
        entries = list(self.state.candidates.values())
        if not any(entry.status in (PASSED, REGISTERED) for entry in entries):
            return
        try:
            registry = self.session.mlflow.registry()
            for entry in entries:
                if entry.status == PASSED:
                    self._tell(entry)  # its version needs the id of its run
                    register(entry, self.session, registry)
                    self.save()
            settle_aliases(self.state, self.session.config, registry)
        except TrackingError as error:
            for entry in entries:
                entry.reasons = [str(error)] if entry.status in (PASSED, REGISTERED) else entry.reasons
            print(f"promotion: {error}; run `headfold promote {self.session.folder.root}` to finish it", flush=True)
            self.save()
            return
        for entry in entries:
            if entry.status == PROMOTED:
                entry.reasons = []
                self._tell(entry)


def _of_report(report: Mapping[str, Any], original: float) -> dict[str, Any]:
    """A report with the increase of its loss over the original model's, and without the best so far, which has a point
    of its own at the end."""
    values = {key: value for key, value in report.items() if not key.startswith("best_")}
    return values | ({} if values.get("loss") is None else {"loss_increase": values["loss"] - original})
