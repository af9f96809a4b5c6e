"""One style of progress for all that takes long: the stage, what is done of all, and the time left, on stderr.

Code that works long opens a `stage`. Nothing is shown unless somebody asks for it with `shown`, as the command line
does; a stage within another is not shown, the outer one says enough. On a terminal a bar, which goes away when the
stage is done; elsewhere, as in a log, a line every few seconds.
"""

from __future__ import annotations

import sys
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from contextvars import ContextVar

from rich.console import Console
from rich.progress import BarColumn, Progress, TextColumn

SAY_SECONDS = 10.0  # between two lines where there is no terminal

_shows: ContextVar[bool] = ContextVar("shows", default=False)


def clock(seconds: float) -> str:
    """1:05:09, or 5:09 below an hour."""
    whole = max(0, round(seconds))
    hours, minutes, rest = whole // 3600, whole // 60 % 60, whole % 60
    return f"{hours}:{minutes:02d}:{rest:02d}" if hours else f"{minutes}:{rest:02d}"


@contextmanager
def shown(show: bool = True) -> Iterator[None]:
    """While the body runs, stages that it opens are shown, or not."""
    token = _shows.set(show)
    try:
        yield
    finally:
        _shows.reset(token)


class Stage:
    """How far a stage has come, of `total` things called `unit`. Threads may share one."""

    def __init__(self, label: str, total: int, unit: str, start: int = 0) -> None:
        self.label, self.total, self.unit, self.start = label, total, unit, start
        self.done = start
        self._lock, self._began = threading.Lock(), time.monotonic()

    def step(self, count: int = 1) -> None:
        """So many more are done."""
        with self._lock:
            self.done += count
            self._show()

    def to(self, done: int) -> None:
        """So many are done in all."""
        with self._lock:
            self.done = done
            self._show()

    @property
    def left(self) -> float | None:
        """Seconds, if what is left goes as fast as what is done; None before anything is."""
        made = self.done - self.start
        return (time.monotonic() - self._began) * (self.total - self.done) / made if made > 0 else None

    def __str__(self) -> str:
        left = "" if self.left is None else f", {clock(self.left)} left"
        return f"{self.label}: {self.done} of {self.total} {self.unit}{left}"

    def _show(self) -> None:
        """Nothing, unless it is shown."""


class _Line(Stage):
    """In a log."""

    _told = 0.0

    def _show(self) -> None:
        now = time.monotonic()
        if now - max(self._told, self._began) >= SAY_SECONDS:
            self._told = now
            print(self, file=sys.stderr, flush=True)


class _Bar(Stage):
    """On a terminal."""

    bar: Progress

    def _show(self) -> None:
        for task in self.bar.task_ids:
            self.bar.update(task, description=str(self), completed=self.done)


@contextmanager
def stage(label: str, total: int, unit: str, *, start: int = 0) -> Iterator[Stage]:
    """A stage of `total` things, of which `start` were done before. `label` says what is done, `unit` what is
    counted: "fitting layers", 32, "layers"."""
    if not _shows.get():
        yield Stage(label, total, unit, start)
        return
    terminal = sys.stderr.isatty()
    made = (_Bar if terminal else _Line)(label, total, unit, start)
    columns = (BarColumn(bar_width=24), TextColumn("{task.description}"))
    bar = Progress(*columns, console=Console(stderr=True), transient=True)
    with shown(False), bar if terminal else nullcontext():
        if isinstance(made, _Bar):
            made.bar = bar
            bar.add_task(str(made), total=total, completed=start)
        yield made
