"""Trials in Weights & Biases in addition to MLflow, by Ray's callback (`tracking.wandb`)."""

from __future__ import annotations

import os
from importlib.util import find_spec
from typing import TYPE_CHECKING

from orchestrator.config.schema import ConfigError

if TYPE_CHECKING:
    from ray.tune import Callback

_EXCLUDED = ("checkpoint_path", "checkpoint_dir_name", "best_dir")
"""Results that are places on a disk."""


def check_wandb(project: str | None) -> None:
    """Check that trials can be logged to a project; none needs nothing.

    Raises:
        ConfigError: If wandb is not installed, or nobody is logged in.
    """
    if project is None:
        return
    if find_spec("wandb") is None:
        raise ConfigError(
            f"tracking.wandb: {project!r} needs wandb, which is not installed: pip install wandb, "
            "or Headfold's extra wandb"
        )
    if os.environ.get("WANDB_MODE") in ("offline", "disabled") or "WANDB_API_KEY" in os.environ:
        return
    import wandb  # pyright: ignore[reportMissingImports]

    if not wandb.login(prompt=False):
        raise ConfigError(
            f"tracking.wandb: {project!r} needs an account of Weights & Biases, and no key was "
            "found: set WANDB_API_KEY, run `wandb login`, or set WANDB_MODE=offline and upload "
            "the runs later with `wandb sync`"
        )


def wandb_callback(project: str, search: str, identity: str) -> Callback:
    """Return the callback of Tune that logs each trial as a run of a project.

    Args:
        project: In which the search's trials are one group.
        search: Name of the search.
        identity: What distinguishes it from others of that name. With the trial's id it is the id
            of a run, which a resumed search continues.
    """
    from ray.air.integrations.wandb import WandbLoggerCallback

    class TrialRuns(WandbLoggerCallback):
        def log_trial_start(self, trial: object) -> None:
            self.kwargs["id"] = f"{search}-{identity}-{trial}"
            super().log_trial_start(trial)  # pyright: ignore[reportArgumentType]

    return TrialRuns(project=project, group=search, excludes=list(_EXCLUDED), resume="allow")
