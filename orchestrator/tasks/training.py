"""The common part of `headfold train` and `headfold finetune`."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from functools import cached_property
from pathlib import Path
from typing import Any, TypeVar

from attention.base.text import compact
from attention.base.timing import duration
from attention.checkpoint import Checkpoint
from orchestrator import checkpoints
from orchestrator.cluster.capacity import concurrency
from orchestrator.cluster.session import connected, local_nodes, prepare_process, starts_ray
from orchestrator.config.options import TrainingOptions
from orchestrator.config.schema import apply_train_options, check_worker_gpus
from orchestrator.resources.disk import checkpoint_bytes
from orchestrator.resources.processes import TRAINING_WORKER, TrainingMemory
from orchestrator.resources.size import Size
from orchestrator.resources.time import training_rate
from orchestrator.tasks.task import RecordT, Task, advise_text, require
from orchestrator.training.request import TrainingRequest
from orchestrator.training.run import TrainingRun
from orchestrator.training.tracked import training_progress
from trainers.jobs.write_rate import describe_checkpoints

TrainingOptionsT = TypeVar("TrainingOptionsT", bound=TrainingOptions)


class TrainingTask(Task[TrainingOptionsT, RecordT]):
    """A training outside a search.

    Attributes:
        log: Takes lines on the training and on each milestone.
    """

    def __init__(
        self, options: TrainingOptionsT, *, rehearsal: bool = False, verbose: bool = False
    ) -> None:
        super().__init__(options, rehearsal=rehearsal, verbose=verbose)
        self.log: Callable[[str], None] = _print_at_once

    @property
    def outputs(self) -> Mapping[str, str | Path | None]:
        return {"folder": self.options.out}

    @cached_property
    def request(self) -> TrainingRequest:
        """The training, checked once."""
        raise NotImplementedError

    def check(self) -> None:
        require(self.request)
        if not self.request.mark:  # a resumed training keeps its settings
            check_worker_gpus(self.request.settings, "train")

    def announce(self) -> None:
        advise_text(self.options.train_data, self.options.eval_data)

    def rehearse(self) -> Iterable[Mapping[str, str]]:
        self.announce()
        request = self.request
        request.check_texts()
        if starts_ray():
            concurrency(local_nodes(), request.demand)
        settings, config = request.settings, Checkpoint.open(request.source).config
        size = Size.of(config)
        rate, rate_source = training_rate(config, settings, request.sequence_length, size)
        speed, hours = "", ""
        if rate:
            about = duration(request.tokens / rate / settings.num_workers)
            speed = f"{rate:.0f} tokens/s per worker, "
            hours = f"; about {about}, without starts and measurements"
        saved = checkpoint_bytes(config, size, settings)
        memory = TrainingMemory(config, request.sequence_length)
        worker = memory.need(TRAINING_WORKER, settings)
        each = f" (each of {settings.num_workers} workers)" if settings.num_workers > 1 else ""
        return [
            {
                "training": f"{request.title}, {request.steps} steps, "
                f"{compact(request.tokens)} tokens ({request.epochs} of the text)",
                "model": f"{compact(size.total)} parameters without composition, as in "
                f"{Path(request.source).name}",
                "text": f"{request.train_data} to train on, {request.eval_data} to measure on",
                "rate": f"{speed}{rate_source}{hours}",
                "memory": (worker.describe() if self.verbose else worker.summary) + each,
                **describe_checkpoints(saved, request.checkpoint_minutes),
                "results": f"{request.out}, and {request.folder.name} next to it",
            }
        ]

    def train(self) -> None:
        """Train, or continue an interrupted training, and put the checkpoint in place."""
        request = self.request
        of_text = f"{request.tokens} tokens ({request.epochs} of the text)"
        self.log(
            f"training: {request.title}, {request.steps} steps, {of_text}; in {request.folder}"
        )
        if request.finished:
            return
        request.check_texts()
        if starts_ray():
            concurrency(local_nodes(), request.demand)
        prepare_process()
        with connected() as nodes:
            concurrency(nodes, request.demand)
            run = TrainingRun(request.make_job())
            with training_progress(request, run, self.log):
                last = run.train_through_losses(self.log)
        request.note(**request.ship(last), finished=True)


def _print_at_once(line: str) -> None:
    print(line, flush=True)


def train_section(
    record: dict[str, Any], options: TrainingOptions, learning_rate: float
) -> dict[str, Any]:
    """Return `record` with the overrides and the options that have their own flag.

    An override reads `train.KEY=VALUE`. Raises ConfigError for one that has a flag.
    """
    record = apply_train_options(record, options.overrides or (), learning_rate, options.seed)
    if isinstance(record["train"], dict):
        gpus = float(checkpoints.device_of(options.device).type == "cuda")
        train: Mapping[str, Any] = {"gpus_per_worker": gpus} | record["train"]
        if not train["gpus_per_worker"] and starts_ray():
            train = {"cpus_per_worker": _share_of_cpus(train.get("num_workers", 1)), **train}
        record["train"] = train
    return record


def _share_of_cpus(workers: Any) -> float:
    """Return the CPUs of each worker where a training has this machine to itself.

    At least one: more workers than CPUs do not fit, and the capacity check refuses them.
    """
    from orchestrator.cluster.ray_internals import cpus_of_machine

    share = cpus_of_machine() / (workers if isinstance(workers, int) and workers > 0 else 1)
    return max(1.0, share)
