"""Where the processes of a search run: what each asks Ray for, and how the workers of a training lie on nodes."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import ray

from orchestrator.config.schema import SearchConfig
from trainers.settings import AUTO_STRATEGY, Shape, Strategy

OF_TYPE = "accelerator_type:"
"""Ray's resource of nodes with such accelerators, of which each has 1 and whatever must run there takes LITTLE."""
LITTLE = 0.001
WAITING_CPUS = 0.05
"""Of a trial's own process where a task of its own plans and measures; Tune starts none on less than some CPU."""


def bundle(cpus: float, gpus: float, accelerator_type: str | None = None) -> dict[str, float]:
    """The resources that a process takes, under Ray's names."""
    typed = {f"{OF_TYPE}{accelerator_type}": LITTLE} if accelerator_type else {}
    return {kind: amount for kind, amount in (("CPU", cpus), ("GPU", gpus)) if amount} | typed


def in_words(cpus: float, gpus: float, accelerator_type: str | None = None) -> str:
    """What one process takes, for people: `1 GPU (A100) and 8 CPU`."""
    amounts = [f"{amount:g} {kind}" for kind, amount in (("GPU", gpus), ("CPU", cpus)) if amount]
    if accelerator_type:
        amounts[0] += f" ({accelerator_type})"
    return " and ".join(amounts)


@dataclass(frozen=True)
class Demand:
    """What one trial needs: CPUs and GPUs of planning and measuring, then its Ray Train workers. `task_type`,
    `accelerator_type`: of the accelerators for the one and the others (None: any)."""

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
        section, shape = config.resources, config.train.shape
        task_type = (section.trial_accelerator_type or section.accelerator_type) if section.trial_gpus else None
        types = (section.accelerator_type, task_type)
        own = section.trial_cpus, section.trial_gpus, *shape[:3]
        return cls(*own, *types, section.placement_strategy, shape.device)

    @classmethod
    def of_promotion(cls, config: SearchConfig) -> Demand | None:
        """A training of the promotion, which the driver starts; None where none is wanted."""
        if not (config.promotion.enabled and config.promotion.steps):
            return None
        shape = config.promotion_shape
        workers = shape.fewest or shape.workers  # with which it starts if there is no room for more
        amounts = 0, 0, workers, shape.cpus, shape.gpus
        return cls(*amounts, shape.accelerator_type, None, shape.strategy, shape.device)

    @property
    def shape(self) -> Shape:
        amounts = self.workers, self.cpus_per_worker, self.gpus_per_worker
        return Shape(*amounts, self.accelerator_type, self.strategy, self.device)

    @property
    def process_cpus(self) -> float:
        """Of a trial's own process, as long as it lasts. It plans itself where that takes no GPU: one that it held
        would be idle while the workers train."""
        return WAITING_CPUS if self.trial_gpus else self.trial_cpus

    @property
    def task_needs(self) -> tuple[float, float, str | None]:
        return self.trial_cpus, self.trial_gpus, self.task_type

    @property
    def task(self) -> dict[str, float]:
        """The resources of planning and measuring."""
        return bundle(*self.task_needs)


def task_options(config: SearchConfig) -> dict[str, Any]:
    """The options of `ray.remote(**options)` for a task that loads and runs the model as a trial does before its
    training: its CPUs, GPUs and type of accelerator."""
    return _options(*Demand.of(config).task_needs)


def worker_options(config: SearchConfig) -> dict[str, Any]:
    """The same for a task that trains in one process."""
    return _options(*Demand.of(config).shape[1:4])


def _options(cpus: float, gpus: float, accelerator_type: str | None) -> dict[str, Any]:
    typed = {"accelerator_type": accelerator_type} if accelerator_type else {}
    return {"num_cpus": cpus, "num_gpus": gpus} | typed


def run_task(options: Mapping[str, Any], function: Callable[..., Any], *arguments: Any) -> Any:
    """Call a function in a Ray task with these options of `ray.remote`, and wait for it. The task ends with whoever
    waits, however that ends; one that loses its machine is tried again, once."""
    # Tune keeps what a trial starts within the trial's own bundle, unless it is told
    task: Any = ray.remote(max_retries=1, scheduling_strategy="DEFAULT", **options)(function)
    reference = task.remote(*arguments)
    try:
        return ray.get(reference)
    except BaseException:
        ray.cancel(reference, force=True)
        raise
