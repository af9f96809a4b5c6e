"""MLflow, brought up to date with what lies on disk: whenever it can be reached, and as often as one likes.

Journal, settings and promotion say what MLflow is to hold (`Run`); `MlflowSync` finds each run by its tags, or makes
it, and logs what is missing. Doing so twice changes nothing: points have the times of their reports, and a store keeps
equal points once. So nothing is lost while the store is away, and nothing needs to be kept for it: the next try, the
end of the search, or its resumption brings it up to date.
"""

from __future__ import annotations

import hashlib
import json
import logging
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import Any

from attention.base.messages import reason
from orchestrator.storage.records import ENDED, RUNNING
from orchestrator.tracking.errors import TrackingError, is_away, redact
from orchestrator.tracking.runs import STATUS, Dataset, Tracker

logger = logging.getLogger(__name__)

FOUND_BY = ("headfold.kind", "headfold.folder", "trial_id", "promotion_steps", "promotion_attempt")
"""Tags that tell the runs of a search apart."""
DONE_TAG = "headfold.synced"
"""Set last, on a run that has ended: the digest of all that it was to hold."""
PAUSE_SECONDS = (2.0, 60.0)
"""Between two attempts to reach a store that is away: the first one, and the longest."""

Key = tuple[tuple[str, str], ...]


@dataclass
class TrackedRun:
    """What MLflow is to hold of one run. `tags`: it is found by those of FOUND_BY. `points`: values of metrics, each
    with its `step` and `time` (seconds since 1970). `files`: artifacts; one that is not there is left out. `status`
    None: as it is. `run_id`: of a search's own run, if it is known. `started`, `ended`: in seconds since 1970, where
    that is known; else it is when the store is told."""

    name: str
    tags: dict[str, Any]
    status: str | None = RUNNING
    params: Mapping[str, Any] = field(default_factory=dict)
    points: list[dict[str, Any]] = field(default_factory=list)
    texts: dict[str, str] = field(default_factory=dict)
    files: list[Path] = field(default_factory=list)
    datasets: Sequence[Dataset] = ()
    run_id: str | None = None
    started: float | None = None
    ended: float | None = None

    @property
    def key(self) -> Key:
        return key_of(self.tags)

    @property
    def digest(self) -> str:
        return hashlib.sha256(json.dumps(asdict(self), sort_keys=True, default=str).encode()).hexdigest()[:16]


@dataclass(frozen=True)
class SharedMetadata:
    """What all runs of a search have in common; a run's own tags, params and datasets come first."""

    tags: Mapping[str, Any] = field(default_factory=dict)
    params: Mapping[str, Any] = field(default_factory=dict)
    datasets: Sequence[Dataset] = ()

    def completed(self, run: TrackedRun) -> TrackedRun:
        tags, params = {**self.tags, "mlflow.runName": run.name, **run.tags}, {**self.params, **run.params}
        return replace(run, tags=tags, params=params, datasets=run.datasets or self.datasets)


def key_of(tags: Mapping[str, Any]) -> Key:
    return tuple((name, str(tags[name])) for name in FOUND_BY if name in tags)


@dataclass
class _Known:
    """A run as far as the store is known to have it."""

    wanted: TrackedRun
    run_id: str | None = None
    status: str | None = None
    digest: str | None = None
    sent: set[str] = field(default_factory=set)


class MlflowSync:
    """The runs of one search: `parent`, and children of it. Only registering a model needs the store there and then.

    `connect` opens the store, and raises TrackingError if it is away.
    """

    def __init__(
        self,
        connect: Callable[[], Tracker],
        parent: TrackedRun,
        tracker: Tracker | None = None,
        shared: SharedMetadata | None = None,
    ) -> None:
        self._connect, self._tracker, self._shared = connect, tracker, shared or SharedMetadata()
        self._parent = parent.key
        self._runs: dict[Key, _Known] = {}
        self._waiting: dict[Key, _Known] = {}
        self._children: dict[Key, Any] | None = None
        self._delay, self._next_try, self._away_said = 0.0, 0.0, False
        self._lock = threading.RLock()  # what the search waits for is told from a thread of its own
        self.put(parent)

    @property
    def parent_id(self) -> str | None:
        """The store's id of the parent; None as long as it was never reached."""
        return self._runs[self._parent].run_id

    @property
    def waiting(self) -> int:
        """How many runs the store may not have as they should be."""
        return len(self._waiting)

    def put(self, run: TrackedRun) -> str | None:
        """Bring one run up to date, and all that wait. Its id; None as long as the store is away."""
        run = self._shared.completed(run)
        with self._lock:
            known = self._waiting[run.key] = self._runs.setdefault(run.key, _Known(run))
            known.wanted = run
            if time.monotonic() >= self._next_try:
                self._send_all()
            return known.run_id

    def flush(self) -> bool:
        """Try now. Whether the store has everything."""
        with self._lock:
            self._send_all()
            return not self.waiting

    def registry(self) -> Tracker:
        """The store, for what cannot wait; it has everything up to now. Raises TrackingError if it is away."""
        if not self.flush() or self._tracker is None:
            raise TrackingError("the MLflow store is away; go on with --resume when it is back")
        return self._tracker

    def _send_all(self) -> None:
        try:
            for key, known in list(self._waiting.items()):
                self._send(known)
                del self._waiting[key]
        except Exception as error:
            self._wait(error)
            return
        self._delay = 0.0
        if self._away_said:
            logger.warning("MLflow is back, and up to date")
            self._away_said = False

    def _wait(self, error: Exception) -> None:
        first, longest = PAUSE_SECONDS
        self._delay = min(longest, 2 * self._delay or first)
        self._next_try = time.monotonic() + self._delay
        self._tracker = self._children = None  # a run may have been made whose answer was lost
        if not self._away_said:
            why = reason(error, redact)
            logger.warning("MLflow is away (%s); it is brought up to date as soon as it can be reached", why)
            self._away_said = True

    def _send(self, known: _Known) -> None:
        if self._tracker is None:
            self._tracker = self._connect()
        run, tracker, digest = known.wanted, self._tracker, known.wanted.digest
        run_id = known.run_id = known.run_id or self._take_up(known, tracker)
        if known.digest == digest:
            return
        sends = {"params": partial(tracker.params, run_id, run.params)}
        if run.datasets:
            sends["datasets"] = partial(tracker.datasets, run_id, run.datasets)
        sends |= {f"point {point!r}": partial(tracker.log, run_id, point) for point in run.points}
        sends |= {f"tag {key} {value}": partial(tracker.tags, run_id, {key: value}) for key, value in run.tags.items()}
        sends |= {f"text {file} {text}": partial(tracker.text, run_id, text, file) for file, text in run.texts.items()}
        known.sent -= {what for what in known.sent - sends.keys() if what.startswith("tag ")}  # may come back
        there = {file: file.stat().st_mtime_ns for file in run.files if file.exists()}
        sends |= {f"file {file} {stamp}": partial(tracker.file, run_id, file) for file, stamp in there.items()}
        for what, send in sends.items():
            self._send_once(known, what, send)
        if run.status is not None and known.status != STATUS[run.status]:
            tracker.set_status(run_id, run.status, run.ended)
            known.status = STATUS[run.status]
        known.digest = digest
        if run.status in ENDED:
            self._send_once(known, f"tag {DONE_TAG} {digest}", partial(tracker.tags, run_id, {DONE_TAG: digest}))

    def _send_once(self, known: _Known, what: str, send: Callable[[], None]) -> None:
        """Once; what the store refuses is told to the user and does not hold up the rest."""
        if what in known.sent:
            return
        try:
            send()
        except Exception as error:
            if is_away(error):
                raise
            name = known.wanted.name
            logger.warning("MLflow has refused the %s of %s: %s", redact(what)[:80], name, reason(error, redact))
        known.sent.add(what)

    def _take_up(self, known: _Known, tracker: Tracker) -> str:
        """Find the run, or make it; its id."""
        run, is_parent = known.wanted, known.wanted.key == self._parent
        if is_parent:
            run_there = tracker.search_run(run.run_id, dict(run.key))
        else:
            if self._children is None:
                assert self.parent_id is not None
                self._children = {key_of(child.data.tags): child for child in tracker.children(self.parent_id)}
            run_there = self._children.get(run.key)
        tags = dict(run.key)
        if run_there is None:
            tags["mlflow.runName"] = run.name
            parent = None if is_parent else self.parent_id
            run_id = tracker.start(run.name, parent=parent, tags=tags, at=run.started)
            known.status = STATUS[RUNNING]
        else:
            run_id, known.status, tags = run_there.info.run_id, run_there.info.status, run_there.data.tags
            if run_there.data.params:
                known.sent.add("params")  # all in one go; and they never change
            if run_there.inputs.dataset_inputs:
                known.sent.add("datasets")
            if run.status is None or known.status == STATUS[run.status]:
                known.digest = tags.get(DONE_TAG)
        known.sent |= {f"tag {name} {value}" for name, value in tags.items()}
        return run_id


def parent_run(folder: Path, waits_for: str | None = None, **more: Any) -> TrackedRun:
    """The run of a search itself, which all its others are children of. `waits_for`: nodes that are slow to come, "" if
    it waits no longer."""
    tags = {"headfold.kind": "search", "headfold.folder": str(folder)}
    waits = {} if waits_for is None else {"headfold.waits_for": waits_for or "nothing"}
    return TrackedRun(folder.name, tags | waits, **more)
