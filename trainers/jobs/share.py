"""One worker's share of a training job: its part of the data, the teacher, a stopwatch."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from contextlib import closing, contextmanager
from functools import lru_cache
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from transformers import PreTrainedModel

from attention.io import checkpoint
from attention.io.precision import DTYPES
from attention.modeling.predictions import Final
from trainers.evaluation import Evaluation, evaluate
from trainers.jobs.train_job import TrainJob
from trainers.loop import LossFunction
from trainers.losses import objective
from trainers.settings import TrainSettings
from trainers.text.data import BatchStream, read_sequences

KEEP_BELOW = 500_000_000
"""Parameters up to which an original model stays in a process for its next job or trial."""


class WorkerShare:
    """The part of one worker in a job that is trained with `settings`.

    `seconds`: of work, up to the last `lap`.
    """

    def __init__(self, job: TrainJob, settings: TrainSettings) -> None:
        self.job = job
        self.settings = settings
        self.rank = dist.get_rank()
        self.world_size = dist.get_world_size()
        sequences = read_sequences(job.train_file)
        self.stream = BatchStream(
            sequences,
            settings.batch_size,
            rank=self.rank,
            world_size=self.world_size,
            seed=job.seed,
        )
        self.tokens_a_step = settings.batch_size * sequences.shape[1]
        self.held_out = read_sequences(job.eval_file)[:]
        self.seconds = 0.0
        self._last = time.perf_counter()

    def loss_fn(
        self, teacher: Any, stored: Callable[[Tensor], Final] | None = None
    ) -> LossFunction:
        """Return the loss of this job's settings on its text.

        Args:
            teacher: As in `trainers.losses.objective`.
            stored: Stored predictions, which replace it.
        """
        settings = self.settings
        text = packed_text(settings, self.job.model_dir)
        distillation, weight = settings.distillation, settings.distillation_weight
        return objective(distillation, weight, teacher, stored=stored, **text)

    def lap(self) -> float:
        """Seconds since the last call."""
        now = time.perf_counter()
        lap = now - self._last
        self._last = now
        self.seconds += lap
        return lap

    def load(self, folder: str | Path) -> PreTrainedModel:
        return checkpoint.load(folder, DTYPES[self.settings.dtype])

    def evaluate(self, model: Any, teacher: Any = None) -> Evaluation:
        """On the held-out text, with all other workers."""
        return evaluate_together(model, self.held_out, self.settings, teacher)


def evaluate_together(
    model: Any, sequences: Tensor, settings: TrainSettings, teacher: Any = None
) -> Evaluation:
    """Evaluate `sequences` `[N, T]`, shared by all workers of the process group."""
    return evaluate(
        model,
        sequences,
        teacher=teacher,
        batch_size=settings.device_batch_size,
        rank=dist.get_rank(),
        world_size=dist.get_world_size(),
        reduce=dist.all_reduce,
    )


def packed_text(settings: TrainSettings, folder: str | Path) -> dict[str, Any]:
    """Return the arguments of `trainers.losses.objective` for packed text.

    `positions` where documents are kept apart, `answers` where these alone are counted.

    Args:
        settings: Of the training.
        folder: Of the model, with its tokenizer.
    """
    # Here, and not above: few trainings need these
    functions: dict[str, Any] = {}
    if settings.document_mask:
        from attention.io.tokenizers import read_tokenizer
        from trainers.text.documents import DocumentStarts

        functions["positions"] = DocumentStarts.of(read_tokenizer(folder)).positions
    if settings.assistant_only_loss:
        from attention.io.tokenizers import read_tokenizer
        from trainers.text.answers import AnswerSpans

        functions["answers"] = AnswerSpans.of(read_tokenizer(folder)).mask
    return functions


@contextmanager
def teacher_of(job: TrainJob, settings: TrainSettings, device: torch.device) -> Iterator[Any]:
    """Open the job's teacher, without gradients; None if nothing is distilled.

    With ZeRO 3 it is split over the workers as the model is, and read for this job alone.
    """
    if settings.distillation == "none":
        yield None
    elif settings.zero_stage == 3:
        with frozen_model(str(job.teacher_dir), settings, device) as teacher:
            yield teacher
    else:
        yield _whole_teacher(str(job.teacher_dir), settings, device)


@contextmanager
def frozen_model(
    folder: str | Path, settings: TrainSettings, device: torch.device
) -> Iterator[Any]:
    """Open a checkpoint to run, without gradients, while the body runs.

    With ZeRO 3 it is split over the workers, who run it together.
    """
    if settings.zero_stage == 3:
        from trainers.zero import SplitModel  # here, and not above: it loads DeepSpeed

        with closing(SplitModel(folder, settings)) as split:
            yield split.model
    else:
        whole: Any = checkpoint.load(folder, DTYPES[settings.dtype])
        yield whole.to(device).requires_grad_(False)


def _whole_teacher(folder: str, settings: TrainSettings, device: torch.device) -> Any:
    # Read again when one of its files has changed
    stamp = max((file.stat().st_mtime_ns for file in Path(folder).glob("*")), default=0)
    teacher = _cached_teacher(folder, stamp, settings.dtype, device)
    if sum(p.numel() for p in teacher.parameters()) > KEEP_BELOW:
        _cached_teacher.cache_clear()
    return teacher


@lru_cache(maxsize=1)
def _cached_teacher(folder: str, stamp: int, dtype: str, device: torch.device) -> Any:
    """Shared by the jobs of a process, which only read it."""
    teacher: Any = checkpoint.load(folder, DTYPES[dtype])
    return teacher.to(device).requires_grad_(False)
