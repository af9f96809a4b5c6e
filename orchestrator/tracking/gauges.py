"""Gauges of a running search in Ray's metrics.

Prometheus collects them and `deploy/grafana/headfold.json` draws them. Ray exports a gauge as
`ray_` and its name while the process that sets it runs. The gauges of a training are set where it
runs (`trainers.jobs.ray_link.WORKER_GAUGES`), those here by the driver.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from functools import lru_cache

import ray
from ray.util.metrics import Gauge

from orchestrator.storage.records import ENDED, RUNNING, WAITING

TRIAL_COUNT = "headfold_trials"
BEST = "headfold_best_loss_increase"
WAITS = "headfold_waits_for_nodes"
BEHIND = "headfold_mlflow_runs_behind"
GAUGES = {
    TRIAL_COUNT: ("Trials of a search in a state", ("search", "state")),
    BEST: (
        "Lowest held-out loss at a KV ratio minus the original model's, nats per token",
        ("search", "kv_ratio"),
    ),
    WAITS: ("1 while a search waits for nodes, else 0", ("search",)),
    BEHIND: ("Runs of a search that may not be up to date in MLflow", ("search",)),
}
"""Description and labels of each gauge. `search`: the name of its folder."""


@lru_cache
def _gauge(name: str) -> Gauge:
    return Gauge(name, *GAUGES[name])


def set_gauge(name: str, value: float, **labels: str) -> None:
    """Set a gauge. Does nothing in a process that is not connected to Ray."""
    if ray.is_initialized():
        _gauge(name).set(float(value), labels)


def set_trial_gauges(search: str, states: Iterable[str], increases: Mapping[float, float]) -> None:
    """Set the gauges of a search's trials.

    Args:
        search: Name of the search's folder.
        states: The state of each trial.
        increases: Smallest increase of the loss (nats per token) by KV ratio.
    """
    states = list(states)
    for state in (WAITING, RUNNING, *ENDED):
        set_gauge(TRIAL_COUNT, states.count(state), search=search, state=state)
    for ratio, increase in increases.items():
        set_gauge(BEST, increase, search=search, kv_ratio=f"{ratio:g}")
