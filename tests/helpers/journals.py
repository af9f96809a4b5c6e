"""Journals of searches that have never run: written by the one writer, from the records that a reader is to find."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from orchestrator.storage import records
from orchestrator.storage.journal import END, INTERRUPT, NAME, PAUSE, REPORT, RUN, TRIAL, Journal
from orchestrator.storage.records import TrialRecord

FACTS = (
    "kv_bytes_per_token", "cache_bytes_measured", "cache_tokens", "parameters", "plan_digest", "actual_kv_ratio",
    "calibration_loss", "similarity", "notes", "copy_of",
)  # fmt: skip
CONFIG = ("recipe", "kv_ratio", "learning_rate", "choices", "probe", "seed")


def write_journal(folder: Path, trials: Sequence[TrialRecord] = ()) -> Path:
    """Write the journal of a search with these trials, replacing an existing one. All that have not ended were
    interrupted if one was."""
    (folder / NAME).unlink(missing_ok=True)
    journal = Journal(folder / NAME)
    journal.begin(rungs_of(trials))
    for trial in trials:
        name = trial.trial_id
        journal.append(TRIAL, trial=name, config={key: getattr(trial, key) for key in CONFIG})
        if trial.run_id is not None:
            journal.append(RUN, trial=name, run_id=trial.run_id)
        for place, result in enumerate(results_of(trial, journal.history.rungs)):
            last = place == len(trial.rungs) - 1
            when = result.pop("timestamp", None)
            decision = PAUSE if last and trial.status == records.WAITING else "CONTINUE"
            journal.append(REPORT, trial=name, result=result, decision=decision, time=when)
        if trial.status in records.ENDED and trial.status != records.KILLED:
            error = (trial.error or "it failed") if trial.status == records.FAILED else None
            journal.append(END, trial=name, error=error, trace=trial.error_log, lost=False, bare=False)
    if any(trial.status == records.KILLED for trial in trials):
        journal.append(INTERRUPT)
    actual = {name: record.status for name, record in journal.history.records.items()}
    assert actual == {trial.trial_id: trial.status for trial in trials}
    return journal.path


def rungs_of(trials: Sequence[TrialRecord]) -> int:
    """As many rungs as the completed ones have reported, and more than those that were stopped."""
    given = [t.last["rung"] + 1 for t in trials if t.status == records.DONE and "rung" in t.last]
    stopped = [len(t.rungs) + 1 for t in trials if t.status != records.DONE]
    return max(given) if given else max([1, *stopped, *(len(t.rungs) for t in trials)])


def results_of(trial: TrialRecord, rungs: int) -> list[dict[str, Any]]:
    results: list[dict[str, Any]] = []
    for place, rung in enumerate(trial.rungs):
        over = trial.status == records.DONE and place == len(trial.rungs) - 1
        results.append({"rung": rungs - 1 if over else place, **rung})
    if results:
        results[0] |= {key: value for key in FACTS if (value := getattr(trial, key)) not in (None, [])}
        results[0] |= {"phases": trial.seconds} if trial.seconds else {}
        results[-1] |= {"relaxation_history": trial.relaxation} if trial.relaxation else {}
    return results
