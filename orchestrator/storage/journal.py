"""The journal of a search, its only record: what was tried, reported, decided and ended, in order.

`journal.jsonl` in the folder of the search: one JSON object a line, only ever appended, on disk before anybody acts on
it. All else is a fold over it: the records of trials (`load_trials`), and the state of a resumed search (`History`).
Events, by their `event`; each has its `time`, in seconds since 1970:

    search  the first line: `format` of the journal, and `rungs`, how many a trial has
    trial   a searcher's suggestion: `trial` (its id), `config`
    report  a trial's scores at a rung: `trial`, `result`, and the scheduler's `decision`; with `copy_of` in the result
            the trial is stopped as a copy of that one
    advance a paused trial goes on: `trial`
    end     a trial has ended: `trial`, `error` (None, or what went wrong), `trace` (the place of its traceback), and
            `lost`: whether it was its machines that went wrong, so that another try may end otherwise
    again   such another try: `trial`
    interrupt  the driver was stopped (Ctrl-C): trials that have not ended wait to be resumed
    resume  they go on
    run     the MLflow run of a trial: `trial`, `run_id`

Searcher and scheduler are deterministic, so told these events again, in this order, they are in the state that they
were in. Ray Tune's own snapshot is not needed: it may be older than the last report, and it would have to be unpickled.
"""

from __future__ import annotations

import contextlib
import json
import math
import os
import time
from collections.abc import Mapping
from dataclasses import asdict
from pathlib import Path
from typing import Any

import numpy as np

from orchestrator.config.parsing import ConfigError
from orchestrator.storage import records
from orchestrator.storage.json_files import finite
from orchestrator.storage.records import TrialRecord
from orchestrator.storage.trial_names import name_trials

FORMAT = 2
"""Of the journal. A search of another format is refused: it would be half understood."""
NAME = "journal.jsonl"
SEARCH, TRIAL, REPORT, ADVANCE, END, AGAIN = "search", "trial", "report", "advance", "end", "again"
INTERRUPT, RESUME, RUN = "interrupt", "resume", "run"
PAUSE = "PAUSE"  # as Tune spells it
OF_TUNE = {
    "config", "date", "done", "experiment_id", "experiment_tag", "hostname", "iterations_since_restore", "node_ip",
    "pid", "should_checkpoint", "time_since_restore", "time_this_iter_s", "time_total_s", "timestamp", "trial_id",
}  # fmt: skip
"""Metadata that Tune adds to a result; no decision rests on it."""
_REMEDY = "restore the file from a copy, or start a new search"


class JournalError(ConfigError):
    """A journal that cannot be written or read. The message names the file and the remedy."""


def read_events(path: str | Path) -> list[dict[str, Any]]:
    """The events of a journal; none if there is no file. A last line that a kill or a full disk has cut short is
    dropped: nobody has acted on it. Raises JournalError for any other broken line, and for a journal of another format.
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
            raise JournalError(f"{path}: line {number} of {len(lines)} is no event of a search; {_REMEDY}")
        events.append(event)
    if events:
        check_format(path)
    return events


def read_history(path: str | Path) -> History:
    """What a journal tells. Raises JournalError as `read_events` does, and for an event that lacks something."""
    history = History()
    for number, event in enumerate(read_events(path), 1):
        try:
            history.add(event)
        except (KeyError, TypeError, ValueError, AttributeError) as error:
            problem = f"{type(error).__name__}: {error}"
            raise JournalError(f"{path}: line {number} is no event of a search ({problem}); {_REMEDY}") from None
    return history


def check_format(path: Path) -> None:
    """Raise JournalError unless a journal begins with an event of the format that is read here."""
    version = None
    if path.is_file():
        with path.open("rb") as stream, contextlib.suppress(ValueError):
            first = json.loads(stream.readline())
            version = first.get("format") if isinstance(first, dict) and first.get("event") == SEARCH else None
    if version != FORMAT:
        whose = "a former version" if version is None else f"another version (journal format {version!r}, not {FORMAT})"
        raise JournalError(
            f"{path.parent} was started by {whose} of Headfold, and is not what this one reads: finish it with the "
            "version that started it, or start a new search without --resume"
        )


def load_trials(folder: str | Path) -> list[TrialRecord]:
    """The records of the search in a folder; none if no trial has started. A copy has the scores, and the failure, of
    the trial that it is a copy of; a loss that is not finite is None. Raises JournalError."""
    trials = read_history(Path(folder) / NAME).records
    for copy in trials.values():
        first = trials.get(copy.copy_of or "")
        if first is not None:
            copy.rungs, copy.relaxation, copy.notes = first.rungs, first.relaxation, first.notes
            if first.status == records.FAILED:
                copy.status = records.FAILED
                copy.error = f"the same model as {first.trial_id}, which failed: {first.error}"
    name_trials(trials.values())
    return [TrialRecord(**finite(asdict(record))) for record in trials.values()]


class Journal:
    """The one writer of a journal, and what it holds: `history` is what a reader of the file would make of it.

    `failed`: why an event could not be written, once one could not; from then on nothing more is taken.
    """

    def __init__(self, path: str | Path) -> None:
        self.path = Path(path)
        self.failed: str | None = None
        self.history = read_history(path)
        self._length = self.path.read_bytes().rfind(b"\n") + 1 if self.path.exists() else 0  # of the whole lines

    def begin(self, rungs: int) -> None:
        """Write the first line, if there is none."""
        if not self.history.events:
            self.append(SEARCH, format=FORMAT, rungs=rungs)

    def append(self, event: str, **fields: Any) -> None:
        """Write an event to disk. Raises JournalError if the disk is full or gone; the file stays whole then."""
        if self.failed is not None:
            raise JournalError(self.failed)
        record = {"event": event, "time": round(time.time(), 3), **fields}
        line = json.dumps(record, default=_plain, sort_keys=True).encode() + b"\n"
        self.path.parent.mkdir(parents=True, exist_ok=True)
        try:
            self._write(line)
        except OSError as error:
            self.failed = f"{self.path}: {unwritable(error.strerror or str(error))}"
            raise JournalError(self.failed) from None
        self.history.add(json.loads(line))

    def _write(self, line: bytes) -> None:
        descriptor = os.open(self.path, os.O_RDWR | os.O_CREAT, 0o644)
        try:
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
    return f"cannot be written ({reason}); mend that and go on with the same command and --resume"


def _plain(value: Any) -> Any:
    """Numbers of numpy as plain ones."""
    if isinstance(value, np.generic):
        return value.item()
    if isinstance(value, (np.ndarray, set, frozenset)):
        return list(value)
    return str(value)


def result_of(flat: Mapping[str, Any]) -> dict[str, Any]:
    """A Tune result without what Tune has added to it, nested again, as plain JSON values."""
    nested: dict[str, Any] = {}
    for key, value in flat.items():
        *parents, last = key.split("/")
        if (parents or [last])[0] in OF_TUNE:
            continue
        place = nested
        for parent in parents:
            place = place.setdefault(parent, {})
        place[last] = value
    return json.loads(json.dumps(nested, default=_plain))


class History:
    """The state of a search after some events, by trial id in the order of the suggestions.

    `rungs`: how many a trial has; `records`: of the trials, each with what was measured of itself. `decisions` are by
    trial and step, `ends` are `end` events; `paused` trials wait to advance; `told` are the trials whose end the
    searcher has learnt. `interrupted`: see the event.
    """

    def __init__(self) -> None:
        self.events: list[dict[str, Any]] = []
        self.rungs = 0
        self.records: dict[str, TrialRecord] = {}
        self.configs: dict[str, dict[str, Any]] = {}
        self.decisions: dict[tuple[str, int], str] = {}
        self.ends: dict[str, dict[str, Any]] = {}
        self.paused: set[str] = set()
        self.told: set[str] = set()
        self.interrupted = False

    def add(self, event: dict[str, Any]) -> None:
        """Raises KeyError, TypeError or ValueError for what is no event."""
        kind, trial = event["event"], event.get("trial", "")
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
            self.records[trial].add({**event["result"], "timestamp": event.get("time")})
            self.decisions[trial, int(event["result"]["step"])] = event["decision"]
            if event["decision"] == PAUSE:
                self.paused.add(trial)
        elif kind == ADVANCE:
            self.paused.discard(trial)
        elif kind == END:
            self.paused.discard(trial)
            self.ends[trial] = event
            self.told.add(trial)
        elif kind == AGAIN:
            self.ends.pop(trial, None)
        else:
            raise ValueError(f"{kind!r} is unknown")
        for each in self.open if kind in (SEARCH, INTERRUPT, RESUME) else [event["trial"]]:
            self._settle(each)
        self.events.append(event)

    def _settle(self, trial: str) -> None:
        """Status and error of a record, from all that is known of its trial."""
        record, end = self.records[trial], self.ends.get(trial)
        record.error, record.error_log = (end["error"], end["trace"]) if end else (None, None)
        record.ended = end.get("time") if end else None
        if end is None:
            going = records.WAITING if trial in self.paused else records.RUNNING
            record.status = records.KILLED if self.interrupted else going
        elif record.error is not None:
            record.status = records.FAILED
        elif record.rungs and not math.isfinite(record.last_loss):
            record.status = records.FAILED
            record.error = (
                f"diverged: the held-out loss after {record.step} steps is not finite; lower the learning rate"
            )
        elif record.copy_of is not None:
            record.status = records.COPY
        else:
            # Not by the number of its rungs: a relaxation leaves out those within it
            reached_end = record.probe or record.last.get("rung") == self.rungs - 1
            record.status = records.DONE if reached_end else records.STOPPED

    @property
    def open(self) -> list[str]:
        """Trials that have not ended."""
        return [trial for trial in self.configs if trial not in self.ends]
