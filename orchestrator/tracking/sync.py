"""MLflow, brought up to date with the files of a search whenever it can be reached.

The required content of MLflow (`TrackedRun`) follows from journal, settings and promotion;
`MlflowSync` finds each run by its tags, or creates it, and logs what is missing. Doing so twice
changes nothing: points have the times of their reports, and a store keeps equal points once. So
nothing is lost while the store cannot be reached, and nothing needs to be saved for it: the next
attempt, the end of the search, or its resumption brings it up to date.
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
from orchestrator.storage.json_files import read_if_there
from orchestrator.storage.paths import SearchFolder
from orchestrator.storage.records import ENDED, RUNNING
from orchestrator.tracking.errors import TrackingError, is_away, redact
from orchestrator.tracking.metrics import MetricPoint
from orchestrator.tracking.runs import REPORT, STATUS, Dataset, Tracker

logger = logging.getLogger(__name__)

_KEY_TAGS = (
    "headfold.kind",
    "headfold.folder",
    "headfold.id",
    "trial_id",
    "promotion_steps",
    "promotion_attempt",
)
"""Tags that identify a run of a search."""
_DIGEST_TAG = "headfold.synced"
"""Set last, on a finished run: the digest of its `TrackedRun`."""
PAUSE_SECONDS = (2.0, 60.0)
"""Seconds between two attempts to reach a store: the first interval, and the longest."""
_SLOW_SECONDS = 5.0
"""An attempt that fails after more is one that had no answer, where a driver had to wait."""
_SLOW_PAUSE = (10.0, 3600.0)
"""The interval after it: as a multiple of its time, so that a driver waits for a tenth of the time
at most; and the longest, in seconds."""

_UPLOADS = ("text ", "file ", "link ")
"""Requests, by the beginnings of their keys, that a store of artifacts may fail; sent last."""

Key = tuple[tuple[str, str], ...]


@dataclass
class TrackedRun:
    """The content that MLflow should have of one run. Times are in seconds since 1970.

    Attributes:
        name: What it is shown as.
        tags: Some of them (`_KEY_TAGS`) identify it.
        status: A state of `orchestrator.storage.records`; None: as it is.
        params: Parameters, in sections or flat.
        points: Values of metrics.
        texts: Artifacts by file name.
        files: Files that are artifacts; missing ones are left out.
        datasets: Texts that it has used.
        run_id: Of a search's own run, if that is known.
        started: None: when it is first logged.
        ended: None: when its end is logged.
    """

    # The digests of finished runs are of these names
    name: str
    tags: dict[str, Any]
    status: str | None = RUNNING
    params: Mapping[str, Any] = field(default_factory=dict)
    points: list[MetricPoint] = field(default_factory=list)
    texts: dict[str, str] = field(default_factory=dict)
    files: list[Path] = field(default_factory=list)
    datasets: Sequence[Dataset] = ()
    run_id: str | None = None
    started: float | None = None
    ended: float | None = None

    @property
    def key(self) -> Key:
        return _key_of(self.tags)

    @property
    def digest(self) -> str:
        content = json.dumps(asdict(self), sort_keys=True, default=str)
        return hashlib.sha256(content.encode()).hexdigest()[:16]


@dataclass(frozen=True)
class SharedMetadata:
    """The metadata that all runs of a search share; a run's own metadata overrides it."""

    tags: Mapping[str, Any] = field(default_factory=dict)
    params: Mapping[str, Any] = field(default_factory=dict)
    datasets: Sequence[Dataset] = ()

    def added_to(self, run: TrackedRun) -> TrackedRun:
        """Return the run completed with it."""
        return replace(
            run,
            tags={**self.tags, "mlflow.runName": run.name, **run.tags},
            params={**self.params, **run.params},
            datasets=run.datasets or self.datasets,
        )


def _key_of(tags: Mapping[str, Any]) -> Key:
    return tuple((name, str(tags[name])) for name in _KEY_TAGS if name in tags)


@dataclass
class _SyncState:
    """A run, and the parts of it that are certainly in the store.

    Attributes:
        changed: Whether `target` differs from the one that was sent last.
        new_points: Further points to be sent.
        sent: Requests, by their keys; `points`: points, by a hash.
    """

    target: TrackedRun
    changed: bool = True
    new_points: list[MetricPoint] = field(default_factory=list)
    run_id: str | None = None
    status: str | None = None
    digest: str | None = None
    sent: set[str] = field(default_factory=set)
    points: set[int] = field(default_factory=set)


class MlflowSync:
    """The runs of one search: `parent`, and its children.

    Only the registration of a model needs the store at once (`registry`).

    Args:
        connect: Opens the store; raises TrackingError if it cannot be reached.
        parent: The run of the search.
        tracker: The store, if it is open already.
        shared: What all runs have in common.
    """

    def __init__(
        self,
        connect: Callable[[], Tracker],
        parent: TrackedRun,
        tracker: Tracker | None = None,
        shared: SharedMetadata | None = None,
    ) -> None:
        self._connect = connect
        self._tracker = tracker
        self._shared = shared or SharedMetadata()
        self._parent = parent.key
        self._runs: dict[Key, _SyncState] = {}
        self._pending: dict[Key, _SyncState] = {}
        self._children: dict[Key, Any] | None = None
        self._delay = 0.0
        self._next_try = 0.0
        self._warned = False
        self._lock = threading.RLock()  # a separate thread logs what the search waits for
        self.put(parent)

    @property
    def parent_id(self) -> str | None:
        """The store's id of the parent; None until it has been reached."""
        return self._runs[self._parent].run_id

    @property
    def waiting(self) -> int:
        """Number of runs that may not be up to date in the store."""
        return len(self._pending)

    def put(self, run: TrackedRun) -> str | None:
        """Bring a run up to date, and all pending runs.

        Returns:
            Its id; None until the store can be reached.
        """
        run = self._shared.added_to(run)
        with self._lock:
            state = self._runs.setdefault(run.key, _SyncState(run))
            state.target = run
            state.changed = True
            self._pending[run.key] = state
            if time.monotonic() >= self._next_try:
                self._send_all()
            return state.run_id

    def add_points(self, tags: Mapping[str, Any], points: Sequence[MetricPoint]) -> str | None:
        """Send further points of a run that was put, and what is pending: nothing else again.

        So an update costs the same however long the run is.

        Args:
            tags: Of the run; those that identify it are enough.
            points: Points later than those that were put or added.

        Returns:
            Its id; None until the store can be reached.
        """
        key = _key_of({**self._shared.tags, **tags})
        with self._lock:
            state = self._runs[key]
            if points:
                state.new_points += points
                self._pending[key] = state
            if self._pending and time.monotonic() >= self._next_try:
                self._send_all()
            return state.run_id

    def flush(self) -> bool:
        """Try now, and return whether everything is in the store."""
        with self._lock:
            self._send_all()
            return not self.waiting

    def registry(self) -> Tracker:
        """Return the store, up to date, for requests that cannot wait.

        Raises:
            TrackingError: If it is away.
        """
        if not self.flush() or self._tracker is None:
            raise TrackingError(
                "the MLflow store is not reachable; continue with --resume when it is"
            )
        return self._tracker

    def _send_all(self) -> None:
        started = time.monotonic()
        failure: Exception | None = None
        answers = True
        for key, state in list(self._pending.items()):
            try:
                self._send(state)
                del self._pending[key]
            except Exception as error:
                failure = error
                if not (answers := self._store_answers()):
                    break
                # Now the last one: a store of artifacts that fails must not keep other runs out
                self._pending[key] = self._pending.pop(key)
        if failure is not None:
            self._pause(failure, time.monotonic() - started, answers)
            return
        self._delay = 0.0
        if self._warned:
            logger.warning("MLflow is up to date again")
            self._warned = False

    def _store_answers(self) -> bool:
        """Return whether the store itself answers, so that one request alone has failed."""
        if self._tracker is None or self.parent_id is None:
            return False
        try:
            return self._tracker.search_run(self.parent_id, {}) is not None
        except Exception:
            return False

    def _pause(self, error: Exception, seconds: float, answers: bool) -> None:
        """Wait before the next attempt.

        Args:
            error: Why this one has failed.
            seconds: After how long.
            answers: Whether the store answers other requests.
        """
        first, longest = PAUSE_SECONDS
        self._delay = min(longest, 2 * self._delay or first)
        pause = self._delay
        if seconds > _SLOW_SECONDS:
            share, longest = _SLOW_PAUSE
            pause = max(pause, min(longest, share * seconds))
        self._next_try = time.monotonic() + pause
        self._tracker = None
        self._children = None  # a run may have been made whose answer was lost
        if not self._warned:
            logger.warning(
                "MLflow %s (%s); it will be brought up to date when it %s",
                "does not take everything" if answers else "is not reachable",
                reason(error, redact),
                "does" if answers else "is",
            )
            self._warned = True

    def _send(self, state: _SyncState) -> None:
        if self._tracker is None:
            self._tracker = self._connect()
        tracker = self._tracker
        if state.run_id is None:
            state.run_id = self._find_or_start(state, tracker)
        if state.changed:
            self._send_target(state, tracker, state.run_id)
            state.changed = False
        if state.new_points:
            self._send_points(state, tracker, state.run_id, state.new_points)
            state.new_points = []

    def _send_target(self, state: _SyncState, tracker: Tracker, run_id: str) -> None:
        run = state.target
        digest = run.digest
        if state.digest == digest:
            return
        self._send_points(state, tracker, run_id, run.points)
        requests = _requests(tracker, run_id, run)
        uploads = {key: requests.pop(key) for key in list(requests) if key.startswith(_UPLOADS)}
        # A tag that is no longer set may return
        state.sent -= {key for key in state.sent - requests.keys() if key.startswith("tag ")}
        for key, request in requests.items():
            self._send_once(state, key, request)
        if run.status is not None and state.status != STATUS[run.status]:
            try:
                tracker.set_status(run_id, run.status, run.ended)
            except Exception as error:
                if is_away(error):
                    raise
                logger.warning(
                    "MLflow has refused the status of %s: %s", run.name, reason(error, redact)
                )
            state.status = STATUS[run.status]
        for key, request in uploads.items():
            self._send_once(state, key, request)
        state.digest = digest
        if run.status in ENDED:
            request = partial(tracker.set_tags, run_id, {_DIGEST_TAG: digest})
            self._send_once(state, f"tag {_DIGEST_TAG} {digest}", request)

    def _send_points(
        self, state: _SyncState, tracker: Tracker, run_id: str, points: Sequence[MetricPoint]
    ) -> None:
        """Send the unsent points in one request; one by one if the store refuses."""
        missing = {hash(repr(point)): point for point in points}
        missing = {key: point for key, point in missing.items() if key not in state.points}
        if not missing:
            return
        try:
            tracker.log_points(run_id, missing.values())
        except Exception as error:
            if is_away(error):
                raise
            for point in missing.values():
                request = partial(tracker.log_point, run_id, point)
                self._send_once(state, f"point {point!r}", request)
        state.points |= missing.keys()

    def _send_once(self, state: _SyncState, key: str, request: Callable[[], None]) -> None:
        """Send a request unless it was sent; if the store refuses it, warn and continue."""
        if key in state.sent:
            return
        try:
            request()
        except Exception as error:
            if is_away(error):
                raise
            logger.warning(
                "MLflow has refused the %s of %s: %s",
                redact(key)[:80],
                state.target.name,
                reason(error, redact),
            )
        state.sent.add(key)

    def _find_or_start(self, state: _SyncState, tracker: Tracker) -> str:
        """Find the run in the store, or start it, and return its id."""
        run = state.target
        is_parent = run.key == self._parent
        tags = dict(run.key)
        if is_parent:
            stored = tracker.search_run(run.run_id, tags)
        else:
            if self._children is None:
                assert self.parent_id is not None
                children = tracker.children(self.parent_id)
                self._children = {_key_of(child.data.tags): child for child in children}
            stored = self._children.get(run.key)
        if stored is None:
            tags["mlflow.runName"] = run.name
            parent = None if is_parent else self.parent_id
            run_id = tracker.start(run.name, parent=parent, tags=tags, at=run.started)
            state.status = STATUS[RUNNING]
        else:
            run_id = stored.info.run_id
            state.status = stored.info.status
            tags = stored.data.tags
            if stored.data.params:
                state.sent.add("params")  # all in one go; and they never change
            if stored.inputs.dataset_inputs:
                state.sent.add("datasets")
            if run.status is None or state.status == STATUS[run.status]:
                state.digest = tags.get(_DIGEST_TAG)
        state.sent |= {f"tag {name} {value}" for name, value in tags.items()}
        return run_id


def _requests(tracker: Tracker, run_id: str, run: TrackedRun) -> dict[str, Callable[[], None]]:
    """Return the requests that bring a run up to date, by keys that show whether they were sent."""
    requests = {"params": partial(tracker.log_params, run_id, run.params)}
    if run.datasets:
        requests["datasets"] = partial(tracker.log_datasets, run_id, run.datasets)
    for name, value in run.tags.items():
        requests[f"tag {name} {value}"] = partial(tracker.set_tags, run_id, {name: value})
    for file, text in run.texts.items():
        requests[f"text {file} {text}"] = partial(tracker.log_text, run_id, text, file)
    for path in run.files:
        if path.exists():
            stamp = path.stat().st_mtime_ns
            requests[f"file {path} {stamp}"] = partial(tracker.log_file, run_id, path)
            if path.name == REPORT:
                requests[f"link {path}"] = partial(tracker.link_report, run_id, run.name)
    return requests


def identity_tags(kind: str, folder: Path, identity: str | None) -> dict[str, str]:
    """Return the tags by which the run of a search or a training is found.

    Args:
        kind: The verb.
        folder: Where it is.
        identity: Of this one, since an earlier one in a folder of that name may have a run; None
            for those begun without.
    """
    tags = {"headfold.kind": kind, "headfold.folder": str(folder)}
    return tags if identity is None else {**tags, "headfold.id": identity}


def parent_run(folder: Path, waits_for: str | None = None, **more: Any) -> TrackedRun:
    """Return the run of a search itself, the parent of all its others.

    Args:
        folder: Of the search.
        waits_for: Nodes that are slow to start, "" if it waits no longer.
        **more: Other fields of the run.
    """
    tags = identity_tags("search", folder, read_if_there(SearchFolder(folder).origin).get("id"))
    if waits_for is not None:
        tags["headfold.waits_for"] = waits_for or "nothing"
    return TrackedRun(folder.name, tags, **more)
