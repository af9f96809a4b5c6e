"""Reading what a training job names: dtypes, the teacher."""

from __future__ import annotations

from functools import lru_cache
from pathlib import Path
from typing import Any

import torch

from attention.io import checkpoint
from attention.io.precision import DTYPES
from trainers.jobs.job import TrainJob
from trainers.settings import TrainSettings

KEEP_BELOW = 500_000_000
"""Parameters up to which a teacher stays in a worker's process for the next job there."""


def load_teacher(job: TrainJob, settings: TrainSettings, device: torch.device, *, always: bool = False) -> Any:
    """The job's teacher without gradients; None if it has none or (unless `always`) if nothing is distilled from it."""
    if job.teacher_dir is None or (settings.distillation == "none" and not always):
        return None
    found = _teacher(job.teacher_dir, _stamp(job.teacher_dir), settings.dtype, device)
    if sum(p.numel() for p in found.parameters()) > KEEP_BELOW:
        _teacher.cache_clear()
    return found


@lru_cache(maxsize=1)
def _teacher(folder: str, stamp: int, dtype: str, device: torch.device) -> Any:
    """Shared by the jobs of a process, which only read it."""
    teacher: Any = checkpoint.load(folder, DTYPES[dtype])
    return teacher.to(device).requires_grad_(False)


def _stamp(folder: str) -> int:
    """Changes when a file in the folder does."""
    return max((file.stat().st_mtime_ns for file in Path(folder).glob("*")), default=0)
