"""Work of a search ahead of its trials: it converts later candidates, and reserves nodes.

Searcher, scheduler and journal are not involved. A candidate that will be tried regardless of
earlier reports is converted into the search's library by a separate task; its trial finds it there
(`orchestrator.search.trials.conversions`).
"""

from __future__ import annotations

import contextlib
import shutil
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import ray
from ray.exceptions import RayError

from orchestrator.cluster.capacity import (
    free_nodes,
    group_slots,
    live_nodes,
    room_to_plan,
    slots,
    worker_bundles,
)
from orchestrator.cluster.node_reservation import NodeReservation
from orchestrator.cluster.placement import Demand, task_options
from orchestrator.cluster.pool_client import worker_groups
from orchestrator.cluster.ray_tasks import cancel_unfinished
from orchestrator.search.callbacks import DriverCallback
from orchestrator.search.candidates import Candidate
from orchestrator.search.searchers import ResumableSearcher
from orchestrator.search.trials.context import SearchSession, TrialContext
from orchestrator.search.trials.conversions import ConversionLibrary, conversion_key
from orchestrator.search.trials.untrained import watched_facts
from orchestrator.storage import records
from orchestrator.storage.journal import History

CHECK_SECONDS = 2.0
_UNRESERVED_SECONDS = 15.0
"""Between two looks at what to reserve, while nothing is, as on a cluster without an autoscaler."""


def convert_ahead(candidate: Candidate, context: TrialContext, folder: Path) -> None:
    """Convert a candidate into the search's library. A Ray task.

    It does nothing if the candidate's trial, or another task, does it already.

    Args:
        candidate: A later candidate.
        context: What trials share.
        folder: Used instead of a trial's folder, by this task alone.
    """
    library = ConversionLibrary.of_search(context.folder)
    key = conversion_key(candidate, context)
    with library.turn(key, wait=False) as first:
        if first and not library.has(key):
            watched_facts(candidate, context, folder)


@dataclass
class _AheadTask:
    """A conversion under way.

    Attributes:
        reference: Reference of the Ray task.
        started: On the monotonic clock, like `blocks_since`.
        blocks_since: When workers first needed its resources; None while they do not.
    """

    reference: Any
    folder: Path
    started: float
    blocks_since: float | None = None

    def overdue(self, now: float) -> bool:
        """Return whether workers have waited for it as long as it had run before."""
        since = self.blocks_since
        return since is not None and now - since > since - self.started


class PlanAhead(DriverCallback):
    """Converts later candidates on idle GPUs, and keeps the library small.

    A task starts only if the present nodes have room for it in addition to the workers of all
    training trials: no node is added for it. If workers then need its GPU, they wait as long as the
    task has run until then; after that it is stopped, and its trial makes the plan itself.
    """

    def __init__(
        self,
        session: SearchSession,
        searcher: ResumableSearcher,
        history: History,
        named: Sequence[Candidate],
    ) -> None:
        self.session = session
        self._named = named
        self._searcher = searcher
        self._history = history
        self._demand = Demand.of(session.config)
        self._library = ConversionLibrary.of_search(session.context.folder)
        self._tasks: dict[str, _AheadTask] = {}
        self._tried: set[str] = set()
        self._begun: dict[str, str] = {}
        self._checked_at = 0.0
        self._ends = 0
        self.limit = session.config.resources.plan_ahead if session.context.task else 0

    def upcoming(self) -> dict[str, Candidate]:
        """Return the later candidates that are converted ahead, by the key of their conversion.

        Conversions that a running trial uses are left out, such as one with another learning rate.
        """
        if not self.limit:
            return {}
        config = self.session.config
        context = self.session.context
        for trial, candidate in self._history.configs.items():
            if trial not in self._begun:
                self._begun[trial] = conversion_key(Candidate.from_config(candidate), context)
        begun = set(self._begun.values())
        candidates: dict[str, Candidate] = {}
        rates = max(len(arm.learning_rates or config.learning_rates) for arm in config.arms)
        alike = rates * len(config.seeds)
        alike *= max(1, len(config.search.distillations))
        for candidate in self._searcher.upcoming((self.limit + 1) * alike):
            key = conversion_key(candidate, context)
            if key not in begun and len(candidates) < self.limit:
                candidates.setdefault(key, candidate)
        return candidates

    def on_step_end(self, iteration: int, trials: list, **info: Any) -> None:
        now = time.monotonic()
        if self.limit and now - self._checked_at >= CHECK_SECONDS:
            self._checked_at = now
            self._collect()
            with contextlib.suppress(RayError):  # the head is busy or away
                self._give_way(now)
                self._start(now)
        if len(self._history.ends) != self._ends:
            self._ends = len(self._history.ends)
            self._library.remove_unneeded(self._needed())

    def on_experiment_end(self, trials: list, **info: Any) -> None:
        """Stop running conversions; if no trial will follow, remove the library too."""
        for key in list(self._tasks):
            self._end(key)
        if not self._history.open:
            self._library.remove()

    def _needed(self) -> set[str]:
        """Return the keys of the conversions that later trials, or trials at rung 0, begin with."""
        history = self._history
        at_rung_zero = [
            Candidate.from_config(history.configs[trial])
            for trial in history.open
            if not history.records[trial].rungs
        ]
        candidates = (*at_rung_zero, *self._named[len(history.configs) :])
        keys = {conversion_key(candidate, self.session.context) for candidate in candidates}
        return keys | self.upcoming().keys()

    def _collect(self) -> None:
        ended = [key for key, task in self._tasks.items() if _ended(task.reference)]
        for key in ended:
            shutil.rmtree(self._tasks.pop(key).folder, ignore_errors=True)

    def _occupied(self) -> tuple[int, int]:
        """Return the numbers of trials that train and of tasks that plan."""
        training, planning = running_trials(self._history)
        return training, planning + len(self._tasks)

    def _give_way(self, now: float) -> None:
        if not self._tasks:
            return
        blocks = not room_to_plan(live_nodes(), self._demand, *self._occupied())
        for key, task in list(self._tasks.items()):
            task.blocks_since = (task.blocks_since or now) if blocks else None
            if task.overdue(now):
                self._end(key)
                return

    def _start(self, now: float) -> None:
        """Start one task where there is room; the next check looks at the rest."""
        for key, candidate in self.upcoming().items():
            if key in self._tasks or key in self._tried or self._library.has(key):
                continue
            training, planning = self._occupied()
            fits = room_to_plan(live_nodes(), self._demand, training, planning + 1)
            if not fits or not slots(free_nodes(), self._demand.task.bundle):
                return
            self._tried.add(key)  # what fails, its trial says
            folder = self._library.root / "ahead" / key
            options: Any = task_options(self.session.config)
            remote: Any = ray.remote(max_retries=0, **options)(convert_ahead)
            reference = remote.remote(candidate, self.session.context, folder)
            self._tasks[key] = _AheadTask(reference, folder, now)
            return

    def _end(self, key: str) -> None:
        task = self._tasks.pop(key)
        cancel_unfinished([task.reference])
        shutil.rmtree(task.folder, ignore_errors=True)


def running_trials(history: History) -> tuple[int, int]:
    """Return the numbers of trials that train and of trials that plan."""
    running = [trial for trial in history.records.values() if trial.status == records.RUNNING]
    planning = sum(not trial.rungs for trial in running)
    return len(running) - planning, planning


def _ended(reference: Any) -> bool:
    return bool(ray.wait([reference], timeout=0)[0])


class HoldNodes(DriverCallback):
    """Makes the autoscaler keep idle worker nodes while later trials need them."""

    def __init__(self, session: SearchSession, history: History, expected: int) -> None:
        config = session.config
        self._shape = Demand.of(config).shape
        self._history = history
        self._expected = expected
        self._parallel = config.resources.max_concurrent
        self._pool = session.context.pool
        self._nodes = NodeReservation(str(session.folder.root))
        self._due = 0.0
        self.active = config.resources.hold_nodes and len(config.rungs.steps) > 1

    def bundles(self) -> list[dict[str, float]]:
        """Return the worker bundles that trials need later, limited to running nodes.

        The groups of workers that exist are left out, since Ray Train requests them. Another
        search may count the same nodes.
        """
        needed = self._expected - len(self._history.configs) + len(self._history.open)
        if self._parallel != "auto":
            needed = min(needed, int(self._parallel))
        live = live_nodes()
        groups = min(needed, group_slots(live, self._shape)) - self._existing_groups()
        return worker_bundles(live, self._shape, max(0, groups))

    def _existing_groups(self) -> int:
        """Return the number of groups of workers that Ray Train requests nodes for."""
        if self._pool is not None:
            return worker_groups(self._pool)
        training, _ = running_trials(self._history)
        return training

    def on_step_end(self, iteration: int, trials: list, **info: Any) -> None:
        now = time.monotonic()
        if self.active and now >= self._due:
            reserved = False
            with contextlib.suppress(RayError, ValueError):  # the head is busy, the pool is gone
                reserved = self._nodes.hold(self.bundles())
            # More often than an autoscaler looks, which would see a new group of workers twice
            self._due = now + (CHECK_SECONDS if reserved else _UNRESERVED_SECONDS)

    def on_experiment_end(self, trials: list, **info: Any) -> None:
        self._nodes.release()
