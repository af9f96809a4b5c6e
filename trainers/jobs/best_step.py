"""The weights of the best measured step of a job, kept until a better one is measured.

    <out_dir>.best/step-000024/   a checkpoint like the finished one; if the last step is the best one, <out_dir> itself

Each report names the best step so far and where its weights lie. What the report of a kept training checkpoint names is
there as long as the checkpoint, so a job that goes on from one ends with the same best as one that was never stopped.
"""

from __future__ import annotations

import contextlib
import math
import shutil
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from attention.io import checkpoint

KEYS = ("best_step", "best_loss", "best_kl", "best_dir")
"""What a report says of the best step so far: which, its held-out loss and KL (nats a token), where its weights lie."""


def is_better(loss: float, known: dict[str, Any]) -> bool:
    """Whether a measured loss beats the best of a report. Of equal steps the earlier one stays."""
    return math.isfinite(loss) and loss < known.get("best_loss", math.inf)


def folder_of(out_dir: str, step: int) -> str:
    return str(_root(out_dir) / f"step-{step:06d}")


def is_there(report: dict[str, Any], out_dir: str) -> bool:
    """Whether the best weights that a report names are as they were written. Those in `out_dir` can be made again."""
    place = report.get("best_dir")
    return place in (None, out_dir) or checkpoint.intact(place)


def remove_others(out_dir: str, reports: Iterable[dict[str, Any]]) -> None:
    """Remove what none of the reports names."""
    named = {report.get("best_dir") for report in reports}
    root = _root(out_dir)
    for folder in [found for found in root.glob("*") if str(found) not in named]:
        shutil.rmtree(folder, ignore_errors=True)
    with contextlib.suppress(OSError):  # not empty, or never made
        root.rmdir()


def _root(out_dir: str) -> Path:
    return Path(f"{out_dir}.best")
