"""The journal of a search: what was tried, reported, decided and ended, in order. What a resumed search goes by.

One JSON object a line, only ever appended, on disk before anybody acts on it. Events, by their `event`:

    trial   a searcher's suggestion: `trial` (its id), `config`
    report  a trial's scores at a rung: `trial`, `result`, and the scheduler's `decision`; with `copy_of` in the result
            the trial is stopped as a copy of that one
    promote a paused trial goes on: `trial`
    end     a trial has ended: `trial`, `error` (None, or what went wrong), `trace` (the place of its traceback), and
            `lost`: whether it was its machines that went wrong, so that another try may end otherwise
    again   such another try: `trial`

Searcher and scheduler are deterministic, so told these events again, in this order, they are in the state that they
were in. Ray Tune's own snapshot is not needed: it may be older than the last report, and it would have to be unpickled.
"""

from __future__ import annotations

import json
import os
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

import numpy as np

TRIAL, REPORT, PROMOTE, END, AGAIN = "trial", "report", "promote", "end", "again"
PAUSE = "PAUSE"  # as Tune spells it
OF_TUNE = {
    "config", "date", "done", "experiment_id", "experiment_tag", "hostname", "iterations_since_restore", "node_ip",
    "pid", "should_checkpoint", "time_since_restore", "time_this_iter_s", "time_total_s", "timestamp", "trial_id",
}  # fmt: skip
"""What Tune adds to a result and nobody decides by."""


class JournalError(ValueError):
    """A journal that cannot be written or read. The message names the file and the remedy."""


class Journal:
    """`failed`: why an event could not be written, once one could not; from then on nothing more is taken.

    A line that a kill or a full disk has cut short is dropped at the next opening: nobody has acted on it.
    """

    def __init__(self, path: str | Path) -> None:
        self.path = Path(path)
        self.failed: str | None = None

    def events(self) -> list[dict[str, Any]]:
        """All whole events. Raises JournalError for a broken line that is not the last one."""
        if not self.path.exists():
            return []
        lines = self.path.read_bytes().split(b"\n")[:-1]  # what follows the last line feed was cut short
        found = []
        for number, line in enumerate(lines, 1):
            try:
                found.append(json.loads(line))
            except ValueError:
                raise JournalError(
                    f"{self.path}: line {number} of {len(lines)} is no JSON; restore the file from a copy, or start a "
                    "new search"
                ) from None
        return found

    def append(self, event: str, **fields: Any) -> None:
        """Write an event to disk. Raises JournalError if the disk is full or gone; the file stays whole then."""
        if self.failed is not None:
            raise JournalError(self.failed)
        line = json.dumps({"event": event, **fields}, default=_plain, sort_keys=True).encode() + b"\n"
        self.path.parent.mkdir(parents=True, exist_ok=True)
        try:
            self._write(line)
        except OSError as error:
            self.failed = f"{self.path}: {unwritable(error.strerror or str(error))}"
            raise JournalError(self.failed) from None

    def _write(self, line: bytes) -> None:
        descriptor = os.open(self.path, os.O_RDWR | os.O_CREAT, 0o644)
        try:
            whole = _whole_length(descriptor)
            os.ftruncate(descriptor, whole)
            os.lseek(descriptor, whole, os.SEEK_SET)
            try:
                if os.write(descriptor, line) != len(line):
                    raise OSError("no space left on device")
                os.fsync(descriptor)
            except OSError:
                os.ftruncate(descriptor, whole)
                raise
        finally:
            os.close(descriptor)


def unwritable(reason: str) -> str:
    return f"cannot be written ({reason}); mend that and go on with the same command and --resume"


def _whole_length(descriptor: int, block: int = 4096) -> int:
    """Bytes of a file up to and with its last line feed."""
    end = os.lseek(descriptor, 0, os.SEEK_END)
    while end > 0:
        start = max(0, end - block)
        found = os.pread(descriptor, end - start, start).rfind(b"\n")
        if found >= 0:
            return start + found + 1
        end = start
    return 0


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
    """What a journal tells of a search so far, by trial id in the order of the suggestions.

    `results` are by step, `ends` are `end` events; `paused` trials wait to be promoted; `told` are the trials whose end
    the searcher has learnt; `copies`: by trial, the first one that leads to the same model.
    """

    def __init__(self, events: Iterable[dict[str, Any]] = ()) -> None:
        self.events: list[dict[str, Any]] = []
        self.configs: dict[str, dict[str, Any]] = {}
        self.decisions: dict[tuple[str, int], str] = {}
        self.results: dict[str, dict[int, dict[str, Any]]] = {}
        self.ends: dict[str, dict[str, Any]] = {}
        self.paused: set[str] = set()
        self.told: set[str] = set()
        self.copies: dict[str, str] = {}
        for event in events:
            self.events.append(event)
            self.add(event)

    def add(self, event: dict[str, Any]) -> None:
        kind, trial = event["event"], event["trial"]
        if kind == TRIAL:
            self.configs[trial] = event["config"]
        elif kind == REPORT:
            step = int(event["result"]["step"])
            self.decisions[trial, step] = event["decision"]
            self.results.setdefault(trial, {})[step] = event["result"]
            if "copy_of" in event["result"]:
                self.copies[trial] = event["result"]["copy_of"]
            if event["decision"] == PAUSE:
                self.paused.add(trial)
        elif kind == PROMOTE:
            self.paused.discard(trial)
        elif kind == END:
            self.ends[trial] = event
            self.paused.discard(trial)
            self.told.add(trial)
        elif kind == AGAIN:
            self.ends.pop(trial, None)

    @property
    def open(self) -> list[str]:
        """Trials that have not ended."""
        return [trial for trial in self.configs if trial not in self.ends]

    def last(self, trial: str) -> dict[str, Any] | None:
        """The result at the highest step that a trial has reported."""
        steps = self.results.get(trial)
        return steps[max(steps)] if steps else None

    def last_decision(self, trial: str) -> str | None:
        steps = self.results.get(trial)
        return self.decisions[trial, max(steps)] if steps else None
