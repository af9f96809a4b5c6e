"""The course of a training while it runs.

One line of JSON every few seconds, which the driver shows in MLflow; the client of the job shows
its speed (`trainers.jobs.link.Link`).

Only rank 0 writes. A training that was killed resumes from a checkpoint and repeats steps: the last
line of a step is valid.
"""

from __future__ import annotations

import contextlib
import json
import os
import time
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any

import psutil
import torch

from trainers.jobs.utilization import TokenWork, peak_flops

if TYPE_CHECKING:
    from trainers.engine import TrainEngine

_NAME = "curve.jsonl"
_SECONDS = 10.0
"""Between two lines."""


class Curve:
    """Lines of the run in `folder`, of an `engine` on `workers` devices.

    Each is also given to `show`. `work`: of a token of the training.
    """

    def __init__(
        self,
        folder: Path,
        engine: TrainEngine,
        workers: int,
        show: Callable[[dict[str, Any]], None],
        work: TokenWork,
    ) -> None:
        folder.mkdir(parents=True, exist_ok=True)
        self._show = show
        self._file = folder / _NAME
        self._engine = engine
        self._on_gpu = engine.device.type == "cuda"  # others may see one too
        self._workers = workers
        self._work = work
        self._written = 0.0
        self._tokens = 0
        self._seconds = 0.0
        node_use(gpu=False)  # a share of CPU time is that since the call before

    def add(self, step: int, loss: float, tokens: int, seconds: float) -> None:
        """After a step of `tokens` tokens that took `seconds`."""
        self._tokens = self._tokens + tokens
        self._seconds = self._seconds + seconds
        if time.time() - self._written < _SECONDS:
            return
        self._written = time.time()
        speed = self._tokens / self._seconds
        line = {"step": step, "time": self._written, "batch_loss": loss, "tokens_per_second": speed}
        line |= {
            "learning_rate": self._engine.last_rate,
            "gradient_norm": self._engine.gradient_norm,
        }
        line |= node_use(gpu=self._on_gpu)
        if self._on_gpu and (peak := peak_flops()) is not None:
            line["mfu"] = speed * self._work.model / (peak * self._workers)
            line["hfu"] = speed * self._work.hardware / (peak * self._workers)
        with self._file.open("a", encoding="utf-8") as stream:
            stream.write(json.dumps(line) + "\n")
        self._show(line)
        self._tokens = 0
        self._seconds = 0.0


def read_curve(folder: Path) -> list[dict[str, Any]]:
    """Return the lines of a run by rising step, without one that a kill has truncated."""
    lines: dict[int, dict[str, Any]] = {}
    file = folder / _NAME
    for text in file.read_text(encoding="utf-8").splitlines() if file.exists() else ():
        with contextlib.suppress(ValueError):
            line = json.loads(text)
            lines[line["step"]] = line
    return [lines[step] for step in sorted(lines)]


class CurveReader:
    """Reads what a run has appended to its curve since the last look, and no line twice."""

    def __init__(self, folder: Path) -> None:
        self._file = folder / _NAME
        self._offset = 0

    def new_lines(self) -> list[dict[str, Any]]:
        """Return the new complete lines, without those that cannot be read."""
        lines: list[dict[str, Any]] = []
        with contextlib.suppress(FileNotFoundError), self._file.open("rb") as stream:
            if stream.seek(0, os.SEEK_END) < self._offset:  # another file
                self._offset = 0
            stream.seek(self._offset)
            for text in stream:
                if not text.endswith(b"\n"):  # still being written
                    break
                self._offset += len(text)
                with contextlib.suppress(ValueError):
                    lines.append(json.loads(text))
        return lines


def node_use(*, gpu: bool) -> dict[str, float]:
    """Measure the node of this process.

    CPU in percent of all, memory in MB, and that of the process's GPU, if it trains on one.
    """
    used = {
        "cpu_percent": psutil.cpu_percent(),
        "memory_megabytes": psutil.virtual_memory().used / 1e6,
    }
    if gpu:
        free, total = torch.cuda.mem_get_info()
        used["gpu_memory_megabytes"] = (total - free) / 1e6
    return used
