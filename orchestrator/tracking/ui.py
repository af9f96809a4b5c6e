"""`headfold ui`: MLflow's page of a search, on the loopback address.

It opens on a view of the search: its trials, loss increase over KV bytes per token, losses over
steps, and a table with recipe and KV ratio; without it, it would open on the list of all runs of
all searches. MLflow keeps a view that somebody shares as a tag of the experiment, which a link
names, and has no interface to make one: `share_view` writes the tag. A version of MLflow that does
not understand it shows the list; a test opens the view of this version in a browser.
"""

from __future__ import annotations

import json
import os
import sys
from functools import partial
from pathlib import Path
from typing import Any

from attention.base.messages import reason
from orchestrator.child_processes import Child
from orchestrator.config.parsing import ConfigError
from orchestrator.storage.json_files import read_json
from orchestrator.storage.paths import SearchFolder
from orchestrator.tracking.errors import TrackingError, redact
from orchestrator.tracking.metrics import METRICS
from orchestrator.tracking.mlflow_server import HOST, SQLITE, is_taken
from orchestrator.tracking.runs import Tracker, default_uri

_NO_RUNS = "{!r} has no runs in MLflow yet: the search has not started"
_SERVER = ("http://", "https://")
_SECTION = "loss-and-cache"


def store_of(folder: SearchFolder) -> str:
    """Return the address of the MLflow store of a search.

    Raises:
        ConfigError: If there is none, or if its password is not known.
    """
    address = read_json(folder.state).get("tracking") if folder.state.is_file() else None
    if address is None:
        raise ConfigError(_NO_RUNS.format(str(folder.root)))
    if "***" in address:
        address = os.environ.get("MLFLOW_TRACKING_URI")
        if address is None:
            raise ConfigError(
                "tracking.uri is stored without its password; set MLFLOW_TRACKING_URI to it as a "
                "whole"
            )
    if not address.startswith(SQLITE):
        return address
    recorded = Path(address.removeprefix(SQLITE))
    default = Path(default_uri(folder.storage).removeprefix(SQLITE))
    # The storage may have been moved, with its database in it
    file = next((path for path in (recorded, default) if path.is_file()), None)
    if file is None:
        raise ConfigError(
            f"expected the MLflow store of {str(folder.root)!r} at {recorded}, found none there "
            f"nor at {default}; copy the file mlflow.db of its storage there, or open the search's "
            "report.html, which needs no store"
        )
    return f"{SQLITE}{file}"


def serve_page(folder: SearchFolder, port: int) -> None:
    """Serve MLflow's page of a search at a port of this machine until Ctrl-C.

    Where a server has its runs, print the address there and return.

    Raises:
        ConfigError: If there is no store or the port is taken.
        TrackingError: If the store cannot be used.
    """
    address = store_of(folder)
    experiment = (folder.stored().get("tracking") or {}).get("experiment") or "headfold"
    if not address.startswith(_SERVER) and is_taken(port):
        raise ConfigError(
            f"--port: {port} is taken on this machine; give another one, e.g. --port {port + 1}"
        )
    tracker = Tracker.open(address, experiment, folder.storage)
    run_id = read_json(folder.state).get("parent_run")
    if run_id is None:
        raise ConfigError(_NO_RUNS.format(str(folder.root)))
    view = share_view(tracker, run_id)
    if address.startswith(_SERVER):
        print(f"MLflow runs already: {redact(address).rstrip('/')}{view}")
        return
    print(f"MLflow   http://{HOST}:{port}{view}   (Ctrl-C ends it)", flush=True)
    command = [sys.executable, "-m", "mlflow", "server", "--host", HOST, "--port", str(port)]
    environment = os.environ | {
        "MLFLOW_SERVER_ENABLE_JOB_EXECUTION": "false",
        "MLFLOW_BACKEND_STORE_URI": address,  # no password among its arguments
    }
    server = Child([*command, "--workers", "1"], environment)
    try:
        server.wait()
        raise ConfigError(
            f"MLflow's server exited with code {server.returncode}; see its output above"
        )
    except KeyboardInterrupt:
        pass
    finally:
        server.end()


def share_view(tracker: Tracker, run_id: str) -> str:
    """Write the view of a search to its experiment.

    Args:
        tracker: Of the experiment.
        run_id: The search's own run.

    Returns:
        The end of the address of MLflow's page that shows the view.

    Raises:
        TrackingError: If the store cannot be written.
    """
    experiment = tracker.experiment_id
    try:
        tag = f"mlflow.sharedViewState.{run_id}"
        tracker.client.set_experiment_tag(experiment, tag, json.dumps(_view(run_id)))
    except Exception as error:
        raise TrackingError(
            f"cannot write to the MLflow store at {redact(tracker.uri)}: {reason(error, redact)}"
        ) from None
    # Without a workflow type a browser that has never seen MLflow opens any experiment on traces
    options = f"workflowType=machine_learning&compareRunsMode=CHART&viewStateShareKey={run_id}"
    return f"/#/experiments/{experiment}/runs?{options}"


def _view(run_id: str) -> dict[str, Any]:
    """Return the state of the page as MLflow 3.17 stores it."""
    increase = METRICS["loss_increase"]
    size = METRICS["kv_bytes_per_token"]
    loss = METRICS["loss"]
    # A scatter chart has linear axes only, on which the good trials are all at 0. A line chart over
    # a metric has a log axis, but no place for trials at or below the original model's loss
    line = partial(_chart, "LINE", scaleType="log", lineSmoothness=0)  # by default MLflow smooths
    log = line(
        increase,
        metricKey=increase,
        selectedMetricKeys=[increase],
        xAxisKey="metric",
        selectedXAxisMetricKey=size,
        displayPoints=True,
    )
    linear = _chart(
        "SCATTER",
        f"{increase} over {size}",
        xaxis={"key": size, "type": "METRIC"},
        yaxis={"key": increase, "type": "METRIC"},
        runsCountToCompare=1000,
    )
    steps = line(loss, metricKey=loss, selectedMetricKeys=[loss], xAxisKey="step")
    section = {
        "uuid": _SECTION,
        "name": "Loss and KV cache",
        "display": True,
        "isReordered": False,
        "columns": 2,
    }
    recipe, ratio = "params.`recipe`", "params.`kv_ratio`"
    columns = [recipe, ratio, *(f"metrics.`{name}`" for name in (increase, "perplexity", size))]
    return {
        "searchFilter": f"tags.mlflow.parentRunId = '{run_id}'",
        "runsHiddenMode": "SHOW_ALL",
        "orderByKey": f"metrics.`{increase}`",  # in order of time they fold under the search
        "orderByAsc": True,
        "selectedColumns": columns,
        "columnOrder": ["attributes.`Run Name`", *columns],
        "columnWidths": {recipe: 150},
        "compareRunCharts": [log, steps, linear],
        "compareRunSections": [section],
    }


def _chart(kind: str, name: str, **options: Any) -> dict[str, Any]:
    return {
        "type": kind,
        "uuid": f"{_SECTION}-{kind.lower()}-{name}",
        "metricSectionId": _SECTION,
        "isGenerated": False,
        "deleted": False,
        "displayName": name,
        **options,
    }
