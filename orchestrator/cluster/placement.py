"""Where the processes of a search run: what each asks Ray for, and how the workers of a training lie on nodes."""

from __future__ import annotations

from typing import Any

from orchestrator.config.schema import SearchConfig

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


def task_options(config: SearchConfig) -> dict[str, Any]:
    """The options of `ray.remote(**options)` for a task that loads and runs the model as a trial does before its
    training: its CPUs, GPUs and type of accelerator."""
    section = config.resources
    options: dict[str, Any] = {"num_cpus": section.trial_cpus, "num_gpus": section.trial_gpus}
    if section.trial_gpus and (kind := section.trial_accelerator_type or section.accelerator_type):
        options["accelerator_type"] = kind
    return options
