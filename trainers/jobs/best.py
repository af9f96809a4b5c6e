"""The weights of a run's best measured step: `<out_dir>.best/step-000024/`.

`<out_dir>` if the last step is the best.

Each report names the best step so far and where its weights lie. What the report of a kept training
checkpoint names is there as long as the checkpoint, so a job that goes on from one ends with the
same best as one never stopped.
"""

from __future__ import annotations

import contextlib
import shutil
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

from attention.io import checkpoint

BEST_KEYS = ("best_step", "best_loss", "best_kl", "best_dir")
"""In a report: the best step so far, its held-out loss and KL (nats a token), where its weights
lie."""


def best_folder(out_dir: str, step: int) -> str:
    """Return the folder of the weights of `step`, while they are the best so far."""
    return f"{out_dir}.best/step-{step:06d}"


def best_is_there(report: dict[str, Any], out_dir: str) -> bool:
    """Whether the best weights that a report names are as they were written.

    Those in `out_dir` can be made again.
    """
    path = report.get("best_dir")
    return path in (None, out_dir) or checkpoint.intact(path)


def remove_other_bests(out_dir: str, reports: Iterable[Mapping[str, Any]]) -> None:
    """Remove what none of the reports names."""
    named = {report.get("best_dir") for report in reports}
    root = Path(f"{out_dir}.best")
    for folder in root.glob("*"):
        if str(folder) not in named:
            shutil.rmtree(folder, ignore_errors=True)
    with contextlib.suppress(OSError):  # not empty, or never made
        root.rmdir()
