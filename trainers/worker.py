"""The one Ray Train file: a training job, carried out by workers that may die and come back.

What a job reads (`train_file`, `eval_file`, checkpoints) and writes must be visible to every node: shared storage on a
cluster of several.
"""

from __future__ import annotations

import tempfile
import time
from collections.abc import Sequence
from contextlib import closing
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import ray.train
import torch
from ray.train import CheckpointConfig, FailureConfig, RunConfig, ScalingConfig
from ray.train.torch import TorchConfig, TorchTrainer

from attention import checkpoint
from trainers.data import read_sequences
from trainers.evaluation import Evaluation, evaluate
from trainers.job import TrainJob, TrainOutcome
from trainers.loop import TrainingDiverged, train
from trainers.losses import objective
from trainers.models import DTYPES, load_teacher, tokenizer_beside
from trainers.stream import BatchStream

if TYPE_CHECKING:
    from trainers.relaxing import Relaxed

__all__ = ["TrainJob", "TrainOutcome", "TrainingDiverged", "run_training"]


def run_training(job: TrainJob, *, callbacks: Sequence[Any] = ()) -> TrainOutcome:
    """Carry out a job on Ray Train workers and wait for it.

    At each milestone rank 0 reports loss, kl (None without a teacher), step, tokens, train_loss (mean since the last
    milestone), tokens_per_second (of training alone) and seconds (of the job, start-up of processes not counted).
    A job with a relaxation goes through it first; its tokens and seconds count, and the report has relaxation_steps,
    collapsed_loss (before any recovery) and relaxed_dir besides.
    `callbacks` are Ray Train's. Inside a Tune trial pass `TuneReportCallback()`.

    Raises TrainingDiverged when the loss is no longer finite, and Ray's TrainingFailedError when workers failed more
    than `max_failures` times.
    """
    settings = job.settings
    gpus = settings.gpus_per_worker
    resources = {"CPU": settings.cpus_per_worker} | ({"GPU": gpus} if gpus else {})
    trainer = TorchTrainer(
        _work,
        train_loop_config={"job": job.to_json()},
        torch_config=TorchConfig(backend="nccl" if gpus else "gloo"),
        scaling_config=ScalingConfig(
            num_workers=settings.num_workers, use_gpu=bool(gpus), resources_per_worker=resources
        ),
        run_config=RunConfig(
            name=job.run_name,
            storage_path=job.storage_path,
            # Without a limit on the controller's failures a start that can never succeed is tried for ever
            failure_config=FailureConfig(max_failures=job.max_failures, controller_failure_limit=1),
            checkpoint_config=CheckpointConfig(num_to_keep=1),
            callbacks=list(callbacks),
            logging_config=ray.train.LoggingConfig(log_level="WARNING"),
        ),
    )
    result = trainer.fit()
    finished = result.return_value or {}
    if "diverged" in finished:
        raise TrainingDiverged(finished["diverged"])
    if result.checkpoint is None or result.metrics is None:
        raise RuntimeError(f"run {job.run_name!r} ended without a report; see its logs under {job.storage_path}")
    return TrainOutcome(result.checkpoint.path, {**result.metrics, **finished})


def _work(config: dict[str, Any]) -> dict[str, Any]:
    """What every worker runs. Returns the finished weights' place and digest, or why training was given up."""
    from transformers.utils import logging as transformers_logging

    from trainers.engine import Engine  # here, and not above: the driver has no need to load DeepSpeed
    from trainers.relaxing import relax

    transformers_logging.disable_progress_bar()
    job, relaxed = TrainJob.from_json(config["job"]), None
    torch.set_num_threads(max(1, int(job.settings.cpus_per_worker)))
    if job.relaxation is not None:
        context = ray.train.get_context()
        try:
            relaxed = relax(job, context.get_world_rank(), context.get_world_size())
        except TrainingDiverged as error:
            return {"diverged": f"relaxation: {error}"}
        job = replace(job, model_dir=relaxed.model_dir, relaxation=None)
    model = checkpoint.load(job.model_dir, DTYPES[job.settings.dtype])
    with closing(Engine(model, job.settings, job.schedule_steps)) as engine, tempfile.TemporaryDirectory() as scratch:
        worker = _Worker(job, engine, Path(scratch), relaxed)
        start = worker.restore()
        try:
            train(
                engine,
                worker.stream,
                steps=job.milestones[-1],
                start_step=start,
                milestones=job.milestones,
                on_milestone=worker.report,
                on_step=worker.on_step,
                loss_fn=objective(job.settings.distillation, job.settings.distillation_weight, worker.teacher),
            )
        except TrainingDiverged as error:
            # Returned and not raised: the loss is the same on all workers, and another try would end alike
            return {"diverged": str(error)}
        return {"out_dir": job.out_dir, "weights_digest": checkpoint.weights_digest(job.out_dir)}


class _Worker:
    """One worker's view of a job: its share of the data, where it resumes, and what it does at a milestone."""

    def __init__(self, job: TrainJob, engine: Any, scratch: Path, relaxed: Relaxed | None = None) -> None:
        context = ray.train.get_context()
        self.job, self.engine, self.scratch = job, engine, scratch
        self.rank, self.world_size = context.get_world_rank(), context.get_world_size()
        sequences = read_sequences(job.train_file, dtype=torch.int32)
        self.sequence_length = sequences.shape[1]
        self.stream = BatchStream(
            sequences, job.settings.batch_size, rank=self.rank, world_size=self.world_size, seed=job.seed
        )
        self.held_out = read_sequences(job.eval_file)
        self.teacher = load_teacher(job, job.settings, engine.device, always=True)
        self.relaxed, self.earlier_tokens = relaxed, 0
        self.train_seconds, self.seconds, self.steps = 0.0, 0.0, 0
        if relaxed is not None:
            self.stream.load_state_dict(relaxed.position)  # go on reading where the relaxation stopped
            self.earlier_tokens, self.seconds = relaxed.tokens, relaxed.seconds
        self._last = time.perf_counter()

    def restore(self) -> int:
        """The step to go on from: this run's own checkpoint after a restart, else `resume_from`, else the start."""
        own = ray.train.get_checkpoint()
        source = own if own is not None else self.job.resume_from and ray.train.Checkpoint(self.job.resume_from)
        if not source:
            return 0
        with source.as_directory() as folder:
            state = self.engine.load(folder)
        if own is not None:
            self.seconds = float(state["seconds"])
        elif state["step"] != self.job.start_step:
            raise ValueError(f"start_step is {self.job.start_step}, checkpoint {source.path} is at {state['step']}")
        if own is not None or state["train_file"] == self.job.train_file:
            self.stream.load_state_dict(state["stream"])
        return int(state["step"])

    def on_step(self, step: int, loss: float) -> None:
        self.train_seconds += self._lap()
        self.steps += 1

    def report(self, step: int, train_loss: float) -> None:
        """Measure, save, and report: every worker takes part, rank 0's numbers count."""
        job, tokens_a_step = self.job, self.job.settings.batch_size * self.sequence_length
        measured = self._evaluate()
        metrics = {
            "loss": measured.loss,
            "kl": measured.kl,
            "step": step,
            "tokens": self.earlier_tokens + step * tokens_a_step,
            "tokens_per_second": self.steps * tokens_a_step / self.train_seconds,
            "train_loss": train_loss,
        }
        if self.relaxed is not None:
            metrics |= {
                "relaxation_steps": self.relaxed.steps,
                "collapsed_loss": self.relaxed.loss,
                "relaxed_dir": self.relaxed.model_dir,
            }
        if step == job.milestones[-1]:
            self._finish(metrics)
        self._lap()
        metrics["seconds"] = self.seconds
        folder = self.scratch / f"step-{step}"
        state = {"step": step, "stream": self.stream.state_dict(), "train_file": job.train_file}
        self.engine.save(folder, {**state, "seconds": self.seconds})
        saved = ray.train.Checkpoint.from_directory(str(folder))
        ray.train.report(metrics, checkpoint=saved, delete_local_checkpoint_after_upload=True)
        self._lap()
        self.train_seconds, self.steps = 0.0, 0

    def _evaluate(self) -> Evaluation:
        return evaluate(
            self.engine.model,
            self.held_out,
            teacher=self.teacher,
            batch_size=self.job.settings.rows,
            rank=self.rank,
            world_size=self.world_size,
            reduce=torch.distributed.all_reduce,
        )

    def _finish(self, metrics: dict[str, Any]) -> None:
        """Write the finished weights as a checkpoint of their own, before the report says that they are there."""
        weights = self.engine.weights()
        if self.rank == 0:
            model = checkpoint.load(self.job.model_dir, DTYPES[self.job.settings.dtype])
            model.load_state_dict(weights)
            checkpoint.save(model, self.job.out_dir, tokenizer_beside(self.job.model_dir))
            metrics["out_dir"] = self.job.out_dir
            metrics["weights_digest"] = checkpoint.weights_digest(self.job.out_dir)
        torch.distributed.barrier()

    def _lap(self) -> float:
        now = time.perf_counter()
        lap, self._last = now - self._last, now
        self.seconds += lap
        return lap
