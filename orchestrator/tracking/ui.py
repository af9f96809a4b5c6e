"""`headfold ui`: MLflow's page of a search, on the loopback address."""

from __future__ import annotations

import os
import sys
from pathlib import Path

from orchestrator.child_processes import Child
from orchestrator.config.parsing import ConfigError
from orchestrator.storage.json_files import read_json
from orchestrator.storage.paths import SearchFolder
from orchestrator.tracking.errors import redact
from orchestrator.tracking.mlflow_server import HOST, SQLITE, taken
from orchestrator.tracking.runs import Tracker, default_uri

NOT_YET = "{!r} has no runs in MLflow yet: the search has not begun"
SERVER = ("http://", "https://")


def store_of(folder: SearchFolder) -> str:
    """The address of the MLflow store that holds a search. Raises ConfigError if there is none, or if its password is
    not known."""
    address = read_json(folder.state).get("tracking") if folder.state.is_file() else None
    if address is None:
        raise ConfigError(NOT_YET.format(str(folder.root)))
    if "***" in address:
        address = os.environ.get("MLFLOW_TRACKING_URI")
        if address is None:
            raise ConfigError("tracking.uri is stored without its password; set MLFLOW_TRACKING_URI to it as a whole")
    if address.startswith(SQLITE):
        own, file = Path(default_uri(folder.storage).removeprefix(SQLITE)), Path(address.removeprefix(SQLITE))
        there = next((place for place in (file, own) if place.is_file()), None)  # the storage may have been moved
        if there is None:
            raise ConfigError(
                f"expected the MLflow store of {str(folder.root)!r} at {file}, found none there nor at {own}; copy the "
                "file mlflow.db of its storage there, or open the search's report.html, which needs no store"
            )
        return f"{SQLITE}{there}"
    return address


def serve_page(folder: SearchFolder, port: int) -> None:
    """Show MLflow's page of a search at a port of this machine until Ctrl-C; where a server has its runs, say where.

    Raises ConfigError if there is no store or the port is taken, TrackingError if the store cannot be used.
    """
    address = store_of(folder)
    experiment = (folder.stored().get("tracking") or {}).get("experiment") or "headfold"
    if not address.startswith(SERVER) and taken(port):
        raise ConfigError(f"--port: {port} is taken on this machine; give another one, e.g. --port {port + 1}")
    tracker, parent = Tracker.open(address, experiment, folder.storage), read_json(folder.state).get("parent_run")
    if parent is None:
        raise ConfigError(NOT_YET.format(str(folder.root)))
    place = tracker.share_view(parent)
    if address.startswith(SERVER):
        print(f"MLflow runs already: {redact(address).rstrip('/')}{place}")
        return
    print(f"MLflow   http://{HOST}:{port}{place}   (Ctrl-C ends it)", flush=True)
    command = [sys.executable, "-m", "mlflow", "server", "--host", HOST, "--port", str(port), "--workers", "1"]
    environment = os.environ | {"MLFLOW_SERVER_ENABLE_JOB_EXECUTION": "false", "MLFLOW_BACKEND_STORE_URI": address}
    server = Child(command, environment)  # no password among its arguments
    try:
        server.wait()
        raise ConfigError(f"MLflow's server ended with exit code {server.returncode}; what it has said is above")
    except KeyboardInterrupt:
        pass
    finally:
        server.end()
