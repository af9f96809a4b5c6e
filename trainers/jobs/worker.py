"""Ray Train: training jobs on workers that may die and come back.

A job has separate workers (`run_training`), or is one of many that a group of a worker pool runs
one after the other (`serve_pool`): processes, imports and placement are paid for once.

Ray Train's controllers and the worker pool import this module too, and train nothing: what only
workers need (transformers, DeepSpeed: 5 s and 250 MB a process) is imported by the functions that
workers run.

What a job reads (`train_file`, `eval_file`, checkpoints) and writes must be visible to every node:
shared storage on a cluster of several.
"""

from __future__ import annotations

import itertools
import os
import signal
import threading
import traceback
from collections.abc import Callable, Sequence
from typing import Any

import ray
import ray.train
import ray.train.torch
import torch
from ray.train import (
    CheckpointConfig,
    FailureConfig,
    RunConfig,
    ScalingConfig,
    TrainingFailedError,
)
from ray.train.torch import TorchConfig, TorchTrainer

from trainers.jobs.memory import memory_note
from trainers.jobs.ray_link import RayLink, set_gauges
from trainers.jobs.train_job import TrainJob
from trainers.loop import TrainingDiverged
from trainers.settings import AUTO_STRATEGY, Shape

__all__ = [
    "TrainJob",
    "TrainingDiverged",
    "call_on_workers",
    "job_metrics",
    "run_training",
    "serve_pool",
]

RESIZE_SECONDS = 600.0
"""Time between two checkpoints of a job whose number of workers may grow, where no setting gives
it: the job resumes from the newest one, so that growing costs the steps since then."""


def run_training(job: TrainJob, *, callbacks: Sequence[Any] = ()) -> dict[str, Any]:
    """Run a job on separate Ray Train workers; return the report of the last milestone.

    At each milestone rank 0 reports loss, kl (None where nothing is distilled), step, tokens,
    train_loss (mean since the last milestone), tokens_per_second (of training alone), seconds (of
    the job, start-up of processes not counted) and checkpoint_path; of a relaxation, whose tokens
    and seconds count, also relaxation_steps, collapsed_loss (before any recovery),
    relaxation_history, relaxation_remaining (share of its way) and relaxed_dir; `notes` name a
    smaller micro-batch or a damaged checkpoint. The last report has `out_dir` and `weights_digest`
    of the finished weights. A job that is started again first repeats its earlier reports.
    `callbacks` are Ray Train's. Inside a Tune trial pass `TuneReportCallback()`.

    Raises:
        TrainingDiverged: When the loss is no longer finite, and Ray's TrainingFailedError when
        workers failed more than `max_failures` times.
    """
    config = {"job": job.to_json()}
    minutes = job.checkpoint_minutes
    resize_seconds = RESIZE_SECONDS if minutes is None else 60 * minutes

    def fit(max_failures: int) -> dict[str, Any] | None:
        keys = job.shape, job.run_name, job.storage_path, max_failures, callbacks
        return _fit(_trainer(_work, config, *keys, resize_seconds=resize_seconds))

    lowered = memory_note(job).exists()
    try:
        ended = fit(job.max_failures)
    except TrainingFailedError:
        if lowered or not memory_note(job).exists():
            raise
        ended = fit(0)  # one of its failures was the memory, which a smaller micro-batch has mended
    return job_metrics(job, ended)


def job_metrics(job: TrainJob, ended: dict[str, Any] | None) -> dict[str, Any]:
    """Return the last report, from what `run_job` returned. Raises TrainingDiverged."""
    if ended and "diverged" in ended:
        raise TrainingDiverged(ended["diverged"])
    if not ended or "metrics" not in ended:
        raise RuntimeError(
            f"run {job.run_name!r} finished without a report; see its logs under {job.storage_path}"
        )
    return ended["metrics"]


def serve_pool(pool: Any, group: str, shape: Shape, storage_path: str) -> None:
    """Be a group of a worker pool.

    Workers of a shape take jobs from the pool's actor until it has no more.

    `pool.next(group, rank, number, worker)` gives job `number` as JSON, or None to end;
    `pool.report(group, metrics, last)` takes rank 0's milestones and returns whether to continue;
    `pool.finished(group, rank, ended)` takes the result of `run_job`, or {"failed"} with the
    traceback.

    Returns:
        Returns when all workers have ended; raises when one has died, or failed unlike others.
    """
    entry = {"pool": pool, "group": group, "device": shape.device}
    _fit(_trainer(_serve, entry, shape, group, storage_path, 0, preemptions=0))


def call_on_workers(
    function: Callable[[], Any], shape: Shape, run_name: str, storage_path: str
) -> Any:
    """Call a function on new workers, joined in a process group as those of a training are.

    Returns:
        The result of the function on rank 0.

    Raises:
        RayTrainError: When a worker has failed; it is not started again.
    """
    entry = {"function": function, "device": shape.device}
    return _fit(_trainer(_call, entry, shape, run_name, storage_path, 0, preemptions=0))


def _fit(trainer: TorchTrainer) -> Any:
    """Run a trainer, and return the result of its function on rank 0."""
    # In the main thread Ray Train takes over Ctrl-C for good, and what it sets keeps the run's
    # controller, a process, alive for as long as this one [2.60]
    in_main_thread = threading.current_thread() is threading.main_thread()
    before = signal.getsignal(signal.SIGINT)
    try:
        return trainer.fit().return_value
    finally:
        if in_main_thread:
            signal.signal(signal.SIGINT, before)


def _trainer(
    function: Callable[[dict[str, Any]], Any],
    config: dict[str, Any],
    shape: Shape,
    name: str,
    storage_path: str,
    max_failures: int,
    callbacks: Sequence[Any] = (),
    preemptions: int = -1,
    resize_seconds: float = RESIZE_SECONDS,
) -> TorchTrainer:
    """Return the trainer of a function on workers.

    Args:
        max_failures: Number of times that the workers may fail and start again (-1: without
            limit). Those of a pool's group never restart: the pool would not recognise them.
        preemptions: The same for the loss of a node that is taken away.
        resize_seconds: How often more workers may take the place of fewer.
    """
    workers, cpus, gpus, accelerator_type, strategy, device, fewest, timeout_s = shape
    resources = {"CPU": cpus} | ({"GPU": gpus} if gpus else {})
    return TorchTrainer(
        function,
        train_loop_config=config,
        torch_config=TorchConfig(
            backend="nccl" if device == "cuda" else "gloo", timeout_s=timeout_s
        ),
        scaling_config=ScalingConfig(
            num_workers=workers if fewest is None else (fewest, workers),
            elastic_resize_monitor_interval_s=resize_seconds,
            use_gpu=bool(gpus),
            resources_per_worker=resources,
            accelerator_type=accelerator_type,
            placement_strategy="PACK" if strategy == AUTO_STRATEGY else strategy,
        ),
        run_config=RunConfig(
            name=name,
            storage_path=storage_path,
            # Without a limit on the controller's failures a start that can never succeed is tried
            # for ever
            failure_config=FailureConfig(
                max_failures=max_failures,
                controller_failure_limit=1,
                max_preemption_failures=preemptions,
            ),
            checkpoint_config=CheckpointConfig(num_to_keep=1),
            callbacks=list(callbacks),
            logging_config=ray.train.LoggingConfig(log_level="WARNING"),
        ),
    )


def _prepare_worker(device: str) -> None:
    """Before anything imports DeepSpeed, which looks once what it computes on."""
    from transformers.utils import logging as transformers_logging

    transformers_logging.disable_progress_bar()
    os.environ["DS_ACCELERATOR"] = device
    if device == "cuda":
        if not {"PYTORCH_CUDA_ALLOC_CONF", "PYTORCH_ALLOC_CONF"} & set(os.environ):
            # What chunks of logits of any size leave free can be used by others. Read at the first
            # use of a GPU.
            os.environ["PYTORCH_CUDA_ALLOC_CONF"] = "expandable_segments:True"
        # Collectives come before DeepSpeed chooses.
        torch.cuda.set_device(ray.train.torch.get_device())


def _call(config: dict[str, Any]) -> Any:
    _prepare_worker(config["device"])
    return config["function"]()


def _work(config: dict[str, Any]) -> dict[str, Any]:
    """Return what every worker of a run of one job does."""
    job = TrainJob.from_json(config["job"])
    _prepare_worker(job.shape.device)
    from trainers.jobs.run import run_job

    return run_job(job, RayLink())


def _serve(config: dict[str, Any]) -> None:
    """Serve trainings as one worker of a pool's group."""
    _prepare_worker(config["device"])
    import trainers.engine
    import trainers.relaxing  # noqa: F401 - loaded before the first job and not within it
    from trainers.jobs.run import run_job

    pool = config["pool"]
    group = config["group"]
    link = RayLink(pool, group)
    worker = ray.get_runtime_context().current_actor
    for number in itertools.count():
        task: Any = ray.get(pool.next.remote(group, link.rank, number, worker))
        if task is None:
            return
        job = TrainJob.from_json(task)
        try:
            ended = run_job(job, link)
        except Exception:
            if link.world_size > 1 or torch.cuda.is_available():
                raise  # the others wait for this one; a CUDA context may be broken
            ended = {"failed": traceback.format_exc()}
        if link.rank == 0:
            # Ray exports them as long as the process lives.
            set_gauges(job, dict.fromkeys(link.shown, 0.0))
        ray.get(pool.finished.remote(group, link.rank, ended))
