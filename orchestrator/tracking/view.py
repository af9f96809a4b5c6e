"""What `headfold ui` shows of a search: its trials, the loss increase over KV bytes per token, the losses over steps.

A view that somebody shares in MLflow's page is a tag of the experiment, which a link names; these are written as if
somebody had filtered the runs, arranged the charts and shared the view.
"""

from __future__ import annotations

import json
from typing import Any

from orchestrator.tracking.metrics import METRICS

SECTION = "loss-and-cache"


def tag_of(parent: str) -> str:
    """The experiment's tag that holds the view of the search with this run."""
    return f"mlflow.sharedViewState.{parent}"


def link_of(parent: str) -> str:
    """What the page's address ends with. Without a workflow type a browser that has never seen MLflow opens an
    experiment of whatever kind on its traces."""
    return f"workflowType=machine_learning&compareRunsMode=CHART&viewStateShareKey={parent}"


def view_of(parent: str) -> str:
    """The tag's value, as of MLflow 3.17."""
    increase, size, loss = (METRICS[name] for name in ("loss_increase", "kv_bytes_per_token", "loss"))
    axes = {"xaxis": {"key": size, "type": "METRIC"}, "yaxis": {"key": increase, "type": "METRIC"}}
    charts = [
        _chart("SCATTER", f"{increase} over {size}", **axes, runsCountToCompare=1000),
        _chart("LINE", loss, metricKey=loss, selectedMetricKeys=[loss], xAxisKey="step", scaleType="log"),
    ]
    section = {"uuid": SECTION, "name": "Loss and KV cache", "display": True, "isReordered": False, "columns": 2}
    runs = {"searchFilter": f"tags.mlflow.parentRunId = '{parent}'", "runsHiddenMode": "SHOW_ALL"}
    runs |= {"orderByKey": f"metrics.`{increase}`", "orderByAsc": True}  # in order of time they fold under the search
    return json.dumps(runs | {"compareRunCharts": charts, "compareRunSections": [section]})


def _chart(kind: str, name: str, **more: Any) -> dict[str, Any]:
    common = {"metricSectionId": SECTION, "isGenerated": False, "deleted": False, "displayName": name}
    return {"type": kind, "uuid": f"{SECTION}-{kind.lower()}", **common, **more}
