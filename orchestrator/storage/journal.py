"""The journal of a search, its only record: what was tried, reported, decided and ended, in order.

`journal.jsonl` in the folder of the search has one JSON object per line, is only ever appended to,
and is on disk before anybody acts on it. All else is a fold over it: the records of trials
(`load_trials`), and the state of a resumed search (`History`). Events, by their `event`; each has
its `time`, in seconds since 1970:

    search     the first line: `format` of the journal, and `rungs`, how many a trial has
    trial      a searcher's suggestion: `trial` (its id), `config`
    report     a trial's scores at a rung: `trial`, `result`, and the scheduler's `decision`; with
               `copy_of` in the result the trial is stopped as a copy of that one
    advance    a paused trial continues: `trial`
    end        a trial has ended: `trial`, `error` (None without one), `trace` (the file of its
               traceback), `lost`: whether its machines have failed, so that another try may
               succeed, and `bare`: whether Tune gave no result with it
    again      such another try: `trial`
    interrupt  the driver was stopped (Ctrl-C): trials that have not ended wait to be resumed
    resume     they continue
    run        the MLflow run of a trial: `trial`, `run_id`

Searcher and scheduler are deterministic: after the same events in the same order they are in the
same state. Ray Tune's own snapshot is not needed: it may be older than the last report, and it
would have to be unpickled.
"""

from __future__ import annotations

import contextlib
import json
import math
import os
import time
from collections.abc import Callable, Mapping
from dataclasses import asdict
from pathlib import Path
from typing import Any, TypedDict

import numpy as np

from orchestrator.config.parsing import ConfigError
from orchestrator.storage import records
from orchestrator.storage.json_files import finite
from orchestrator.storage.records import TrialRecord
from orchestrator.storage.trial_names import name_trials

JOURNAL_FORMAT = 2
"""A search with a journal of another format is refused: it would be half understood."""
NAME = "journal.jsonl"
SEARCH, TRIAL, REPORT, ADVANCE, END, AGAIN = "search", "trial", "report", "advance", "end", "again"
INTERRUPT, RESUME, RUN = "interrupt", "resume", "run"
PAUSE = "PAUSE"  # as Tune spells it
_TUNE_METADATA = {
    "config", "date", "done", "experiment_id", "experiment_tag", "hostname", "pid", "timestamp",
    "iterations_since_restore", "node_ip", "should_checkpoint", "time_since_restore",
    "time_this_iter_s", "time_total_s", "trial_id",
}  # fmt: skip
"""Fields that Tune adds to a result; no decision depends on them."""
_REMEDY = "restore the file from a copy, or start a new search"


class JournalError(ConfigError):
    """A journal that cannot be written or read. The message names the file and the remedy."""


class JournalEvent(TypedDict):
    """One line of a journal; the module lists the keys of an event besides `event` and `time`."""

    event: str
    time: float
    format: int
    rungs: int
    trial: str
    config: Any
    """The configuration that the searcher suggested."""
    result: Any
    """A `RungReport`."""
    decision: str
    error: str | None
    trace: str | None
    lost: bool
    bare: bool
    run_id: str


def read_events(path: str | Path) -> list[JournalEvent]:
    """Return the events of a journal; none if there is no file.

    A last line that a kill or a full disk has cut short is dropped: nobody has acted on it.

    Raises:
        JournalError: For any other broken line, and for a journal of another format.
    """
    path = Path(path)
    if not path.exists():
        return []
    lines = path.read_bytes().split(b"\n")[:-1]  # what follows the last line feed was cut short
    events = []
    for number, line in enumerate(lines, 1):
        try:
            event = json.loads(line)
        except ValueError:
            event = None
        if not isinstance(event, dict) or not isinstance(event.get("event"), str):
            raise JournalError(
                f"{path}: line {number} of {len(lines)} is no event of a search; {_REMEDY}"
            )
        events.append(event)
    if events:
        check_format(path)
    return events


def read_history(path: str | Path) -> History:
    """Return the state of a search after all events of its journal.

    Raises:
        JournalError: As `read_events` does, and for an event that lacks something.
    """
    history = History()
    for number, event in enumerate(read_events(path), 1):
        try:
            history.add(event)
        except (KeyError, TypeError, ValueError, AttributeError) as error:
            problem = f"{type(error).__name__}: {error}"
            raise JournalError(
                f"{path}: line {number} is no event of a search ({problem}); {_REMEDY}"
            ) from None
    return history


def check_format(path: Path) -> None:
    """Check that a journal begins with an event of the format that is read here.

    Raises:
        JournalError: If it does not.
    """
    version = None
    if path.is_file():
        with path.open("rb") as stream, contextlib.suppress(ValueError):
            first = json.loads(stream.readline())
            if isinstance(first, dict) and first.get("event") == SEARCH:
                version = first.get("format")
    if version != JOURNAL_FORMAT:
        writer = "a former version"
        if version is not None:
            writer = f"another version (journal format {version!r}, not {JOURNAL_FORMAT})"
        raise JournalError(
            f"{path.parent} was started by {writer} of Headfold, and is not what this one reads: "
            "finish it with the version that started it, or start a new search without --resume"
        )


def began(path: Path) -> float | None:
    """Return the time of the first event of a journal, in seconds since 1970, of any format.

    None if there is no such event.
    """
    with contextlib.suppress(OSError, ValueError, TypeError, KeyError), path.open("rb") as stream:
        return float(json.loads(stream.readline())["time"])
    return None


def load_trials(folder: str | Path) -> list[TrialRecord]:
    """Return the records of the search in a folder; none if no trial has started.

    A copy has the scores, and the failure, of the trial that it is a copy of; a loss that is not
    finite is None.

    Raises:
        JournalError: As `read_history` does.
    """
    trials = read_history(Path(folder) / NAME).records
    for copy in trials.values():
        first = trials.get(copy.copy_of or "")
        if first is not None:
            copy.rungs = first.rungs
            copy.relaxation = first.relaxation
            copy.notes = first.notes
            if first.status == records.FAILED:
                copy.status = records.FAILED
                reason = f"which failed: {first.error}"
                copy.error = f"the same model as {first.trial_id}, {reason}"
    name_trials(trials.values())
    return [TrialRecord(**finite(asdict(record))) for record in trials.values()]


class Journal:
    """The one writer of a journal.

    Args:
        path: The file.
        check: Called before each event: raises ConfigError once another driver has taken the search
            over.

    Attributes:
        history: The state that a reader of the file would come to.
        failed: Why an event could not be written, once one could not; none is written from then on.
    """

    def __init__(self, path: str | Path, check: Callable[[], None] | None = None) -> None:
        self.path = Path(path)
        self.failed: str | None = None
        self.history = read_history(path)
        self._check = check
        content = self.path.read_bytes() if self.path.exists() else b""
        self._length = content.rfind(b"\n") + 1  # of the whole lines

    def __getstate__(self) -> dict[str, object]:
        """Leave out the check, which holds a lock.

        Tune pickles a journal with its searcher, for a resumption by Tune itself, which is never
        used.
        """
        return {**vars(self), "_check": None}

    def begin(self, rungs: int) -> None:
        """Write the first line, if there is none."""
        if not self.history.events:
            self.append(SEARCH, format=JOURNAL_FORMAT, rungs=rungs)

    def append(self, event: str, **fields: Any) -> None:
        """Write an event to disk.

        Raises:
            JournalError: If the disk is full or gone, or if another driver has taken the search
                over; the file stays whole then.
        """
        if self.failed is not None:
            raise JournalError(self.failed)
        if self._check is not None:
            try:
                self._check()
            except ConfigError as error:
                self.failed = str(error)
                raise JournalError(self.failed) from None
        record = {"event": event, "time": round(time.time(), 3), **fields}
        line = json.dumps(record, default=_plain, sort_keys=True).encode() + b"\n"
        self.path.parent.mkdir(parents=True, exist_ok=True)
        try:
            self._write(line)
        except JournalError as error:
            self.failed = str(error)
            raise
        except OSError as error:
            self.failed = f"{self.path}: {unwritable(error.strerror or str(error))}"
            raise JournalError(self.failed) from None
        self.history.add(json.loads(line))

    def _write(self, line: bytes) -> None:
        descriptor = os.open(self.path, os.O_RDWR | os.O_CREAT, 0o644)
        try:
            size = os.fstat(descriptor).st_size
            beyond = os.pread(descriptor, max(0, size - self._length), self._length)
            if size < self._length or b"\n" in beyond:  # only an incomplete last line is expected
                raise JournalError(
                    f"{self.path} was changed by another process ({size} bytes, expected "
                    f"{self._length}): another driver has taken the search over, and this one "
                    "stops; nothing of the other's was changed"
                )
            os.ftruncate(descriptor, self._length)
            if os.pwrite(descriptor, line, self._length) != len(line):
                raise OSError("no space left on device")
            os.fsync(descriptor)
            self._length += len(line)
        except OSError:
            os.ftruncate(descriptor, self._length)
            raise
        finally:
            os.close(descriptor)


def unwritable(reason: str) -> str:
    """Return why a file cannot be written, and the remedy."""
    return (
        f"cannot be written ({reason}); mend that and continue with the same command and --resume"
    )


def _plain(value: Any) -> Any:
    """Return numbers of numpy as plain ones."""
    if isinstance(value, np.generic):
        return value.item()
    if isinstance(value, (np.ndarray, set, frozenset)):
        return list(value)
    return str(value)


def result_of(flat: Mapping[str, Any]) -> Any:
    """Return the report in a Tune result: nested again, as plain JSON values, without metadata."""
    nested: Any = {}
    for key, value in flat.items():
        *parents, last = key.split("/")
        if (parents or [last])[0] in _TUNE_METADATA:
            continue
        parent_dict = nested
        for parent in parents:
            parent_dict = parent_dict.setdefault(parent, {})
        parent_dict[last] = value
    return json.loads(json.dumps(nested, default=_plain))


class History:
    """The state of a search after some events, by trial id in the order of the suggestions.

    Attributes:
        rungs: How many a trial has.
        records: Of the trials, each with its own measurements.
        configs: As the searcher suggested them.
        decisions: By trial and step.
        ends: The `end` event of each trial that has ended.
        paused: Trials that wait to advance.
        interrupted: Whether the driver was stopped, see the event.
    """

    def __init__(self) -> None:
        self.events: list[JournalEvent] = []
        self.rungs = 0
        self.records: dict[str, TrialRecord] = {}
        self.configs: dict[str, Any] = {}
        self.decisions: dict[tuple[str, int], str] = {}
        self.ends: dict[str, JournalEvent] = {}
        self.paused: set[str] = set()
        self.interrupted = False

    def add(self, event: JournalEvent) -> None:
        """Add an event.

        Raises:
            KeyError: For what is no event; likewise TypeError and ValueError.
        """
        kind = event["event"]
        trial = event.get("trial", "")
        if kind == SEARCH:
            self.rungs = int(event["rungs"])
        elif kind in (INTERRUPT, RESUME):
            self.interrupted = kind == INTERRUPT
        elif kind == TRIAL:
            self.configs[trial] = event["config"]
            self.records[trial] = TrialRecord.of(trial, event["config"])
            self.records[trial].started = event.get("time")
        elif kind == RUN:
            self.records[trial].run_id = event["run_id"]
        elif kind == REPORT:
            result = event["result"]
            self.records[trial].add({**result, "timestamp": event.get("time")})
            self.decisions[trial, int(result["step"])] = event["decision"]
            if event["decision"] == PAUSE:
                self.paused.add(trial)
        elif kind == ADVANCE:
            self.paused.discard(trial)
        elif kind == END:
            self.paused.discard(trial)
            self.ends[trial] = event
        elif kind == AGAIN:
            self.ends.pop(trial, None)
        else:
            raise ValueError(f"{kind!r} is unknown")
        changed = self.open if kind in (SEARCH, INTERRUPT, RESUME) else [event["trial"]]
        for trial_id in changed:
            self._update(trial_id)
        self.events.append(event)

    def _update(self, trial: str) -> None:
        """Set status and error of a record, from all events of its trial."""
        record = self.records[trial]
        end = self.ends.get(trial)
        record.error = end["error"] if end else None
        record.error_log = end["trace"] if end else None
        record.ended = end.get("time") if end else None
        if end is None and self.interrupted:
            record.status = records.KILLED
        elif end is None:
            record.status = records.WAITING if trial in self.paused else records.RUNNING
        elif record.error is not None:
            record.status = records.FAILED
        elif record.rungs and not math.isfinite(record.last_loss):
            record.status = records.FAILED
            record.error = (
                f"diverged: the held-out loss after {record.step} steps is not finite; lower the "
                "learning rate"
            )
        elif record.copy_of is not None:
            record.status = records.COPY
        else:
            # Not by the number of its rungs: a relaxation leaves out those within it
            reached_end = record.probe or record.last.get("rung") == self.rungs - 1
            record.status = records.DONE if reached_end else records.STOPPED

    @property
    def open(self) -> list[str]:
        """The trials that have not ended."""
        return [trial for trial in self.configs if trial not in self.ends]
