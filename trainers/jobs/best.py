"""The weights of a run's best measured step: `<out_dir>.best/step-000024/`.

`<out_dir>` if the last step is the best.

Each report names the best step and the address of its weights. The weights that the report of a
stored training checkpoint names exist as long as the checkpoint, so a resumed job ends with the
same best step as one that was never stopped.
"""

from __future__ import annotations

import contextlib
import shutil
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

from attention.io import checkpoint

BEST_KEYS = ("best_step", "best_loss", "best_kl", "best_dir")
"""In a report: the best step, its held-out loss and KL (nats per token), and the address of its
weights."""


def best_folder(out_dir: str, step: int) -> str:
    """Return the folder of the weights of `step`, while they are the best."""
    return f"{out_dir}.best/step-{step:06d}"


def best_is_there(report: dict[str, Any], out_dir: str) -> bool:
    """Whether the best weights that a report names are unchanged since they were written.

    Those in `out_dir` can be made again.
    """
    path = report.get("best_dir")
    return path in (None, out_dir) or checkpoint.intact(path)


def remove_other_bests(out_dir: str, reports: Iterable[Mapping[str, Any]]) -> None:
    """Remove what none of the reports names.

    By the names of the folders: a path may be spelt in several ways.
    """
    named = {Path(str(report.get("best_dir"))).name for report in reports}
    root = Path(f"{out_dir}.best")
    for folder in root.glob("*"):
        if folder.name not in named:
            shutil.rmtree(folder, ignore_errors=True)
    with contextlib.suppress(OSError):  # not empty, or never made
        root.rmdir()
