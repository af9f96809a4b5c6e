"""Definition of a benchmark, its timing, and its results.

A module of this package collects itself: `@benchmark("name")` on a function `f(scale: Scale) -> Iterable[Row]`. Ours
and its rival always run in one process, turn by turn, so that a busy machine slows both; the median turn counts.
"""

from __future__ import annotations

import importlib
import math
import os
import pkgutil
import platform
import statistics
import subprocess
import time
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from datetime import date
from pathlib import Path
from typing import Any, TypeVar

import torch

HERE = Path(__file__).resolve().parent
LOG = HERE / "LOG.md"
NEWEST = "<!-- newest entry below -->"
BUSY = 3.0  # load at the start, so that of others, from which a machine counts as busy
T = TypeVar("T")


@dataclass(frozen=True)
class Scale:
    """Size of the measurements. `quick`: the smallest size, to see that it runs; `wide`: layers of large models, where
    a benchmark takes too long with them to do so every time; `device` "cpu" or "cuda"."""

    quick: bool = False
    device: str = "cpu"
    wide: bool = False

    def pick(self, quick: T, full: T) -> T:
        return quick if self.quick else full


@dataclass(frozen=True)
class Row:
    """A comparison: `ours` and `rival` in `unit`, less is better; `ratio` is rival / ours, above 1 ours is better.

    Without a rival the row is only a number. Raises ValueError for values that are not positive and finite.
    """

    name: str
    ours: float
    rival: float | None
    unit: str
    note: str = ""

    def __post_init__(self) -> None:
        for value in (self.ours, 1.0 if self.rival is None else self.rival):
            if not (math.isfinite(value) and value > 0):
                raise ValueError(f"{self.name}: expected positive finite {self.unit}, got {self.ours} and {self.rival}")

    @property
    def ratio(self) -> float | None:
        return None if self.rival is None else self.rival / self.ours


@dataclass(frozen=True)
class Benchmark:
    """`devices`: where it says something at full size."""

    name: str
    run: Callable[[Scale], Iterable[Row]]
    devices: tuple[str, ...] = ("cpu", "cuda")

    @property
    def title(self) -> str:
        return (self.run.__doc__ or self.name).strip().splitlines()[0].rstrip(".")


_found: dict[str, Benchmark] = {}


def benchmark(
    name: str, devices: tuple[str, ...] = ("cpu", "cuda")
) -> Callable[[Callable[[Scale], Iterable[Row]]], Callable[[Scale], Iterable[Row]]]:
    """Register a function as the benchmark `name`."""

    def register(run: Callable[[Scale], Iterable[Row]]) -> Callable[[Scale], Iterable[Row]]:
        _found[name] = Benchmark(name, run, devices)
        return run

    return register


def benchmarks() -> dict[str, Benchmark]:
    """All benchmarks, by name; every module of the package and of `needs` is imported."""
    for folder, package in ((HERE, "benchmarks"), (HERE / "needs", "benchmarks.needs")):
        for module in sorted(m.name for m in pkgutil.iter_modules([str(folder)])):
            if not module.startswith("__"):
                importlib.import_module(f"{package}.{module}")
    return _found


# ---- timing ------------------------------------------------------------------------------------------------------


def medians(
    works: Mapping[str, Callable[[], object]], rounds: int, device: str = "cpu", repeat: Mapping[str, int] | None = None
) -> dict[str, float]:
    """Median seconds of one call of each work. The works take turns; a first turn warms up and does not count.

    On the CPU processor time of this process, which other processes hardly change; on CUDA wall-clock time until the
    device is done. `repeat[name]`: calls a turn, for short works.
    """
    times: dict[str, list[float]] = {name: [] for name in works}
    for turn in range(rounds + 1):
        for name, work in works.items():
            count = (repeat or {}).get(name, 1)
            started = _now(device)
            for _ in range(count):
                work()
            if turn:
                times[name].append((_now(device) - started) / count)
    return {name: statistics.median(samples) for name, samples in times.items()}


def _now(device: str) -> float:
    if device == "cuda":
        torch.cuda.synchronize()
        return time.perf_counter()
    return time.process_time()


# ---- showing and keeping -----------------------------------------------------------------------------------------


def table(results: Mapping[str, Iterable[Row]]) -> str:
    """Markdown."""
    lines = ["| benchmark | ours | rival | unit | rival / ours | |", "|---|---|---|---|---|---|"]
    for name, rows in results.items():
        for row in rows:
            rival = "" if row.rival is None else f"{row.rival:.4g}"
            ratio = "" if row.ratio is None else f"**{row.ratio:.2f}**"
            lines.append(f"| {name}: {row.name} | {row.ours:.4g} | {rival} | {row.unit} | {ratio} | {row.note} |")
    return "\n".join(lines)


def machine(device: str) -> str:
    """In generic words; no names of hosts."""
    memory = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") / 2**30
    words = f"{os.cpu_count()} CPU cores, {memory:.0f} GB"
    return f"{words}, {torch.cuda.get_device_name()}" if device == "cuda" else words


def versions() -> str:
    import transformers

    return f"Python {platform.python_version()}, torch {torch.__version__}, transformers {transformers.__version__}"


def commit() -> str:
    def git(*words: str) -> str:
        done = subprocess.run(["git", *words], cwd=HERE, capture_output=True, text=True, check=False)
        return done.stdout.strip()

    # Pages and records that measurements write themselves are no changes
    written = [f":(top,exclude){path}" for path in ("docs/real.md", "docs/gpu.md", "docs/images", "benchmarks/**.json")]
    changed = " with changes" if git("status", "--porcelain", "--untracked-files=no", "--", ":/", *written) else ""
    return (git("rev-parse", "--short", "HEAD") or "unknown") + changed


def entry(results: Mapping[str, Iterable[Row]], command: str, device: str, load: float, seconds: float) -> str:
    """An entry of LOG.md. `load` is the machine's when the run began."""
    busy = " Busy machine: times are long, ratios are roughly right." if load > BUSY else ""
    head = f"## {date.today()}: `{command}`"
    about = f"{machine(device)}; {versions()}; commit {commit()}; load {load:.1f} at the start; {seconds:.0f} s.{busy}"
    return f"{head}\n\n{about}\n\n{table(results)}\n"


def keep(text: str, log: Path = LOG) -> None:
    """Put an entry above the others. Raises ValueError if the log lacks the line that it goes below."""
    content = log.read_text(encoding="utf-8")
    if NEWEST not in content:
        raise ValueError(f"{log} has no line {NEWEST!r}; put it above the newest entry")
    log.write_text(content.replace(NEWEST, f"{NEWEST}\n\n{text.rstrip()}", 1), encoding="utf-8")


def as_json(results: Mapping[str, Iterable[Row]]) -> list[dict[str, Any]]:
    return [{"benchmark": name, **vars(row), "ratio": row.ratio} for name, rows in results.items() for row in rows]
