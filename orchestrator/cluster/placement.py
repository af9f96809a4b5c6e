"""Placement of the processes of a search: their resources in Ray, and their nodes."""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

from orchestrator.config.schema import SearchConfig
from trainers.settings import AUTO_STRATEGY, Shape, Strategy

ACCELERATOR_PREFIX = "accelerator_type:"
"""Prefix of Ray's resource of nodes with such accelerators; each node has 1 of it."""
_ACCELERATOR_AMOUNT = 0.001  # requested by processes that must run on such a node
_WAITING_CPUS = 0.05
"""CPUs of a trial's own process while a separate task plans and measures.

Tune starts no process without any CPU.
"""

RemoteOptions = dict[str, float | str]
"""Options of `ray.remote(**options)`: `num_cpus`, `num_gpus`, `accelerator_type`."""


class ProcessResources(NamedTuple):
    """The resources of one process.

    Attributes:
        accelerator_type: Ray's name; None for any.
    """

    cpus: float
    gpus: float = 0.0
    accelerator_type: str | None = None

    @classmethod
    def of_worker(cls, shape: Shape) -> ProcessResources:
        """Return the resources of one worker of a training."""
        return cls(shape.cpus, shape.gpus, shape.accelerator_type)

    @property
    def bundle(self) -> dict[str, float]:
        """The amounts by Ray's names."""
        amounts = {"CPU": self.cpus, "GPU": self.gpus}
        bundle = {kind: amount for kind, amount in amounts.items() if amount}
        if self.accelerator_type:
            bundle[f"{ACCELERATOR_PREFIX}{self.accelerator_type}"] = _ACCELERATOR_AMOUNT
        return bundle

    @property
    def options(self) -> RemoteOptions:
        """The options of a Ray task."""
        options: RemoteOptions = {"num_cpus": self.cpus, "num_gpus": self.gpus}
        if self.accelerator_type:
            options["accelerator_type"] = self.accelerator_type
        return options

    def __str__(self) -> str:
        """Return the amounts as text: `1 GPU (A100) and 8 CPU`."""
        amounts = {"GPU": self.gpus, "CPU": self.cpus}
        parts = [f"{amount:g} {kind}" for kind, amount in amounts.items() if amount]
        if self.accelerator_type and parts:
            parts[0] += f" ({self.accelerator_type})"
        return " and ".join(parts)


@dataclass(frozen=True)
class Demand:
    """The resources of one trial: planning and measuring, then its Ray Train workers.

    Attributes:
        trial_cpus: CPUs of planning and measuring; `trial_gpus`: its GPUs.
        task_type: Accelerators of planning and measuring (Ray's name; None: any).
        accelerator_type: Accelerators of the workers.
    """

    trial_cpus: float
    trial_gpus: float
    workers: int
    cpus_per_worker: float
    gpus_per_worker: float
    accelerator_type: str | None = None
    task_type: str | None = None
    strategy: Strategy = AUTO_STRATEGY
    device: str = "cpu"

    @classmethod
    def of(cls, config: SearchConfig) -> Demand:
        """Return the resources of a trial of a search."""
        section = config.resources
        task_type = None
        if section.trial_gpus:
            task_type = section.trial_accelerator_type or section.accelerator_type
        shape = config.train.shape
        return cls(
            trial_cpus=section.trial_cpus,
            trial_gpus=section.trial_gpus,
            workers=shape.workers,
            cpus_per_worker=shape.cpus,
            gpus_per_worker=shape.gpus,
            accelerator_type=section.accelerator_type,
            task_type=task_type,
            strategy=section.placement_strategy,
            device=shape.device,
        )

    @classmethod
    def of_promotion(cls, config: SearchConfig) -> Demand | None:
        """Return the resources of a training of the promotion, which the driver starts, if any."""
        if not (config.promotion.enabled and config.promotion.steps):
            return None
        shape = config.promotion_shape
        return cls(
            trial_cpus=0,
            trial_gpus=0,
            # With so many it starts if no more fit
            workers=shape.fewest or shape.workers,
            cpus_per_worker=shape.cpus,
            gpus_per_worker=shape.gpus,
            accelerator_type=shape.accelerator_type,
            strategy=shape.strategy,
            device=shape.device,
        )

    @property
    def shape(self) -> Shape:
        """The workers."""
        return Shape(
            self.workers,
            self.cpus_per_worker,
            self.gpus_per_worker,
            self.accelerator_type,
            self.strategy,
            self.device,
        )

    @property
    def worker(self) -> ProcessResources:
        """The resources of one worker."""
        return ProcessResources.of_worker(self.shape)

    @property
    def task(self) -> ProcessResources:
        """The resources of a task that plans and measures."""
        return ProcessResources(self.trial_cpus, self.trial_gpus, self.task_type)

    @property
    def process_cpus(self) -> float:
        """CPUs of a trial's own process, as long as it lasts.

        It plans itself if that takes no GPU, which would be idle while the workers train.
        """
        return _WAITING_CPUS if self.trial_gpus else self.trial_cpus


def task_options(config: SearchConfig) -> RemoteOptions:
    """Return the options of a task that loads and runs the model as a trial's planning does."""
    return Demand.of(config).task.options


def worker_options(config: SearchConfig) -> RemoteOptions:
    """Return the options of a task that trains in one process."""
    return Demand.of(config).worker.options
