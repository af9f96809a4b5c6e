"""Reading what a training job names: dtypes, the teacher, the tokenizer beside a checkpoint."""

from __future__ import annotations

from typing import Any

import torch

from attention import checkpoint
from trainers.job import TrainJob
from trainers.settings import TrainSettings

DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16}


def load_teacher(job: TrainJob, settings: TrainSettings, device: torch.device, *, always: bool = False) -> Any:
    """The job's teacher without gradients; None if it has none or (unless `always`) if nothing is distilled from it."""
    if job.teacher_dir is None or (settings.distillation == "none" and not always):
        return None
    teacher: Any = checkpoint.load(job.teacher_dir, DTYPES[settings.dtype])
    return teacher.to(device).requires_grad_(False)


def tokenizer_beside(folder: str) -> Any:
    """The tokenizer beside a checkpoint, if it has one, to travel on with the weights."""
    from transformers import AutoTokenizer

    try:
        return AutoTokenizer.from_pretrained(folder)
    except (OSError, ValueError):
        return None
