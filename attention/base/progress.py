"""One style of progress for all long operations.

The stage, what is done of all, and the time left, on stderr.

Long operations open a `stage`. Nothing is shown outside of `show_progress`, which the command line
enters for a whole verb. A stage nested in one that counts is not shown. On a terminal a stage that
counts has a bar, which is removed when the stage ends. Elsewhere, as in a log, a thread writes a
line when a count has changed, and at least every half minute, so that nothing looks hung; facts
that have not changed since the last line are left out.
"""

from __future__ import annotations

import re
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from itertools import compress

from rich.console import Console
from rich.progress import BarColumn, Progress, TextColumn

from attention.base.timing import clock

SAY_SECONDS = 10.0  # between two lines where there is no bar
SILENT_SECONDS = 30.0  # after which there is a line although nothing has changed
CLOCK = re.compile(r"[\d:]+ left|elapsed [\d:]+")
"""The time in a line of progress, which changes by itself."""
_LOOK_SECONDS = 0.5
_MIN_SHARE = 0.05  # of the work, before the time left is a fair estimate


class ProgressStage:
    """The progress of one stage of work. Threads may share one.

    Attributes:
        label: What is done.
        total: How many units there are in all; None if they cannot be counted.
        unit: What is counted.
        note: What else the progress line says.
        detail: Called for each line, e.g. for the progress of other processes.
    """

    def __init__(
        self,
        label: str,
        total: int | None = None,
        unit: str = "",
        start: float = 0,
        screen: _Screen | None = None,
    ) -> None:
        self.label = label
        self.total = total
        self.unit = unit
        self.start = start
        self.done = float(start)
        self.note = ""
        self._screen = screen
        self.detail: Callable[[], str] | None = None
        self._lock = threading.Lock()
        self._began = time.monotonic()
        self._stepped = self._began

    def step(self, count: int = 1) -> None:
        """Count `count` more units as done."""
        with self._lock:
            self._to(self.done + count)

    def to(self, done: float, note: str = "") -> None:
        """Set how many units are done in all; a fraction is a unit that is under way."""
        with self._lock:
            self.note = note
            self._to(done)

    def begin(self, done: float) -> None:
        """Set how many units were done before, and restart the clock.

        The elapsed time does not predict the rest, e.g. because workers were starting.
        """
        with self._lock:
            self.start = done
            self.done = done
            self._began = self._stepped = time.monotonic()

    def _to(self, done: float) -> None:
        if done != self.done:
            self.done = done
            self._stepped = time.monotonic()
        if self._screen is not None:
            self._screen.show(self)

    @property
    def left(self) -> float | None:
        """The estimated seconds left, at the mean speed; None before 5 % of the work is done."""
        completed = self.done - self.start
        now = time.monotonic()
        if self.total is None or completed <= 0:
            return None
        if completed < _MIN_SHARE * (self.total - self.start):
            return None
        each = (self._stepped - self._began) / completed
        # One that takes longer has a quarter to come.
        under_way = min(0.75 * each, now - self._stepped)
        return max(0.0, each * (self.total - self.done) - under_way)

    @property
    def facts(self) -> list[str]:
        """Count and time, then what the note and the detail say."""
        parts = [] if self.total is None else [f"{int(self.done)} of {self.total} {self.unit}"]
        since = time.monotonic() - self._began
        if self.left is not None:
            parts.append(f"{clock(self.left)} left")
        elif since >= 1 or not parts:
            parts.append(f"elapsed {clock(since)}")
        details = "; ".join(filter(None, (self.note, self.detail() if self.detail else "")))
        return [", ".join(parts), *filter(None, details.split("; "))]

    def __str__(self) -> str:
        return f"{self.label}: {'; '.join(self.facts)}"


def _print(line: str) -> None:
    print(line, file=sys.stderr, flush=True)


class _Screen:
    """The stages of a verb that are shown: the newest that is open.

    Args:
        say: Takes its line every so many seconds.
    """

    def __init__(self, label: str, say: Callable[[str], None], every: float) -> None:
        self._printed_at = time.monotonic()
        self._lock = threading.Lock()
        self._say = say
        self._every = every
        self._printed: tuple[str, ...] = ()
        self.stages = [ProgressStage(label)]
        self.bar: Progress | None = None

    def show(self, stage: ProgressStage) -> None:
        """Update the bar, or write a line if it is time for one."""
        with self._lock:
            if self.bar is not None:
                for task in self.bar.task_ids:
                    self.bar.update(task, description=str(stage), completed=stage.done)
            elif time.monotonic() - self._printed_at >= self._every:
                self._write(stage)

    def _write(self, stage: ProgressStage) -> None:
        """Write a line: for a log what is new since the last one, for other readers all of it."""
        facts = stage.facts
        if self._say is _print:
            head, *details = (CLOCK.sub("", fact) for fact in facts)
            seen = (stage.label, head, *details)
            recent = time.monotonic() - self._printed_at < SILENT_SECONDS
            compared = None if stage.total is None else 2  # a count says enough for a while
            if seen[:compared] == self._printed[:compared] and recent:
                return
            if self._printed[:1] == seen[:1]:
                new = [detail not in self._printed for detail in details]
                facts = [facts[0], *compress(facts[1:], new)]
            self._printed = seen
        self._printed_at = time.monotonic()
        self._say(f"{stage.label}: {'; '.join(facts)}")

    @contextmanager
    def opened(self, stage: ProgressStage) -> Iterator[None]:
        self.stages.append(stage)
        try:
            if stage.total is None or self._say is not _print or not sys.stderr.isatty():
                yield
                return
            columns = (BarColumn(bar_width=24), TextColumn("{task.description}"))
            console = Console(stderr=True)
            with Progress(
                *columns, console=console, transient=True, redirect_stdout=sys.stdout.isatty()
            ) as self.bar:
                self.bar.add_task(str(stage), total=stage.total, completed=int(stage.start))
                yield
        finally:
            self.bar = None
            self.stages.remove(stage)

    def watch(self, ended: threading.Event) -> None:
        while not ended.wait(_LOOK_SECONDS):
            self.show(self.stages[-1])


_screen: ContextVar[_Screen | None] = ContextVar("screen", default=None)


@contextmanager
def show_progress(
    label: str, say: Callable[[str], None] = _print, every: float | None = None
) -> Iterator[None]:
    """Show the stages that are opened while the body runs.

    Args:
        label: Shown while no stage is open.
        say: Takes the lines where they do not go to stderr.
        every: Seconds between two lines.
    """
    screen = _Screen(label, say, SAY_SECONDS if every is None else every)
    ended = threading.Event()
    watcher = threading.Thread(target=screen.watch, args=(ended,), name="progress", daemon=True)
    token = _screen.set(screen)
    watcher.start()
    try:
        yield
    finally:
        _screen.reset(token)
        ended.set()
        watcher.join()


@contextmanager
def stage(
    label: str, total: int | None = None, unit: str = "", *, start: float = 0
) -> Iterator[ProgressStage]:
    """Open a stage of progress while the body runs.

    Args:
        label: What is done, e.g. "fitting layers".
        total: How many units there are; None for what cannot be counted.
        unit: What is counted, e.g. "layers".
        start: How many were done before.

    Yields:
        The stage, whose `step` and `to` are called as work is done.
    """
    screen = _screen.get()
    opened = ProgressStage(label, total, unit, start, screen)
    if screen is None:
        yield opened
        return
    token = _screen.set(screen if total is None else None)
    try:
        with screen.opened(opened):
            yield opened
    finally:
        _screen.reset(token)
