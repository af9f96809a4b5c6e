"""MLflow that may be away: what is to be told is put on disk first, and sent in order, once.

`mlflow.jsonl` in the folder of a search only grows. A line with `op` is something to tell; a line with `sent` says that
it has been told, and for a new run under which id. What was sent but not marked so (killed in between) is sent again,
in such a way that the store has it once: a run carries the name that the spool gave it as a tag and is looked for by
it; a point of a series has the time of its first telling, and the store takes equal points once.
"""

from __future__ import annotations

import hashlib
import json
import logging
import os
import time
from collections import deque
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from attention.messages import reason
from orchestrator.tracking.runs import Tracker, TrackingError, default_uri, is_away, redact

logger = logging.getLogger(__name__)

NAME = "headfold.run"
"""The tag that holds the spool's own name of a run."""
PAUSE_SECONDS = (2.0, 60.0)
"""Between two attempts to reach a store that is away: the first one, and the longest."""


class SpooledTracker(Tracker):
    """A `Tracker` that never waits for its store and never fails for it, except for the registry.

    Ids of runs that the store has not given yet begin with "spool-"; every method takes them too.
    """

    def __init__(self, uri: str, experiment_id: str, spool: str | Path, *, pause: tuple[float, float] = PAUSE_SECONDS):
        super().__init__(uri, experiment_id)
        self.spool, self._pause = str(spool), pause
        self._loaded = False
        self._waiting: deque[dict[str, Any]] = deque()
        self._runs: dict[str, str] = {}  # the store's ids by our names
        self._names: dict[str, str] = {}  # and the other way round
        self._points: dict[str, dict[int, dict[str, set[str]]]] = {}  # values told, by run, step and name
        self._starts: dict[str, dict[str, Any]] = {}
        self._count, self._delay, self._next_try, self._told = 0, 0.0, 0.0, False

    @classmethod
    def beside(cls, uri: str | None, experiment: str, storage: str | Path, spool: Path) -> SpooledTracker:
        """As `Tracker.open`; a store that is away is no error for a search that has reached it before."""
        known = _experiment(spool)
        try:
            tracker = Tracker.open(uri, experiment, storage)
        except TrackingError as error:
            if known is None:
                raise
            logger.warning("%s (going on: what is to be told waits in %s)", error, spool)
            return cls(uri or default_uri(storage), known, spool)
        return cls.of(tracker, spool)

    @classmethod
    def of(cls, tracker: Tracker, spool: Path) -> SpooledTracker:
        """A tracker with a spool, which is made if it is new."""
        made = cls(tracker.uri, tracker.experiment_id, spool)
        if _experiment(spool) is None:
            spool.parent.mkdir(parents=True, exist_ok=True)
            made._append({"experiment": tracker.experiment_id})
        return made

    def __getstate__(self) -> dict[str, Any]:
        fresh = SpooledTracker(redact(self.uri), self.experiment_id, self.spool, pause=self._pause)
        return fresh.__dict__

    @property
    def waiting(self) -> int:
        """How much has not been sent."""
        self._load()
        return len(self._waiting)

    # ---- what is told ------------------------------------------------------------------------------------------

    def start(self, name: str, *, parent: str | None = None, tags: Mapping[str, Any] | None = None) -> str:
        """As `Tracker.start`, once for the same name, parent and tags."""
        self._load()
        labels = {key: str(value) for key, value in (tags or {}).items()}
        told = {"name": name, "parent": parent and self._own_name(parent), "tags": labels}
        own = "spool-" + hashlib.sha256(json.dumps(told, sort_keys=True).encode()).hexdigest()[:16]
        if own not in self._starts:
            self._put("start", own, **told)
        return self._runs.get(own, own)

    def params(self, run_id: str, params: Mapping[str, Any]) -> None:
        self._put("params", run_id, params=json.loads(redact(json.dumps(params, default=str))))

    def series(self, run_id: str, points: Sequence[Mapping[str, Any]], at: int | None = None) -> None:
        """As `Tracker.series`; a point that was told before is not told again."""
        self._load()
        fresh = []
        for point in points:
            step = int(point["step"])
            known = self._points.setdefault(self._own_name(run_id), {}).get(step, {})
            numbers = {k: float(v) for k, v in point.items() if isinstance(v, (int, float)) and not isinstance(v, bool)}
            numbers = {k: v for k, v in numbers.items() if k != "step" and repr(v) not in known.get(k, ())}
            if numbers:
                fresh.append({**numbers, "step": step})
        if fresh:
            self._put("series", run_id, points=fresh)

    def tags(self, run_id: str, tags: Mapping[str, Any]) -> None:
        self._put("tags", run_id, tags={key: redact(str(value)) for key, value in tags.items()})

    def text(self, run_id: str, text: str, file: str) -> None:
        self._put("text", run_id, text=redact(text), file=file)

    def file(self, run_id: str, path: str | Path, folder: str | None = None) -> None:
        """The file is read when it is sent: as it is then."""
        self._put("file", run_id, path=str(path), folder=folder)

    def end(self, run_id: str, status: str) -> None:
        self._put("end", run_id, status=status)

    def resume(self, run_id: str) -> None:
        self._put("resume", run_id)

    # ---- what is asked -----------------------------------------------------------------------------------------

    def find(self, parent: str, tags: Mapping[str, str]) -> str | None:
        """As `Tracker.find`, among the runs that the spool knows."""
        self._load()
        own = self._own_name(parent)
        for name, told in self._starts.items():
            if told["parent"] == own and all(told["tags"].get(k) == v for k, v in tags.items()):
                return self._runs.get(name, name)
        return None

    def logged_steps(self, run_id: str, key: str) -> set[int]:
        """As `Tracker.logged_steps`, of what the spool has taken, sent or not."""
        self._load()
        told = self._points.get(self._own_name(run_id), {})
        return {step for step, numbers in told.items() if key in numbers}

    def children(self, run_id: str) -> list[Any]:
        return super().children(self.real(run_id))

    def register(self, name: str, folder: str | Path, run_id: str, *, tags: Mapping[str, Any], description: str) -> str:
        """As `Tracker.register`; all that was told before is sent first. Raises TrackingError if that fails."""
        if not self.flush():
            raise TrackingError(f"the MLflow store at {self.address} is away; go on with --resume when it is back")
        return super().register(name, folder, self.real(run_id), tags=tags, description=description)

    def real(self, run_id: str) -> str:
        """The store's own id of a run. Raises TrackingError if it has given none yet."""
        self._load()
        found = self._runs.get(run_id, run_id)
        if found.startswith("spool-"):
            raise TrackingError(f"the MLflow store at {self.address} does not know the run {run_id} yet")
        return found

    # ---- sending -----------------------------------------------------------------------------------------------

    def flush(self) -> bool:
        """Try to send all that waits, now. Whether nothing is left."""
        self._load()
        self._next_try = 0.0
        self._drain()
        return not self._waiting

    def _put(self, op: str, run_id: str, **told: Any) -> None:
        self._load()
        self._count += 1
        event = {"n": self._count, "op": op, "run": self._own_name(run_id), "at": int(time.time() * 1000), **told}
        self._append(event)
        self._take(event)
        self._drain()

    def _drain(self) -> None:
        if time.monotonic() < self._next_try:
            return
        while self._waiting:
            event = self._waiting[0]
            try:
                given = self._send(event)
            except Exception as error:
                if is_away(error):
                    self._wait(error)
                    return
                logger.warning("MLflow has refused %s of run %s: %s", event["op"], event["run"], _first_line(error))
                given = None
            self._append({"sent": event["n"]} | ({"run_id": given} if given else {}))
            self._waiting.popleft()
            self._delay = 0.0
            self._given(event["run"], given)
        if self._told:
            logger.warning("MLflow at %s is back; all that waited was sent", self.address)
            self._told = False

    def _wait(self, error: Exception) -> None:
        first, longest = self._pause
        self._delay = min(longest, 2 * self._delay or first)
        self._next_try = time.monotonic() + self._delay
        self._opened = None
        if not self._told:
            logger.warning(
                "MLflow at %s is away (%s); what is to be told waits in %s",
                self.address,
                _first_line(error),
                self.spool,
            )
            self._told = True

    def _send(self, event: dict[str, Any]) -> str | None:
        """Tell the store. For a new run: its id."""
        op = event["op"]
        if op == "start":
            return self._send_start(event)
        own = str(event["run"])
        run = self._runs.get(own, own)
        if op == "params":
            super().params(run, event["params"])
        elif op == "series":
            super().series(run, event["points"], at=event["at"])
        elif op == "tags":
            super().tags(run, event["tags"])
        elif op == "text":
            super().text(run, event["text"], event["file"])
        elif op == "file":
            if Path(event["path"]).exists():
                super().file(run, event["path"], event["folder"])
        elif op == "end":
            super().end(run, event["status"])
        elif op == "resume":
            super().resume(run)
        return None

    def _send_start(self, event: dict[str, Any]) -> str:
        if event.get("tried"):  # it may have arrived, and only the answer was lost
            found = self.client.search_runs([self.experiment_id], f"tags.`{NAME}` = '{event['run']}'", max_results=1)
            if found:
                return found[0].info.run_id
        event["tried"] = True
        parent = event["parent"] and self._runs.get(event["parent"], event["parent"])
        return super().start(event["name"], parent=parent, tags={**event["tags"], NAME: event["run"]})

    # ---- the file ----------------------------------------------------------------------------------------------

    def _load(self) -> None:
        if self._loaded:
            return
        self._loaded = True
        sent: dict[int, str | None] = {}
        events = []
        for line in _lines(self.spool):
            if "sent" in line:
                sent[line["sent"]] = line.get("run_id")
            elif "op" in line:
                events.append(line)
        for event in events:
            self._count = max(self._count, event["n"])
            self._take({**event, "tried": True}, waiting=event["n"] not in sent)
            self._given(event["run"], sent.get(event["n"]))

    def _given(self, own: str, real: str | None) -> None:
        if real is not None:
            self._runs[own], self._names[real] = real, own

    def _take(self, event: dict[str, Any], waiting: bool = True) -> None:
        if event["op"] == "start":
            self._starts[event["run"]] = event
        elif event["op"] == "series":
            for point in event["points"]:
                told = self._points.setdefault(event["run"], {}).setdefault(int(point["step"]), {})
                for name, value in point.items():
                    told.setdefault(name, set()).add(repr(value))
        if waiting:
            self._waiting.append(event)

    def _own_name(self, run_id: str) -> str:
        """The spool's name of a run of its own; any other is called as it is."""
        return self._names.get(run_id, run_id)

    def _append(self, line: dict[str, Any]) -> None:
        with Path(self.spool).open("ab") as stream:
            if stream.tell() and not _ends_a_line(self.spool):
                stream.write(b"\n")  # after a line that a kill has cut short
            stream.write(json.dumps(line, allow_nan=True).encode() + b"\n")


def _lines(spool: str) -> list[dict[str, Any]]:
    """The whole lines of a spool; what a kill has cut short was not told to anybody."""
    if not Path(spool).exists():
        return []
    found = []
    for line in Path(spool).read_bytes().splitlines():
        try:
            found.append(json.loads(line))
        except ValueError:
            continue
    return [line for line in found if isinstance(line, dict)]


def _ends_a_line(spool: str) -> bool:
    with Path(spool).open("rb") as stream:
        stream.seek(-1, os.SEEK_END)
        return stream.read(1) == b"\n"


def _experiment(spool: Path) -> str | None:
    """The experiment that a spool was made for; None if there is no spool."""
    return next((line["experiment"] for line in _lines(str(spool)) if "experiment" in line), None)


def _first_line(error: Exception) -> str:
    return reason(error, redact)
