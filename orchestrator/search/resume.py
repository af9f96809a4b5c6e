"""Searcher and scheduler with a journal, from which a killed search is resumed.

Tune sees `JournaledSearch` and `JournaledScheduler`; both pass calls to the search's own. Their
answers are written to the journal before Tune acts on them. A resumed search replays the journal to
a fresh searcher and a fresh scheduler, gives Tune the unfinished trials, under their old names, and
then continues with the searcher. A trial that starts again reports everything again; earlier
decisions about it stay.
"""

from __future__ import annotations

import logging
import re
from collections import deque
from collections.abc import Callable
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
    """Return the error of a trial in one line: the last exception of its log, or its last line."""
    if not trial.error_file or not Path(trial.error_file).exists():
        return "unknown error"
    return last_error(Path(trial.error_file).read_text(encoding="utf-8", errors="replace"))


def disk_failed(error: BaseException | str) -> bool:
    """Whether Tune, or a trial, stopped because a file could not be written."""
    return re.search(DISK_FULL, str(error)) is not None


class SteadyTrial(Trial):
    """A trial that starts again when it has lost its machines, but not after its own error.

    Attributes:
        checkpoint_step: The step of a trial's newest training checkpoint: a newer one means
            progress.
    """

    was_lost = False
    checkpoint_step: Callable[[str], int] | None = None
    _failures = Failures()

    def handle_error(self, exc: Any = None) -> None:
        super().handle_error(exc)
        reached = int((self.last_result or {}).get("step", -1))
        if self.checkpoint_step is not None:
            reached += self.checkpoint_step(self.trial_id)
        self._failures = self._failures.another(reached)
        self.was_lost = exc is not None and lost(exc)

    def should_recover(self) -> bool:
        return self.was_lost and self._failures.retries_left


class JournaledScheduler(FIFOScheduler):
    """A scheduler with its decisions in a journal; each report reaches it once.

    Attributes:
        inner: The search's own scheduler.
        fresh: Trial and step of the report that Tune is dealing with, if it is a new one.
        failed: Trials with an error, by id.
    """

    def __init__(self, inner: RungScheduler, journal: Journal) -> None:
        super().__init__()
        self.inner = inner
        self._journal = journal
        self._history = journal.history
        self._known: set[str] = set()
        self.fresh: tuple[str, int] | None = None
        self.failed: dict[str, Trial] = {}

    def on_trial_add(self, tune_controller: Any, trial: Any) -> None:
        """Add a trial; a restarted one is already there."""
        if trial.trial_id not in self._known:
            self._known.add(trial.trial_id)
            self.inner.on_trial_add(tune_controller, trial)

    def on_trial_result(self, tune_controller: Any, trial: Any, result: dict) -> str:
        self.fresh = None
        if "step" not in result:
            return TrialScheduler.CONTINUE
        key = (trial.trial_id, int(result["step"]))
        if key in self._history.decisions:
            # A trial that was paused and runs again was chosen to continue, unless its process has
            # died before the pause
            decision = self._history.decisions[key]
            waits = trial.trial_id in self._history.paused
            chosen = decision == TrialScheduler.PAUSE and not waits
            return TrialScheduler.CONTINUE if chosen else decision
        report = result_of(result)
        decision = self.inner.on_trial_result(tune_controller, trial, report)
        if trial.trial_id in self.inner.copies:
            report["copy_of"] = self.inner.copies[trial.trial_id]
        self._journal.append(events.REPORT, trial=trial.trial_id, result=report, decision=decision)
        self.fresh = key
        return decision

    def on_trial_complete(self, tune_controller: Any, trial: Any, result: dict) -> None:
        self.inner.on_trial_complete(tune_controller, trial, result)

    def on_trial_error(self, tune_controller: Any, trial: Any) -> None:
        """Remember a failed trial.

        Whether it restarts is not known yet: `JournaledSearch` passes the end on.
        """
        self.failed[trial.trial_id] = trial

    def on_trial_remove(self, tune_controller: Any, trial: Any) -> None:
        self.inner.on_trial_remove(tune_controller, trial)

    def choose_trial_to_run(self, tune_controller: Any) -> Any:
        if self._journal.failed is not None:  # an error elsewhere is only logged by Tune
            raise JournalError(self._journal.failed)
        chosen = self.inner.choose_trial_to_run(tune_controller)
        if chosen is not None and chosen.trial_id in self._history.paused:
            self._journal.append(events.ADVANCE, trial=chosen.trial_id)
        return chosen


class JournaledSearch(SearchGenerator):
    """Trials of an interrupted search first, then those that `searcher` suggests.

    A trial is suggested while there are slots. Trials are called t0000, t0001, ... in the order of
    their suggestion, in this search and in one that resumes it.
    """

    def __init__(
        self,
        searcher: Searcher,
        scheduler: JournaledScheduler,
        journal: Journal,
        checkpoint_step: Callable[[str], int] | None = None,
    ) -> None:
        super().__init__(searcher)
        self._checkpoint_step = checkpoint_step
        self._scheduler = scheduler
        self._journal = journal
        self._history = journal.history
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
        trial = SteadyTrial(
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
        trial.checkpoint_step = self._checkpoint_step
        return trial

    def on_trial_result(self, trial_id: str, result: dict) -> None:
        if self._scheduler.fresh is not None and self._scheduler.fresh[0] == trial_id:
            self.searcher.on_trial_result(trial_id, result)

    def on_trial_complete(
        self, trial_id: str, result: dict | None = None, error: bool = False
    ) -> None:
        if trial_id in self._history.ends:
            return
        reason = trace = None
        was_lost = False
        if error:
            trial = self._scheduler.failed.pop(trial_id)
            reason = error_of(trial)
            trace = trial.error_file
            was_lost = getattr(trial, "was_lost", False)
            if disk_failed(reason):
                # Stop the whole search: every other trial would fail in the same way
                raise JournalError(f"{self._journal.path.parent}: {unwritable(reason)}")
            self._scheduler.inner.on_trial_error(None, trial)
        self._journal.append(
            events.END,
            trial=trial_id,
            error=reason,
            trace=trace,
            lost=was_lost,
            bare=result is None,
        )
        self.searcher.on_trial_complete(trial_id, result=result, error=error)

    def save_to_dir(self, dirpath: str, session_str: str = "") -> None:
        """Save nothing: the journal is the state."""


def replay(history: History, searcher: ResumableSearcher, scheduler: RungScheduler) -> None:
    """Replay a journal to a new searcher and a new scheduler, in the order of its events.

    Nothing runs afterwards: the open trials take their slots when Tune has them back. The searcher
    suggests nothing: what another version of a library would suggest makes no difference.
    """
    trials: dict[str, SimpleNamespace] = {}
    for event in history.events:
        kind, trial_id = event["event"], event.get("trial", "")
        if kind == events.TRIAL:
            config = event["config"]
            searcher.add_trial(trial_id, config)
            trials[trial_id] = SimpleNamespace(
                trial_id=trial_id, config=config, status=Trial.RUNNING, last_result={}
            )
            scheduler.on_trial_add(None, trials[trial_id])
        elif kind == events.REPORT:
            result = dict(event["result"])
            trial = trials[trial_id]
            trial.last_result = result
            if (first := result.get("copy_of")) is not None:
                scheduler.copies[trial_id] = first
                decision = TrialScheduler.STOP
            else:
                decision = scheduler.on_trial_result(None, trial, result)
            if (decision, event["decision"]) == (events.PAUSE, TrialScheduler.CONTINUE):
                scheduler.advance(trial_id)  # the search was closing
            elif decision != event["decision"]:
                logger.warning(
                    "%s: %s was decided, now it would be %s", trial_id, event["decision"], decision
                )
            trial.status = Trial.PAUSED if event["decision"] == events.PAUSE else Trial.RUNNING
            if event["decision"] != TrialScheduler.STOP:
                searcher.on_trial_result(trial_id, result)
        elif kind == events.ADVANCE:
            trials[trial_id].status = Trial.RUNNING
            scheduler.advance(trial_id)
        elif kind == events.AGAIN:
            trials[trial_id].status = Trial.RUNNING
            searcher.reopen(trial_id)
            scheduler.on_trial_add(None, trials[trial_id])
        elif kind == events.END:
            trial, failed = trials[trial_id], event["error"] is not None
            trial.status = Trial.ERROR if failed else Trial.TERMINATED
            if failed:
                scheduler.on_trial_error(None, trial)
            else:
                scheduler.on_trial_complete(None, trial, trial.last_result)
            reported = None if failed or event.get("bare") else trial.last_result or None
            searcher.on_trial_complete(trial_id, result=reported, error=failed)
    scheduler.slots.taken.clear()


def settle(journal: Journal) -> None:
    """Write the trial ends that a kill prevented, and reopen trials that lost their machines.

    A trial that was stopped, or has reported its last rung, is done.
    """
    history = journal.history
    if history.interrupted:
        journal.append(events.RESUME)
    for trial_id in history.open:
        record = history.records[trial_id]
        stopped = history.decisions.get((trial_id, record.step)) == TrialScheduler.STOP
        if record.rungs and (
            stopped or record.probe or record.last.get("rung") == history.rungs - 1
        ):
            journal.append(
                events.END, trial=trial_id, error=None, trace=None, lost=False, bare=False
            )
    for trial_id, end in list(history.ends.items()):
        if end["lost"]:
            journal.append(events.AGAIN, trial=trial_id)
