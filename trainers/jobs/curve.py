"""The course of a training while it runs: a line of JSON every few seconds, which the driver shows in MLflow.

Only rank 0 writes. A training that was killed goes on from a checkpoint and repeats steps: of a step the last line
counts.
"""

from __future__ import annotations

import json
import time
from pathlib import Path
from typing import Any

import torch

NAME = "curve.jsonl"
SECONDS = 10.0
"""Between two lines."""
PEAK = {"A100": 312e12, "H100": 989e12, "H200": 989e12, "B200": 2250e12}
"""Operations a second of dense bfloat16 products, by a part of the device's name; from NVIDIA's data sheets."""


class Curve:
    """Lines of the run in `folder`; `flops_per_token`: of a step, forward and back."""

    def __init__(self, folder: Path, flops_per_token: float, workers: int) -> None:
        folder.mkdir(parents=True, exist_ok=True)
        self._file, self._flops, self._workers = folder / NAME, flops_per_token, workers
        self._written, self._tokens, self._seconds = 0.0, 0, 0.0

    def add(
        self, step: int, loss: float, rate: float, gradient_norm: float | None, tokens: int, seconds: float
    ) -> None:
        """After a step of `tokens` tokens that took `seconds`."""
        self._tokens, self._seconds = self._tokens + tokens, self._seconds + seconds
        if time.time() - self._written < SECONDS:
            return
        self._written, speed = time.time(), self._tokens / self._seconds
        line = {"step": step, "time": self._written, "batch_loss": loss, "learning_rate": rate, "speed": speed}
        if gradient_norm is not None:
            line["gradient_norm"] = gradient_norm
        if (peak := peak_flops()) is not None:
            line["mfu"] = speed * self._flops / (peak * self._workers)
        with self._file.open("a", encoding="utf-8") as stream:
            stream.write(json.dumps(line) + "\n")
        self._tokens, self._seconds = 0, 0.0


def read_curve(folder: Path) -> list[dict[str, Any]]:
    """The lines of a run by rising step; a last one that is half written is left out."""
    lines: dict[int, dict[str, Any]] = {}
    file = folder / NAME
    for text in file.read_text(encoding="utf-8").splitlines(keepends=True) if file.exists() else ():
        if text.endswith("\n"):
            line = json.loads(text)
            lines[line["step"]] = line
    return [lines[step] for step in sorted(lines)]


def peak_flops() -> float | None:
    """Of this process's GPU; None without one, or for one that is not known."""
    if not torch.cuda.is_available():
        return None
    name = torch.cuda.get_device_name()
    return next((peak for part, peak in PEAK.items() if part in name), None)
