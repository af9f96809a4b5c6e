"""Out of memory in training.

Half the micro-batch with more accumulation, once, and the report says so.

The batch of a step, and so the training, does not change. A note next to the job's `out_dir` makes
a restarted job begin with the smaller micro-batch.
"""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

from attention.io.files import write_whole
from trainers.jobs.train_job import TrainJob
from trainers.settings import TrainSettings


class JobOutOfMemoryError(RuntimeError):
    """The job does not fit, also with a smaller micro-batch."""


class MicroBatchLoweredError(RuntimeError):
    """One of several workers ran out of memory.

    After a restart they continue with a smaller micro-batch.
    """


def lowered(settings: TrainSettings) -> TrainSettings | None:
    """Return the settings with at most half as many sequences at once.

    None if it is one already. Of a job for any number of workers, one may have fewer sequences
    than its micro-batch.
    """
    at_once = min(settings.device_batch_size, settings.worker_batch_size)
    smaller = range(1, at_once // 2 + 1)
    rows = max((r for r in smaller if settings.worker_batch_size % r == 0), default=None)
    return None if rows is None else settings.model_copy(update={"micro_batch_size": rows})


def _with_less(job: TrainJob) -> TrainJob | None:
    """Return the job with fewer sequences at once, also in a relaxation of other settings.

    None if it is one already in both.
    """
    settings, relaxation = lowered(job.settings), job.relaxation
    if relaxation is not None and relaxation.settings is not None:
        smaller = lowered(relaxation.settings)
        relaxation = replace(relaxation, settings=smaller or relaxation.settings)
    if settings is None and relaxation == job.relaxation:
        return None
    return replace(job, settings=settings or job.settings, relaxation=relaxation)


def lower_micro_batch(job: TrainJob, cause: str, already: bool) -> None:
    """Make the job use a smaller micro-batch from its next start on.

    Args:
        already: Whether it did so before.

    Raises:
        JobOutOfMemoryError: Then, and if a single sequence is too much.
    """
    rows = job.settings.device_batch_size
    if already or _with_less(job) is None:
        tried = ", which was lowered to already" if already else ""
        raise JobOutOfMemoryError(
            f"out of memory with micro_batch_size {rows}{tried}: {cause}; lower "
            f"train.micro_batch_size or "
            "data.sequence_length, set train.activation_checkpointing, raise train.zero_stage, or "
            "use more workers or "
            "memory"
        )
    write_whole(memory_note(job), json.dumps({"rows": rows, "cause": cause}))


def as_it_fits(job: TrainJob) -> tuple[TrainJob, list[str]]:
    """Return the job with the micro-batch that earlier starts found, and notes for its report."""
    file = memory_note(job)
    if not file.exists():
        return job, []
    rows = json.loads(file.read_text())["rows"]
    smaller = _with_less(job)
    if rows != job.settings.device_batch_size or smaller is None:
        return job, []  # of a job with other settings
    settings = smaller.settings
    if settings == job.settings:
        message = f"out of memory with micro_batch_size {rows}: halved in the relaxation alone"
    else:
        message = (
            f"out of memory with micro_batch_size {rows}: trained with "
            f"{settings.device_batch_size} and {settings.gradient_accumulation_steps} accumulation "
            f"steps instead of {job.settings.gradient_accumulation_steps}"
        )
    return smaller, [message]


def memory_note(job: TrainJob) -> Path:
    """Return the path of the note, which is there once a micro-batch was lowered."""
    return Path(f"{job.out_dir}.memory.json")
