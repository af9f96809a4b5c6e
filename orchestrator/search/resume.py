"""Searcher and scheduler with a journal: a killed search goes on as if nothing had happened.

Tune sees `JournaledSearch` and `JournaledScheduler`; both hand on to the search's own. What these answer is written to
the journal before Tune acts on it. A resumed search tells a fresh searcher and a fresh scheduler all that the journal
holds, gives Tune the trials that had not ended, under their old names, and then goes on asking the searcher. A trial
that starts again reports everything again; what was decided about it stays decided.
"""

from __future__ import annotations

import logging
import re
from collections import deque
from pathlib import Path
from types import SimpleNamespace
from typing import Any

from ray.tune.experiment import Trial
from ray.tune.schedulers import FIFOScheduler, TrialScheduler
from ray.tune.search import Searcher
from ray.tune.search.search_generator import SearchGenerator

from orchestrator.cluster.session import last_error
from orchestrator.search.schedulers import RungScheduler
from orchestrator.search.searchers import ResumableSearcher
from orchestrator.storage import journal as events
from orchestrator.storage.journal import History, Journal, JournalError, result_of, unwritable
from orchestrator.training.run import DISK_FULL, Failures, lost

logger = logging.getLogger(__name__)


def error_of(trial: Any) -> str:
    """What went wrong in a trial, in one line: the last exception of its log, else the last line."""
    if not trial.error_file or not Path(trial.error_file).exists():
        return "unknown error"
    return last_error(Path(trial.error_file).read_text(encoding="utf-8", errors="replace"))


def disk_failed(error: BaseException | str) -> bool:
    """Whether Tune, or a trial, has ended because a file could not be written."""
    return re.search(DISK_FULL, str(error)) is not None


class SteadyTrial(Trial):
    """A trial that starts again when it has lost its machines, but not after an error of its own."""

    was_lost = False
    _failures = Failures()

    def handle_error(self, exc: Any = None) -> None:
        super().handle_error(exc)
        self._failures = self._failures.another(int((self.last_result or {}).get("step", -1)))
        self.was_lost = exc is not None and lost(exc)

    def should_recover(self) -> bool:
        return self.was_lost and self._failures.retries_left


class JournaledScheduler(FIFOScheduler):
    """`inner` with its decisions in a journal; it is told of each report once."""

    def __init__(self, inner: RungScheduler, journal: Journal) -> None:
        super().__init__()
        self.inner, self._journal, self._history = inner, journal, journal.history
        self._known: set[str] = set()
        self.fresh: tuple[str, int] | None = None  # the report that Tune is dealing with, if it was not told before
        self.failed: dict[str, Any] = {}

    def on_trial_add(self, tune_controller: Any, trial: Any) -> None:
        """A trial that starts again is added once."""
        if trial.trial_id not in self._known:
            self._known.add(trial.trial_id)
            self.inner.on_trial_add(tune_controller, trial)

    def on_trial_result(self, tune_controller: Any, trial: Any, result: dict) -> str:
        self.fresh = None
        if "step" not in result:
            return TrialScheduler.CONTINUE
        key = (trial.trial_id, int(result["step"]))
        if key in self._history.decisions:
            # One that was paused and runs has been chosen to go on
            stopped = self._history.decisions[key] == TrialScheduler.STOP
            return TrialScheduler.STOP if stopped else TrialScheduler.CONTINUE
        kept = result_of(result)
        decision = self.inner.on_trial_result(tune_controller, trial, kept)
        if trial.trial_id in self.inner.copies:
            kept["copy_of"] = self.inner.copies[trial.trial_id]
        self._journal.append(events.REPORT, trial=trial.trial_id, result=kept, decision=decision)
        self.fresh = key
        return decision

    def on_trial_complete(self, tune_controller: Any, trial: Any, result: dict) -> None:
        self.inner.on_trial_complete(tune_controller, trial, result)

    def on_trial_error(self, tune_controller: Any, trial: Any) -> None:
        """Whether the trial starts again is not known yet: `JournaledSearch` hands on the end."""
        self.failed[trial.trial_id] = trial

    def on_trial_remove(self, tune_controller: Any, trial: Any) -> None:
        self.inner.on_trial_remove(tune_controller, trial)

    def choose_trial_to_run(self, tune_controller: Any) -> Any:
        chosen = self.inner.choose_trial_to_run(tune_controller)
        if chosen is not None and chosen.trial_id in self._history.paused:
            self._journal.append(events.ADVANCE, trial=chosen.trial_id)
        return chosen


class JournaledSearch(SearchGenerator):
    """Trials of an interrupted search first, then those that `searcher` suggests, while there are slots for them.

    Trials are called t0000, t0001, ... in the order of their suggestion, in this search and in one that resumes it.
    """

    def __init__(self, searcher: Searcher, scheduler: JournaledScheduler, journal: Journal) -> None:
        super().__init__(searcher)
        self._scheduler, self._journal, self._history = scheduler, journal, journal.history
        self._slots = scheduler.inner.slots
        self._counter = len(self._history.configs)
        self._waiting = deque(self._history.open)

    def is_finished(self) -> bool:
        return not self._waiting and super().is_finished()

    def create_trial_if_possible(self, experiment_spec: dict) -> Trial | None:
        if self._waiting:
            paused = self._waiting[0] in self._history.paused
            if self._slots.full and not paused:
                return None
            trial_id = self._waiting.popleft()
            trial = self._trial(experiment_spec, trial_id, self._history.configs[trial_id])
            if paused:
                trial.set_status(Trial.PAUSED)
            return trial
        if self._slots.full or self._slots.promised:
            return None
        trial_id = f"t{self._counter:04d}"
        config = self.searcher.suggest(trial_id)
        if config == Searcher.FINISHED:
            self._finished = True
            return None
        if config is None:
            return None
        self._journal.append(events.TRIAL, trial=trial_id, config=config)
        self._counter += 1
        return self._trial(experiment_spec, trial_id, config)

    def _trial(self, spec: dict, trial_id: str, config: dict) -> Trial:
        return SteadyTrial(
            spec["run"],
            config={**spec.get("config", {}), **config},
            trial_id=trial_id,
            experiment_tag=trial_id,
            storage=spec["storage"],
            placement_group_factory=spec["resources_per_trial"],
            stopping_criterion=spec["stop"],
            checkpoint_config=spec["checkpoint_config"],
            trial_name_creator=spec["trial_name_creator"],
            trial_dirname_creator=spec["trial_dirname_creator"],
            log_to_file=spec["log_to_file"],
        )

    def on_trial_result(self, trial_id: str, result: dict) -> None:
        if self._scheduler.fresh is not None and self._scheduler.fresh[0] == trial_id:
            self.searcher.on_trial_result(trial_id, result)

    def on_trial_complete(self, trial_id: str, result: dict | None = None, error: bool = False) -> None:
        if trial_id in self._history.ends:
            return
        told = trial_id in self._history.told
        end: dict[str, Any] = {"trial": trial_id, "error": None, "trace": None, "lost": False, "bare": result is None}
        if error:
            trial = self._scheduler.failed.pop(trial_id)
            reason = error_of(trial)
            if disk_failed(reason):  # no end of its own: what is left of the search would end in the same way
                raise JournalError(f"{self._journal.path.parent}: {unwritable(reason)}")
            end |= {"error": reason, "trace": trial.error_file, "lost": getattr(trial, "was_lost", False)}
            self._scheduler.inner.on_trial_error(None, trial)
        self._journal.append(events.END, **end)
        if not told:
            self.searcher.on_trial_complete(trial_id, result=result, error=error)

    def save_to_dir(self, dirpath: str, session_str: str = "") -> None:
        """Nothing: the journal is the state."""


def replay(history: History, searcher: ResumableSearcher, scheduler: RungScheduler) -> None:
    """Tell a fresh searcher and a fresh scheduler what the journal holds, in the order in which it happened.

    Nothing runs afterwards: the open trials take their slots when Tune has them back. The searcher is asked for
    nothing: what another version of a library would suggest makes no difference.
    """
    trials: dict[str, Any] = {}
    ended: set[str] = set()
    for event in history.events:
        kind, trial_id = event["event"], event.get("trial", "")
        if kind == events.TRIAL:
            config = event["config"]
            searcher.add_trial(trial_id, config)
            trials[trial_id] = SimpleNamespace(trial_id=trial_id, config=config, status=Trial.RUNNING, last_result={})
            scheduler.on_trial_add(None, trials[trial_id])
        elif kind == events.REPORT:
            result, trial = event["result"], trials[trial_id]
            trial.last_result = result
            decision = scheduler.on_trial_result(None, trial, result)
            if decision != event["decision"]:
                logger.warning("%s: %s was decided, now it would be %s", trial_id, event["decision"], decision)
            trial.status = Trial.PAUSED if event["decision"] == events.PAUSE else Trial.RUNNING
            if event["decision"] != TrialScheduler.STOP:
                searcher.on_trial_result(trial_id, result)
        elif kind == events.ADVANCE:
            trials[trial_id].status = Trial.RUNNING
            scheduler.advance(trial_id)
        elif kind == events.END:
            trial, failed = trials[trial_id], event["error"] is not None
            trial.status = Trial.ERROR if failed else Trial.TERMINATED
            if failed:
                scheduler.on_trial_error(None, trial)
            else:
                scheduler.on_trial_complete(None, trial, trial.last_result)
            if trial_id not in ended:
                reported = None if failed or event.get("bare") else trial.last_result or None
                searcher.on_trial_complete(trial_id, result=reported, error=failed)
            ended.add(trial_id)
    scheduler.slots.taken.clear()


def settle(journal: Journal) -> None:
    """Write the ends that a kill has kept from the journal, and open again what was lost for its machines' sake.

    A trial that was stopped, or has reported its last rung, has nothing left to do.
    """
    history = journal.history
    if history.interrupted:
        journal.append(events.RESUME)
    for trial_id in history.open:
        record = history.records[trial_id]
        stopped = history.decisions.get((trial_id, record.step)) == TrialScheduler.STOP
        if record.rungs and (stopped or record.probe or record.last.get("rung") == history.rungs - 1):
            journal.append(events.END, trial=trial_id, error=None, trace=None, lost=False, bare=False)
    for trial_id, end in list(history.ends.items()):
        if end["lost"]:
            journal.append(events.AGAIN, trial=trial_id)
