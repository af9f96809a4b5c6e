"""Callbacks of the driver while Tune runs: write MLflow, show the progress, set Ray's gauges."""

from __future__ import annotations

import math
import time
from collections import Counter
from typing import Any

from ray.tune import Callback

from attention.base.progress import ProgressStage
from attention.base.text import compact
from attention.ratios import percent
from orchestrator.cluster.ray_tasks import published_progress
from orchestrator.reporting.status import tokens_per_second
from orchestrator.storage import records as results
from orchestrator.storage.journal import INTERRUPT, RUN, Journal
from orchestrator.storage.records import TrialRecord
from orchestrator.storage.trial_names import name_trials
from orchestrator.tracking import gauges
from orchestrator.tracking.run_metadata import trial_run
from orchestrator.tracking.sync import MlflowSync

_MOST_SHOWN = 3  # trials whose planning the progress shows


class DriverCallback(Callback):
    """A callback whose state is not pickled."""

    def __getstate__(self) -> object:
        """Return nothing, and no password.

        Tune pickles its callbacks for its own resumption, which is never used.
        """
        return {}


class SearchLog(DriverCallback):
    """Brings MLflow's child runs, the progress and Ray's gauges up to date.

    Attributes:
        mlflow: Where the runs are; None for no MLflow.
        expected: Number of trials.
        stage: Shows the progress; it counts the rungs that are done.
    """

    def __init__(
        self, journal: Journal, mlflow: MlflowSync | None, expected: int, original_loss: float
    ) -> None:
        self.journal = journal
        self.mlflow = mlflow
        self.expected = expected
        self.original_loss = original_loss
        self.stage = ProgressStage("trials")
        self._shown = 0.0
        self._named = 0

    @property
    def records(self) -> dict[str, TrialRecord]:
        """The trials by id, each with its name."""
        trials = self.journal.history.records
        if len(trials) != self._named:  # a name depends on the other trials
            name_trials(trials.values())
            self._named = len(trials)
        return trials

    @property
    def rungs(self) -> tuple[int, int]:
        """Number of completed rungs, and of all; a finished trial counts with all its rungs."""
        each = self.journal.history.rungs
        done = (each if r.status in results.ENDED else len(r.rungs) for r in self.records.values())
        return sum(done), each * self.expected

    def planning(self) -> str:
        """Return the progress of a few of the trials that plan, convert and measure."""
        trials = self.journal.history.records  # by a separate thread, which gives no names
        running = [r for r in list(trials.values()) if r.status == results.RUNNING and not r.rungs]
        folder = self.journal.path.parent / "trials"
        lines = [
            (r.name, published_progress(str(folder / r.trial_id))) for r in running[:_MOST_SHOWN]
        ]
        return "; ".join(f"{name}: {line}" for name, line in lines if line)

    def on_trial_start(self, iteration: int, trials: list, trial: Any, **info: Any) -> None:
        self._track(self.records[trial.trial_id])
        self._show()

    on_trial_complete = on_trial_error = on_trial_start

    def on_trial_result(
        self, iteration: int, trials: list, trial: Any, result: dict, **info: Any
    ) -> None:
        self.on_trial_start(iteration, trials, trial)

    def on_experiment_end(self, trials: list, **info: Any) -> None:
        """Mark unfinished trials (Ctrl-C); a resumed search continues them."""
        if self.journal.history.open and self.journal.failed is None:
            self.journal.append(INTERRUPT)
        self.catch_up()

    def catch_up(self) -> None:
        """Bring MLflow up to date with the journal.

        A driver may have been killed between the two, or the store may have been away.
        """
        for record in self.records.values():
            self._track(record)
        if self.records:
            self._show(last=True)

    def _track(self, record: TrialRecord) -> None:
        if self.mlflow is None:
            return
        run_id = self.mlflow.put(trial_run(record, self.journal.path.parent))
        if run_id is not None and run_id != record.run_id and self.journal.failed is None:
            self.journal.append(RUN, trial=record.trial_id, run_id=run_id)

    def _show(self, last: bool = False) -> None:
        """Show the progress, at most once per second; with `last` in any case."""
        now = time.time()
        if not last and now - self._shown < 1:
            return
        self._shown = now
        records, search = list(self.records.values()), self.journal.path.parent.name
        increases = {
            ratio: best.loss - self.original_loss for ratio, best in best_so_far(records).items()
        }
        gauges.set_trial_gauges(search, (record.status for record in records), increases)
        gauges.set_gauge(gauges.BEHIND, self.mlflow.waiting if self.mlflow else 0, search=search)
        self.stage.to(self.rungs[0], progress_note(records, self.expected, self.original_loss))


def best_so_far(records: list[TrialRecord]) -> dict[float, TrialRecord]:
    """Return the trial of the lowest loss at each KV ratio, running ones included."""
    best: dict[float, TrialRecord] = {}
    for record in records:
        if math.isfinite(record.loss) and record.status != results.FAILED and not record.probe:
            best[record.kv_ratio] = min(
                best.get(record.kv_ratio, record), record, key=lambda r: r.loss
            )
    return best


def progress_note(records: list[TrialRecord], expected: int, original_loss: float) -> str:
    """Return the progress in words: trials by state, the best one, the speed."""
    count = Counter(record.status for record in records)
    common = (results.DONE, results.RUNNING, results.STOPPED)
    rare = {
        results.WAITING: "waiting",
        results.COPY: "the same as another",
        results.FAILED: "failed",
    }
    states = [f"{count[status]} {status}" for status in common]
    states += [f"{count[status]} {words}" for status, words in rare.items() if count[status]]
    if expected > len(records):
        states.append(f"{expected - len(records)} to come")
    parts = [", ".join(states)]
    if best := best_so_far(records):
        lowest = {
            ratio: (r.loss - original_loss, r.label) for ratio, r in sorted(best.items())[::-1]
        }
        increases = ", ".join(
            f"{percent(ratio)} {increase:+z.3f} {label}"
            for ratio, (increase, label) in lowest.items()
        )
        parts.append(f"best loss increase by KV ratio: {increases}")
    if rate := tokens_per_second(records):
        parts.append(f"{compact(rate)} tokens/s")
    return "; ".join(parts)
