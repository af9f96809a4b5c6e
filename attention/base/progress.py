"""One style of progress for all that takes long: the stage, what is done of all, and the time left, on stderr.

Code that works long opens a `stage`. Nothing is shown unless somebody asks for it with `shown`, as the command line
does for a whole verb; a stage within one that counts is not shown, the outer one says enough. On a terminal a stage
that counts has a bar, which goes away when it is done. Elsewhere, as in a log, a thread writes a line every few
seconds, so that nothing looks hung, however long a step takes or libraries load.
"""

from __future__ import annotations

import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from contextvars import ContextVar

from rich.console import Console
from rich.progress import BarColumn, Progress, TextColumn

from attention.base.timing import clock

SAY_SECONDS = 10.0  # between two lines where there is no bar
_LOOK_SECONDS = 0.5


class Stage:
    """How far a stage has come, of `total` things called `unit`; None: it cannot be counted. Threads may share one.
    `note`: what else its line says; `detail`: asked for it each time, as for what goes on in other processes."""

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
        """So many more are done."""
        with self._lock:
            self._to(self.done + count)

    def to(self, done: float, note: str = "") -> None:
        """So many are done in all; a fraction is one that is under way."""
        with self._lock:
            self.note = note
            self._to(done)

    def begin(self, done: float) -> None:
        """So many are done now, and the time so far tells nothing of the rest, such as that which workers start in."""
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
        """Seconds, if what is left goes as fast as what is done; None before anything is."""
        made = self.done - self.start
        now = time.monotonic()
        if self.total is None or made <= 0:
            return None
        each = (self._stepped - self._began) / made
        # One that takes longer has a quarter to come.
        under_way = min(0.75 * each, now - self._stepped)
        return max(0.0, each * (self.total - self.done) - under_way)

    def __str__(self) -> str:
        parts = [] if self.total is None else [f"{int(self.done)} of {self.total} {self.unit}"]
        since = time.monotonic() - self._began
        if self.left is not None:
            parts.append(f"{clock(self.left)} left")
        elif since >= 1 or not parts:
            parts.append(f"{clock(since)} so far")
        told = [", ".join(parts), self.note, self.detail() if self.detail else ""]
        return f"{self.label}: {'; '.join(filter(None, told))}"


def _print(line: str) -> None:
    print(line, file=sys.stderr, flush=True)


class _Screen:
    """Where the stages of a verb are shown: the newest that is open. `say`: takes its line every so many seconds."""

    def __init__(self, label: str, say: Callable[[str], None], every: float) -> None:
        self._told = time.monotonic()
        self._lock = threading.Lock()
        self._say = say
        self._every = every
        self.stages = [Stage(label)]
        self.bar: Progress | None = None

    def show(self, stage: Stage) -> None:
        """That a stage has come further, or is still at work."""
        with self._lock:
            if self.bar is not None:
                for task in self.bar.task_ids:
                    self.bar.update(task, description=str(stage), completed=stage.done)
            elif time.monotonic() - self._told >= self._every:
                self._told = time.monotonic()
                self._say(str(stage))

    @contextmanager
    def opened(self, stage: Stage) -> Iterator[None]:
        self.stages.append(stage)
        try:
            if stage.total is None or self._say is not _print or not sys.stderr.isatty():
                yield
                return
            columns = (BarColumn(bar_width=24), TextColumn("{task.description}"))
            told = Console(stderr=True)
            with Progress(
                *columns, console=told, transient=True, redirect_stdout=sys.stdout.isatty()
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
def shown(
    label: str, say: Callable[[str], None] = _print, every: float | None = None
) -> Iterator[None]:
    """While the body runs, show the stages that it opens, and where it has none that it, called `label`, is at work.
    `say`: takes the lines, one in `every` seconds, where they do not go to stderr."""
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
) -> Iterator[Stage]:
    """A stage of `total` things, of which `start` were done before; None for what cannot be counted. `label` says what
    is done, `unit` what is counted: "fitting layers", 32, "layers"."""
    screen = _screen.get()
    made = Stage(label, total, unit, start, screen)
    if screen is None:
        yield made
        return
    token = _screen.set(screen if total is None else None)
    try:
        with screen.opened(made):
            yield made
    finally:
        _screen.reset(token)
