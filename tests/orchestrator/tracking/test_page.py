"""`headfold ui`: MLflow's page of any search."""

from __future__ import annotations

import contextlib
import os
import re
import shutil
import signal
import subprocess
import sys
import time
import urllib.request
from pathlib import Path

import psutil
import pytest

from orchestrator.cluster.session import free_port
from orchestrator.config.parsing import ConfigError
from orchestrator.storage.journal import Journal
from orchestrator.storage.paths import SearchFolder
from orchestrator.storage.records import write_json
from orchestrator.tracking.page import serve_page, store_of
from orchestrator.tracking.runs import Tracker


@pytest.fixture
def folder(tmp_path: Path, empty_store: Path) -> SearchFolder:
    folder = SearchFolder.fresh(tmp_path, "small")
    Journal(folder.journal).begin(2)
    folder.snapshot.write_text("tracking: {uri: null, experiment: mine}\n")
    shutil.copy(empty_store, tmp_path / "mlflow.db")
    write_json(folder.state, {"tracking": f"sqlite:///{tmp_path}/mlflow.db"})
    return folder


def test_a_storage_that_was_moved_has_its_store_beside_the_search(folder: SearchFolder) -> None:
    write_json(folder.state, {"tracking": "sqlite:////before/mlflow.db"})
    assert store_of(folder) == f"sqlite:///{folder.storage}/mlflow.db"


def test_a_search_on_a_server_is_there(folder: SearchFolder, monkeypatch: pytest.MonkeyPatch) -> None:
    write_json(folder.state, {"tracking": "http://127.0.0.1:9"})
    assert store_of(folder) == "http://127.0.0.1:9"
    monkeypatch.setenv("MLFLOW_HTTP_REQUEST_MAX_RETRIES", "0")
    with pytest.raises(ValueError, match="cannot use the MLflow store at http://127.0.0.1:9"):
        serve_page(folder, free_port())


def test_a_port_that_is_taken_is_refused(folder: SearchFolder) -> None:
    import socket

    with socket.socket() as other:
        other.bind(("127.0.0.1", 0))
        other.listen()
        with pytest.raises(ConfigError, match="--port: .* is taken"):
            serve_page(folder, other.getsockname()[1])


@pytest.mark.slow
def test_the_page_shows_the_search_until_it_is_interrupted(folder: SearchFolder) -> None:
    tracker = Tracker.open(None, "mine", folder.storage)
    run_id = tracker.start("a run of mine")
    port = free_port()
    command = [sys.executable, "-m", "orchestrator.main", "ui", str(folder.root), "--port", str(port)]
    page = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True, env=os.environ)
    try:
        assert page.stdout is not None
        said = page.stdout.readline()
        assert re.search(
            rf"http://127.0.0.1:{port}/#/experiments/{tracker.experiment_id}/runs\?workflowType=machine_learning ", said
        )
        deadline = time.monotonic() + 200
        while time.monotonic() < deadline:
            with (
                contextlib.suppress(OSError),
                urllib.request.urlopen(f"http://127.0.0.1:{port}/health", timeout=5),
            ):
                break
            time.sleep(0.3)
        there = Tracker.open(f"http://127.0.0.1:{port}", "mine", folder.storage)
        assert there.client.get_run(run_id).info.run_name == "a run of mine"
        tree = psutil.Process(page.pid).children(recursive=True)
    finally:
        page.send_signal(signal.SIGINT)
        assert page.wait(timeout=60) == 0
    assert tree and psutil.wait_procs(tree, timeout=20)[1] == []
