"""`headfold ui`: MLflow's page of any search."""

from __future__ import annotations

import contextlib
import json
import os
import shutil
import signal
import subprocess
import sys
import time
import urllib.request
from collections.abc import Iterator
from pathlib import Path

import psutil
import pytest
from playwright.sync_api import Browser, Page, sync_playwright

from orchestrator.cluster.session import free_port
from orchestrator.config.parsing import ConfigError
from orchestrator.storage.journal import Journal
from orchestrator.storage.json_files import read_json, write_json
from orchestrator.storage.paths import SearchFolder
from orchestrator.tracking.mlflow_server import is_taken
from orchestrator.tracking.runs import Tracker
from orchestrator.tracking.ui import serve_page, store_of


@pytest.fixture
def folder(tmp_path: Path, empty_store: Path) -> SearchFolder:
    folder = SearchFolder.fresh(tmp_path, "small")
    Journal(folder.journal).begin(2)
    folder.snapshot.write_text("tracking: {uri: null, experiment: mine}\n")
    shutil.copy(empty_store, tmp_path / "mlflow.db")
    write_json(folder.state, {"tracking": f"sqlite:///{tmp_path}/mlflow.db"})
    return folder


def test_a_storage_that_was_moved_has_its_store_next_to_the_search(folder: SearchFolder) -> None:
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


def test_a_search_without_a_run_is_reported(folder: SearchFolder) -> None:
    with pytest.raises(ConfigError, match="has no runs in MLflow yet"):
        serve_page(folder, free_port())


@contextlib.contextmanager
def shown(folder: SearchFolder, number: int = signal.SIGINT) -> Iterator[tuple[str, str]]:
    """`headfold ui` of a search: the address of its server and that of the view it prints. Ended by a signal, after
    which no process of it may remain."""
    port = free_port()
    command = [sys.executable, "-m", "orchestrator.main", "ui", str(folder.root), "--port", str(port)]
    process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True, env=os.environ)
    server = f"http://127.0.0.1:{port}"
    try:
        assert process.stdout is not None
        output = process.stdout.readline().split()
        deadline = time.monotonic() + 200
        while time.monotonic() < deadline:
            with contextlib.suppress(OSError), urllib.request.urlopen(f"{server}/health", timeout=5):
                break
            time.sleep(0.3)
        yield server, output[1]
        tree = psutil.Process(process.pid).children(recursive=True)
    finally:
        process.send_signal(number)
        assert process.wait(timeout=60) == (0 if number == signal.SIGINT else -number)
    assert tree and psutil.wait_procs(tree, timeout=20)[1] == []


@pytest.mark.extended
def test_the_page_shows_the_search_until_it_is_interrupted(folder: SearchFolder) -> None:
    tracker = Tracker.open(None, "mine", folder.storage)
    run_id = tracker.start("a run of mine")
    write_json(folder.state, read_json(folder.state) | {"parent_run": run_id})
    with shown(folder) as (server, address):
        view = f"workflowType=machine_learning&compareRunsMode=CHART&viewStateShareKey={run_id}"
        assert address == f"{server}/#/experiments/{tracker.experiment_id}/runs?{view}"
        there = Tracker.open(server, "mine", folder.storage)
        assert there.client.get_run(run_id).info.run_name == "a run of mine"
        tags = there.client.get_experiment(tracker.experiment_id).tags
        assert run_id in json.loads(tags[f"mlflow.sharedViewState.{run_id}"])["searchFilter"]


@pytest.mark.slow
@pytest.mark.extended
@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGHUP, signal.SIGKILL])
def test_the_server_ends_with_the_command_however_that_ends(number: int, folder: SearchFolder) -> None:
    """`test_child_processes.py` has the same test for any program that a command starts, for all signals."""
    if signal.getsignal(number) == signal.SIG_IGN:
        pytest.skip(f"signal {number} is ignored here, as under nohup")
    run_id = Tracker.open(None, "mine", folder.storage).start("a run of mine")
    write_json(folder.state, read_json(folder.state) | {"parent_run": run_id})
    with shown(folder, number) as (server, _):
        port = int(server.rpartition(":")[2])
        assert is_taken(port)
    assert not is_taken(port)


@pytest.fixture
def browser() -> Iterator[Browser]:
    """A browser that has never opened MLflow."""
    executable = shutil.which("chromium") or shutil.which("google-chrome")
    if executable is None:
        pytest.skip("no chromium here: install the package of that name (Debian: apt install chromium)")
    with sync_playwright() as driver:
        browser = driver.chromium.launch(executable_path=executable, args=["--no-sandbox"])
        yield browser
        browser.close()


def opened(browser: Browser, address: str) -> Page:
    page = browser.new_page(viewport={"width": 1600, "height": 1000})
    page.set_default_timeout(100_000)
    page.goto(address)
    return page


@pytest.mark.extended
def test_a_browser_shows_the_trials_of_the_search_alone_and_its_report(
    folder: SearchFolder, browser: Browser, tmp_path: Path
) -> None:
    tracker = Tracker.open(None, "mine", folder.storage)
    ours, another = (tracker.start(name) for name in ("mine", "another"))
    increases = {"gqa 50%": (2.0, (0.5, 0.02)), "gqa 25%": (1.0, (3.0, 0.9)), "not mine": (1.0, (7.0, 7.0))}
    for name, (size, of_rungs) in increases.items():
        run = tracker.start(name, parent=another if name == "not mine" else ours)
        tracker.log_params(run, {"recipe": f"recipe of {name}", "kv_ratio": size / 4})
        for step, increase in enumerate(of_rungs):
            values = {"eval_loss": 4.0 + increase, "eval_loss_delta": increase, "kv_bytes_per_token": size}
            tracker.log_point(run, values | {"step": step, "time": 1.0 + step})
    (tmp_path / "report.html").write_text("<h1>What was found</h1>")
    tracker.log_file(ours, tmp_path / "report.html")
    tracker.link_report(ours, "report of mine")
    write_json(folder.state, read_json(folder.state) | {"parent_run": ours})
    with shown(folder) as (_, address):
        page = opened(browser, address)
        page.locator(".js-plotly-plot .scatterlayer .point").nth(4).wait_for(state="attached")
        charts = page.evaluate(PLOTTED)
        text = page.inner_text("body")
        with page.expect_popup() as report:
            page.get_by_role("link", name="report of mine").click()
        report.value.frame_locator("iframe").get_by_text("What was found").wait_for(timeout=100_000)
        page = opened(browser, address.replace("=CHART", "=TABLE"))
        page.get_by_text("recipe of gqa 25%").wait_for()
        columns = page.locator("[role=columnheader][col-id*='.`']").evaluate_all(COLUMNS)
    assert "Loss and KV cache" in text and "gqa 50%" in text and "not mine" not in text, text
    over_size, over_steps, _ = charts
    assert over_size == {"type": "log", "points": [[1, 0.9], [1, 3], [2, 0.02], [2, 0.5]]}
    assert over_steps == {"type": "log", "points": [[0, 4.5], [0, 7], [1, 4.02], [1, 4.9]]}
    expected = ["params.`recipe`", "params.`kv_ratio`", "metrics.`eval_loss_delta`"]
    assert [name for name in columns if name in expected] == expected


PLOTTED = """() => [...document.querySelectorAll('.js-plotly-plot')].map(plot => ({
  type: plot._fullLayout.yaxis.type,
  points: plot.data.filter(line => line.mode?.includes('markers') && line.hoverinfo !== 'skip')
    .flatMap(line => Array.from(line.x, (x, i) => [x, line.y[i]])).sort((a, b) => a[0] - b[0] || a[1] - b[1])
}))"""
COLUMNS = """headers => headers.map(header => [header.getBoundingClientRect().x, header.getAttribute('col-id')])
  .sort((a, b) => a[0] - b[0]).map(([, name]) => name)"""
