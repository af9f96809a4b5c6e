"""Test of training workers for `headfold doctor`: reduce a tensor, and take one step.

The step goes the way of every training: a checkpoint in the storage, a job, Ray Train, DeepSpeed's
ZeRO 3, the training checkpoint and the finished weights. Only the model is small.
"""

from __future__ import annotations

import os
import statistics
import time
from functools import partial
from pathlib import Path
from typing import Any, TypedDict, cast

from orchestrator.cluster.capacity import cluster_nodes, resolve_strategy
from orchestrator.doctor.probes import small_llama
from trainers.jobs.train_job import TrainJob
from trainers.jobs.worker import call_on_workers, run_training
from trainers.settings import Shape, TrainSettings

_ROUNDS = 5
_HEADS = 4
_HEAD_DIM = 64
_LENGTH = 128
_LAYERS = 2
REDUCED_BYTES = {"cuda": 512 * 2**20, "cpu": 32 * 2**20}
"""Size of the tensor that all workers sum, by device."""


class ReduceFacts(TypedDict):
    """An all-reduce over the workers of a training."""

    workers: int
    hosts: int
    backend: str
    bytes: int
    seconds: float
    """The median time of one."""
    version: str
    """Version of NCCL; empty for gloo."""


class StepFacts(TypedDict):
    """Facts of one step of a training."""

    loss: float
    seconds: float
    """Time of the whole job, without the start of its processes."""
    start_seconds: float
    """Until the job was done, less these."""


def _start_in(seconds: float) -> None:
    """Have Ray Train in this process give up workers that do not start in this time."""
    os.environ["RAY_TRAIN_WORKER_GROUP_START_TIMEOUT_S"] = str(seconds)
    os.environ["RAY_TRAIN_HEALTH_CHECK_INTERVAL_S"] = "0.5"


def all_reduce(shape: Shape, run_name: str, storage_path: str, seconds: float) -> ReduceFacts:
    """Sum a tensor over the workers of a shape, and return how long that takes.

    Call it in a separate process, which can be ended: a collective that hangs does not end by
    itself.
    """
    _start_in(seconds)
    resolved = resolve_strategy(shape, cluster_nodes())
    work = partial(_reduce, REDUCED_BYTES[shape.device])
    return cast(ReduceFacts, call_on_workers(work, resolved, run_name, storage_path))


def _reduce(size: int) -> ReduceFacts:
    import socket

    import torch
    import torch.distributed as dist

    from trainers.jobs.checkpoints import gather_objects

    device = torch.device("cuda" if dist.get_backend() == "nccl" else "cpu")
    workers = dist.get_world_size()
    tensor = torch.empty(size // 4, dtype=torch.float32, device=device)
    times = []
    for round_number in range(_ROUNDS + 1):
        tensor.fill_(dist.get_rank() + 1)
        dist.barrier()
        started = time.perf_counter()
        dist.all_reduce(tensor)
        if device.type == "cuda":
            torch.cuda.synchronize()
        if round_number:  # the first connects
            times.append(time.perf_counter() - started)
    expected = workers * (workers + 1) / 2
    if not bool((tensor == expected).all()):
        raise RuntimeError(
            f"the sum over {workers} workers should be {expected:g} everywhere, and is "
            f"{tensor.min().item():g} to {tensor.max().item():g}"
        )
    hosts = len(set(gather_objects(socket.gethostname(), workers)))
    version = ".".join(map(str, torch.cuda.nccl.version())) if device.type == "cuda" else ""  # pyright: ignore[reportAttributeAccessIssue]
    return {
        "workers": workers,
        "hosts": hosts,
        "backend": dist.get_backend(),
        "bytes": size,
        "seconds": statistics.median(times),
        "version": version,
    }


def training_step(shape: Shape, settings: TrainSettings, folder: str, seconds: float) -> StepFacts:
    """Train a small model for one step, as a trial is trained, and return what it took.

    Args:
        shape: The workers.
        settings: Of the trials; what a small model cannot have is replaced.
        folder: A folder that every node sees; the caller removes its files.
        seconds: Within which the workers must start.
    """
    import torch

    from attention.conversion.convert import build
    from attention.io import checkpoint
    from attention.plan import AttentionPlan, LayerPlan
    from trainers.text.data import write_sequences

    _start_in(seconds)
    root = Path(folder)
    layer = LayerPlan((0, 0, 1, 1), (0, 1, 1, 0))
    plan = AttentionPlan((layer,) * _LAYERS, head_dim=_HEAD_DIM)
    torch.manual_seed(0)
    config = small_llama(_HEADS, _HEAD_DIM, _LAYERS, _LENGTH)
    model: Any = build(config, plan, torch.float32)
    checkpoint.save(model, root / "model")
    sequences = torch.randint(config.vocab_size, (2 * shape.workers, _LENGTH))
    for split in ("train", "eval"):
        write_sequences(sequences, root / split, largest_id=config.vocab_size - 1)
    job = TrainJob(
        model_dir=str(root / "model"),
        train_file=str(root / "train"),
        eval_file=str(root / "eval"),
        out_dir=str(root / "trained"),
        storage_path=str(root / "runs"),
        run_name=f"doctor-step-{root.name}",
        milestones=(1,),
        settings=settings_of_step(settings, shape),
        max_failures=0,
        accelerator_type=shape.accelerator_type,
        placement_strategy=resolve_strategy(shape, cluster_nodes()).strategy,
    )
    started = time.perf_counter()
    report = run_training(job)
    whole = time.perf_counter() - started
    return {
        "loss": report["loss"],
        "seconds": report["seconds"],
        "start_seconds": whole - report["seconds"],
    }


def settings_of_step(settings: TrainSettings, shape: Shape) -> TrainSettings:
    """Return the settings of the step: ZeRO 3, one sequence a worker, no teacher, all weights.

    Nothing that needs a tokenizer, or that ZeRO 3 does not have.
    """
    changes = {
        "zero_stage": 3,
        "batch_size": shape.workers,
        "micro_batch_size": 1,
        "num_workers": shape.workers,
        "min_workers": None,
        "cpus_per_worker": shape.cpus,
        "gpus_per_worker": shape.gpus,
        "distillation": "none",
        "tuning": "full",
        "compile": False,
        "document_mask": False,
        "assistant_only_loss": False,
        "device": "cpu" if shape.device == "cpu" else "auto",
    }
    return TrainSettings(**(settings.model_dump() | changes))
