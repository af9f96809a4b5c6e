"""What the driver does while Tune runs: write MLflow, show the progress line."""

from __future__ import annotations

import logging
import sys
import time
from pathlib import Path
from typing import Any

from ray.tune import Callback

from orchestrator.cluster.errors import last_error
from orchestrator.reporting.durations import clock
from orchestrator.reporting.status import tokens_per_second
from orchestrator.storage import records as results
from orchestrator.storage.journal import INTERRUPT, RUN, Journal
from orchestrator.storage.records import TrialRecord, compact, percent
from orchestrator.tracking.runs import METRICS, Tracker, redact

logger = logging.getLogger(__name__)


class SearchLog(Callback):
    """Keeps the MLflow child runs and the progress line of a search up to date with its journal.

    `expected` is the number of trials; `tracker` None leaves MLflow out. A failing MLflow call is reported once and
    never ends the search: the journal is the source.
    """

    def __init__(
        self, journal: Journal, tracker: Tracker | None, parent_run: str | None, expected: int, base_loss: float
    ) -> None:
        self.journal, self.tracker, self.parent_run = journal, tracker, parent_run
        self.expected, self.base_loss = expected, base_loss
        self.errors: list[str] = []
        self.started = time.time()
        self._shown = 0.0

    @property
    def records(self) -> dict[str, TrialRecord]:
        return self.journal.history.records

    # ---- Tune's hooks: each comes after the journal has the event --------------------------------------------------

    def on_trial_start(self, iteration: int, trials: list, trial: Any, **info: Any) -> None:
        self._track(self._start_run, self.records[trial.trial_id])
        self._show()

    def on_trial_result(self, iteration: int, trials: list, trial: Any, result: dict, **info: Any) -> None:
        record = self.records[trial.trial_id]
        if "step" in result and result["step"] == record.step:
            self._track(self._log_rung, record, record.last)
        self._show()

    def on_trial_complete(self, iteration: int, trials: list, trial: Any, **info: Any) -> None:
        self._end(self.records[trial.trial_id])

    def on_trial_error(self, iteration: int, trials: list, trial: Any, **info: Any) -> None:
        self._end(self.records[trial.trial_id])

    def on_experiment_end(self, trials: list, **info: Any) -> None:
        """Trials that had not ended (Ctrl-C) are marked; a resumed search takes them up again."""
        if (unended := self.journal.history.open) and self.journal.failed is None:
            self.journal.append(INTERRUPT)
            for trial_id in unended:
                self._track(self._end_run, self.records[trial_id])
        self._show(last=True)

    def catch_up(self) -> None:
        """Bring MLflow to where the journal is: a driver may have been killed between the two."""
        for trial_id, record in self.records.items():
            if record.run_id is None:
                self._track(self._start_run, record)
            for rung in record.rungs:
                self._track(self._log_rung, record, rung)
            if trial_id in self.journal.history.ends:
                self._track(self._end_run, record)
        if self.records:
            self._show(last=True)

    # ---- MLflow -----------------------------------------------------------------------------------------------

    def _track(self, action: Any, record: TrialRecord, *more: Any) -> None:
        if self.tracker is None:
            return
        try:
            action(self.tracker, record, *more)
        except Exception as error:
            if not self.errors:
                told = redact(str(error))
                logger.warning("MLflow: %s (the search goes on; its records are in %s)", told, self.journal.path)
            self.errors.append(redact(str(error)))

    def _start_run(self, tracker: Tracker, record: TrialRecord) -> None:
        if record.run_id is not None:
            tracker.resume(record.run_id)
            return
        name = f"{record.recipe} {record.kv_ratio:g}"
        tags = {"trial_id": record.trial_id, "headfold.kind": "trial"}
        run_id = tracker.start(name, parent=self.parent_run, tags=tags)
        facts = {"kv_ratio": record.kv_ratio, "learning_rate": record.learning_rate}
        tracker.params(run_id, {"recipe": record.recipe, **facts, "choices": record.choices})
        self.journal.append(RUN, trial=record.trial_id, run_id=run_id)

    def _log_rung(self, tracker: Tracker, record: TrialRecord, rung: dict[str, Any]) -> None:
        if record.run_id is None:
            return
        tracker.metrics(record.run_id, {k: rung[k] for k in METRICS if k in rung}, step=rung["step"])
        if rung is record.rungs[0]:
            facts = ("kv_bytes_per_token", "cache_bytes_measured", "parameters", "actual_kv_ratio")
            tracker.metrics(record.run_id, {k: getattr(record, k) for k in facts})
            means = (record.similarity or {}).get("means", {})
            tracker.metrics(record.run_id, {f"similarity_{k}": value for k, value in means.items()})
            tracker.tags(record.run_id, {"plan_digest": record.plan_digest})
            folder = self.journal.path.parent / "trials" / record.trial_id
            for file in ("plan.json", "recipe.json"):
                if (folder / file).exists():
                    tracker.file(record.run_id, folder / file)
        elif record.relaxation and rung is record.rungs[1]:  # each later report carries it again
            named = [{k if k == "step" else f"relaxation_{k}": v for k, v in p.items()} for p in record.relaxation]
            tracker.series(record.run_id, named)
            tracker.metrics(record.run_id, {"remaining_distance": record.remaining_distance}, step=rung["step"])

    def _end_run(self, tracker: Tracker, record: TrialRecord) -> None:
        if record.run_id is None:
            return
        tracker.tags(record.run_id, {"headfold.status": record.status})
        if record.error:
            tracker.tags(record.run_id, {"error": record.error})
        if record.copy_of is not None:
            tracker.tags(record.run_id, {"copy_of": record.copy_of})
        tracker.end(record.run_id, record.status)

    # ---- progress ---------------------------------------------------------------------------------------------

    def _end(self, record: TrialRecord) -> None:
        self._track(self._end_run, record)
        self._show()

    def _show(self, last: bool = False) -> None:
        """The progress, once a second at most; `last`: now, whenever it was shown before."""
        now = time.time()
        if not last and now - self._shown < 1:
            return
        self._shown = now
        rungs = self.journal.history.rungs
        line = progress_line(list(self.records.values()), self.expected, rungs, self.base_loss, now - self.started)
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
