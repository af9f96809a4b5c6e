"""What the driver does while Tune runs: keep the records, write MLflow, show the progress line.

Tune pickles its callbacks for `Tuner.restore`, so they hold paths, ids and plain values only.
"""

from __future__ import annotations

import logging
import math
import sys
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from ray.tune import Callback

from orchestrator.cluster.errors import last_error
from orchestrator.reporting.durations import clock
from orchestrator.reporting.status import tokens_per_second
from orchestrator.search.journal import History
from orchestrator.storage import records as results
from orchestrator.storage.records import (
    TrialRecord,
    compact,
    percent,
    save_change,
    save_trials,
    stored_trials,
)
from orchestrator.tracking.runs import METRICS, Tracker, redact

logger = logging.getLogger(__name__)
MANY = 64


def record_of(trial_id: str, config: Mapping[str, Any]) -> TrialRecord:
    """A fresh record of a trial, from what the searcher has suggested."""
    return TrialRecord(
        trial_id=trial_id,
        recipe=config["recipe"],
        kv_ratio=config["kv_ratio"],
        learning_rate=config["learning_rate"],
        choices=config["choices"],
        probe=bool(config.get("probe", False)),
        seed=config.get("seed"),
    )


def _never(trial_id: str) -> None:
    return None


class SearchLog(Callback):
    """Keeps `trials.json`, the MLflow child runs and the progress line of a search up to date.

    `expected` is the number of trials, `rungs` the rungs of each; `tracker` None leaves MLflow out. A failing MLflow
    call is reported once and never ends the search: the records on disk are the source.
    """

    def __init__(
        self,
        trials_file: str | Path,
        tracker: Tracker | None,
        parent_run: str | None,
        expected: int,
        rungs: int,
        base_loss: float,
    ) -> None:
        self.trials_file, self.tracker, self.parent_run = str(trials_file), tracker, parent_run
        self.expected, self.rungs, self.base_loss = expected, rungs, base_loss
        self.records: dict[str, TrialRecord] = {r.trial_id: r for r in stored_trials(trials_file)}
        self.errors: list[str] = []
        self.waits: Callable[[str], bool | None] = _never  # whether a trial is paused at its rung
        self.copy_of: Callable[[str], str | None] = _never  # the first trial that leads to the same model
        self.started = time.time()
        self._shown, self._changes = 0.0, 0

    # ---- Tune's hooks -----------------------------------------------------------------------------------------

    def setup(self, *args: Any, **info: Any) -> None:
        """Also called when a search is resumed: take over what the interrupted one had recorded."""
        self.records = {r.trial_id: r for r in stored_trials(self.trials_file)}
        self.started = time.time()

    def on_trial_start(self, iteration: int, trials: list, trial: Any, **info: Any) -> None:
        record = self.records.setdefault(trial.trial_id, record_of(trial.trial_id, trial.config))
        record.status, record.error = results.RUNNING, None
        self._track(self._start_run, record)
        self._update(record)

    def on_trial_result(self, iteration: int, trials: list, trial: Any, result: dict, **info: Any) -> None:
        record = self.records[trial.trial_id]
        if "loss" not in result or any(r["step"] == result["step"] for r in record.rungs):
            return  # one that was told before: the trial has started again
        relaxed_before = bool(record.relaxation)
        record.add(result)
        record.copy_of = self.copy_of(trial.trial_id)
        record.status = results.WAITING if self.waits(trial.trial_id) else results.RUNNING
        self._track(self._log_rung, record)
        if record.relaxation and not relaxed_before:
            self._track(self._log_relaxation, record)
        self._update(record)

    def on_trial_complete(self, iteration: int, trials: list, trial: Any, **info: Any) -> None:
        self._completed(self.records[trial.trial_id])

    def on_trial_error(self, iteration: int, trials: list, trial: Any, **info: Any) -> None:
        record = self.records.setdefault(trial.trial_id, record_of(trial.trial_id, trial.config))
        record.error, record.error_log = error_of(trial), trial.error_file
        self._end(record, results.FAILED)

    def on_experiment_end(self, trials: list, **info: Any) -> None:
        """Trials that had not ended (Ctrl-C) are marked; a resumed search takes them up again."""
        for record in self.records.values():
            if record.status not in results.ENDED:
                self._end(record, results.KILLED)
        self._update()
        if sys.stderr.isatty():
            sys.stderr.write("\n")

    def reconcile(self, history: History) -> None:
        """Bring records and MLflow to where the journal is: a driver may have been killed between the two."""
        for trial_id, config in history.configs.items():
            record = self.records.setdefault(trial_id, record_of(trial_id, config))
            if record.run_id is None and trial_id in history.results:
                self._track(self._start_run, record)
            known = {rung["step"] for rung in record.rungs}
            for step in sorted(set(history.results.get(trial_id, {})) - known):
                record.add(history.results[trial_id][step])
                self._track(self._log_rung, record)
            end = history.ends.get(trial_id)
            if end is None:
                record.status = results.WAITING
            elif end["error"] is not None:
                record.error, record.error_log = end["error"], end["trace"]
                if record.status != results.FAILED:
                    self._end(record, results.FAILED)
            elif record.status not in (results.DONE, results.STOPPED, results.COPY, results.FAILED):
                self._completed(record)
        if history.configs:
            self._update()

    def _completed(self, record: TrialRecord) -> None:
        if record.rungs and not math.isfinite(record.loss):
            record.error = (
                f"diverged: the held-out loss after {record.step} steps is not finite; lower the learning rate"
            )
            self._end(record, results.FAILED)
            return
        if record.copy_of is not None:
            self._end(record, results.COPY)
            return
        # Not by their number: a relaxation leaves out the rungs within it
        reached_end = record.probe or record.last.get("rung") == self.rungs - 1
        self._end(record, results.DONE if reached_end else results.STOPPED)

    # ---- MLflow -----------------------------------------------------------------------------------------------

    def _track(self, action: Any, record: TrialRecord) -> None:
        if self.tracker is None:
            return
        try:
            action(self.tracker, record)
        except Exception as error:
            if not self.errors:
                told = redact(str(error))
                logger.warning("MLflow: %s (the search goes on; its records are in %s)", told, self.trials_file)
            self.errors.append(redact(str(error)))

    def _start_run(self, tracker: Tracker, record: TrialRecord) -> None:
        if record.run_id is not None:
            tracker.resume(record.run_id)
            return
        name = f"{record.recipe} {record.kv_ratio:g}"
        tags = {"trial_id": record.trial_id, "headfold.kind": "trial"}
        record.run_id = tracker.start(name, parent=self.parent_run, tags=tags)
        facts = {"kv_ratio": record.kv_ratio, "learning_rate": record.learning_rate}
        tracker.params(record.run_id, {"recipe": record.recipe, **facts, "choices": record.choices})

    def _log_rung(self, tracker: Tracker, record: TrialRecord) -> None:
        if record.run_id is None:
            return
        last = record.last
        tracker.metrics(record.run_id, {k: last[k] for k in METRICS if k in last}, step=record.step)
        if len(record.rungs) == 1:
            facts = ("kv_bytes_per_token", "cache_bytes_measured", "parameters", "actual_kv_ratio")
            tracker.metrics(record.run_id, {k: getattr(record, k) for k in facts})
            means = (record.similarity or {}).get("means", {})
            tracker.metrics(record.run_id, {f"similarity_{k}": value for k, value in means.items()})
            tracker.tags(record.run_id, {"plan_digest": record.plan_digest})
            folder = Path(self.trials_file).parent / "trials" / record.trial_id
            for file in ("plan.json", "recipe.json"):
                if (folder / file).exists():
                    tracker.file(record.run_id, folder / file)

    def _log_relaxation(self, tracker: Tracker, record: TrialRecord) -> None:
        if record.run_id is not None:
            named = [{k if k == "step" else f"relaxation_{k}": v for k, v in p.items()} for p in record.relaxation]
            tracker.series(record.run_id, named)
            tracker.metrics(record.run_id, {"remaining_distance": record.remaining_distance}, step=record.step)

    def _end_run(self, tracker: Tracker, record: TrialRecord) -> None:
        if record.run_id is None:
            return
        tracker.tags(record.run_id, {"headfold.status": record.status})
        if record.error:
            tracker.tags(record.run_id, {"error": record.error})
        if record.copy_of is not None:
            tracker.tags(record.run_id, {"copy_of": record.copy_of})
        tracker.end(record.run_id, record.status)

    # ---- records and progress ---------------------------------------------------------------------------------

    def _end(self, record: TrialRecord, status: str) -> None:
        record.status = status
        self._track(self._end_run, record)
        self._update(record)

    def _update(self, changed: TrialRecord | None = None) -> None:
        """Keep what has changed (None: everything) and show the progress, once a second at most.

        All records are written together after as many changes as there are records, so that the cost of one change
        does not grow with their number.
        """
        self._changes += 1
        if changed is None or self._changes > max(MANY, len(self.records)):
            save_trials(self.trials_file, self.records.values())
            self._changes = 0
        else:
            save_change(self.trials_file, changed)
        now = time.time()
        if changed is not None and now - self._shown < 1:
            return
        self._shown = now
        line = progress_line(list(self.records.values()), self.expected, self.rungs, self.base_loss, now - self.started)
        if sys.stderr.isatty():
            sys.stderr.write(f"\r\x1b[2K{line}")
        else:
            sys.stderr.write(line + "\n")
        sys.stderr.flush()


def error_of(trial: Any) -> str:
    """What went wrong in a trial, in one line: the last exception of its log, else the last line."""
    if not trial.error_file or not Path(trial.error_file).exists():
        return "unknown error"
    return last_error(Path(trial.error_file).read_text(encoding="utf-8", errors="replace"))


def progress_line(records: list[TrialRecord], expected: int, rungs: int, base_loss: float, elapsed: float) -> str:
    """Trials done, running, stopped, failed; the best so far; the time left, from the share of rungs behind us."""
    count = {s: sum(r.status == s for r in records) for s in (*results.ENDED, results.RUNNING, results.WAITING)}
    ended = sum(count[s] for s in results.ENDED)
    parts = [
        f"{ended}/{expected} trials",
        f"{count[results.DONE]} done, {count[results.RUNNING]} running, {count[results.STOPPED]} stopped",
    ]
    if count[results.WAITING]:
        parts[-1] += f", {count[results.WAITING]} waiting"
    if count[results.COPY]:
        parts[-1] += f", {count[results.COPY]} the same as another"
    if count[results.FAILED]:
        parts[-1] += f", {count[results.FAILED]} failed"
    scored = [r for r in records if r.rungs and r.status != results.FAILED and not r.probe]
    if scored:
        best = {
            b: min((r for r in scored if r.kv_ratio == b), key=lambda r: r.loss) for b in {r.kv_ratio for r in scored}
        }
        told = ", ".join(
            f"{percent(b)} {r.loss - base_loss:+.3f} ({r.recipe})" for b, r in sorted(best.items(), reverse=True)
        )
        parts.append(f"best rise by share of the checkpoint's KV: {told}")
    if rate := tokens_per_second(records):
        parts.append(f"{compact(rate)} tokens/s")
    behind = sum(1.0 if r.status in results.ENDED else len(r.rungs) / rungs for r in records)
    if 0 < behind < expected:
        parts.append(f"{clock(elapsed * (expected - behind) / behind)} left")
    return f"[{clock(elapsed)}] " + " | ".join(parts)
