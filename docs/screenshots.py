"""Take the pictures of the MLflow pages that the README shows, with a real browser.

    python docs/screenshots.py runs/demo/mlflow.db headfold docs/images

Starts an MLflow server on the store, drives a headless Chromium through its DevTools port, waits until the runs are
really on the page, and writes mlflow-runs.png (the trials in a table) and mlflow-charts.png (their metrics). Needs a
`chromium` on the path (on Debian: the package of that name); aiohttp comes with Ray.
"""

from __future__ import annotations

import argparse
import asyncio
import base64
import contextlib
import json
import os
import shutil
import socket
import subprocess
import sys
import tempfile
import time
import urllib.request
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import aiohttp

WAIT_S = 60.0


def _free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return probe.getsockname()[1]


def _wait_for(url: str, process: subprocess.Popen[bytes]) -> bytes:
    """The answer of `url` once it has one. Raises RuntimeError if its process ends or the time is up."""
    deadline = time.monotonic() + WAIT_S
    while time.monotonic() < deadline and process.poll() is None:
        with contextlib.suppress(OSError), urllib.request.urlopen(url, timeout=5) as answer:
            return answer.read()
        time.sleep(0.2)
    raise RuntimeError(f"{process.args!r} did not answer at {url} within {WAIT_S:.0f} s")


@contextlib.contextmanager
def _running(command: list[str], **environment: str) -> Iterator[subprocess.Popen[bytes]]:
    """A child process, ended with all of its children at the end of the block."""
    process = subprocess.Popen(
        command,
        env=os.environ | environment,
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
        start_new_session=True,
    )
    try:
        yield process
    finally:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(process.pid, 15)
        process.wait(timeout=20)


class Page:
    """One browser tab, through the DevTools protocol."""

    def __init__(self, socket: aiohttp.ClientWebSocketResponse) -> None:
        self._socket, self._last = socket, 0

    async def call(self, method: str, **params: Any) -> dict[str, Any]:
        self._last += 1
        await self._socket.send_json({"id": self._last, "method": method, "params": params})
        while True:
            message = await self._socket.receive_json(timeout=WAIT_S)
            if message.get("id") == self._last:
                if "error" in message:
                    raise RuntimeError(f"{method}: {message['error']}")
                return message["result"]

    async def run(self, script: str) -> Any:
        return (await self.call("Runtime.evaluate", expression=script, returnByValue=True))["result"].get("value")

    async def until(self, script: str, what: str) -> Any:
        """The value of a script once it is true. Raises RuntimeError when the time is up."""
        deadline = time.monotonic() + WAIT_S
        while time.monotonic() < deadline:
            value = await self.run(script)
            if value:
                return value
            await asyncio.sleep(0.3)
        raise RuntimeError(
            f"the page never showed {what}; it shows: {(await self.run('document.body.innerText'))[:500]!r}"
        )

    async def save(self, file: Path) -> None:
        await asyncio.sleep(4.0)  # charts further down, animations
        file.write_bytes(base64.b64decode((await self.call("Page.captureScreenshot", format="png"))["data"]))


def _view_state(experiment: str, columns: list[str], parent: str) -> str:
    """A script that puts the page's own saved settings in place: which columns, all rows open, no side panel."""
    view = {
        "searchFilter": "",
        "orderByKey": "attributes.start_time",  # any other order hides which run is the parent
        "orderByAsc": False,
        "startTime": "ALL",
        "lifecycleFilter": "Active",
        "datasetsFilter": [],
        "modelVersionFilter": "All Runs",
        "selectedColumns": columns,
        "columnOrder": [],
        "columnWidths": {},
        "chartsSearchFilter": "^(loss|kl|train_loss)$",
        "runsExpanded": {parent: True},
        "runsPinned": [],
        "runsHidden": [],
        "runsVisibilityMap": {},
        "runsHiddenMode": "SHOWALL",
        "viewMaximized": True,
        "hideEmptyCharts": True,
        "groupBy": None,
        "groupsExpanded": {},
        "autoRefreshEnabled": False,
        "globalLineChartConfig": {"xAxisKey": "step", "lineSmoothness": 0, "selectedXAxisMetricKey": ""},
    }
    saved = {
        f'MLflowLocalStorage-1.1-ExperimentPage-["{experiment}"]-ReactComponentState': json.dumps(view),
        f"MLflowLocalStorage-1.1-ExperimentView-{experiment}-expandRows": "true",
        "mlflow.assistant.panelOpen_v1": "false",
        "mlflow.assistant.fab.autoOpenedOnFirstLoad_v1": "true",
    }
    return "".join(f"localStorage.setItem({json.dumps(key)}, {json.dumps(value)});" for key, value in saved.items())


async def _take(tab: str, server: str, runs: dict[str, Any], out: Path) -> None:
    shown = f"{json.dumps(runs['names'])}.every(name => document.body.innerText.includes(name))"
    drawn = "document.querySelectorAll('.js-plotly-plot .scatterlayer .trace').length > 0"
    pages = {"TABLE": ("mlflow-runs.png", shown), "CHART": ("mlflow-charts.png", f"{shown} && {drawn}")}
    async with aiohttp.ClientSession() as session, session.ws_connect(tab, max_msg_size=0) as socket:
        page = Page(socket)
        await page.call("Page.enable")
        state = _view_state(runs["experiment"], runs["columns"], runs["parent"])
        await page.call("Page.addScriptToEvaluateOnNewDocument", source=state)
        for mode, (name, ready) in pages.items():
            await page.call("Page.navigate", url="about:blank")
            await page.call(
                "Page.navigate", url=f"{server}/#/experiments/{runs['experiment']}/runs?compareRunsMode={mode}"
            )
            await page.until(ready, f"the runs {runs['names']}")
            await page.save(out / name)
            print(out / name)


def _runs(store: Path, experiment: str, columns: list[str]) -> dict[str, Any]:
    """What must be on the page: the newest parent run of an experiment and its children, best loss first."""
    from mlflow import MlflowClient

    client = MlflowClient(tracking_uri=f"sqlite:///{store}")
    found = client.get_experiment_by_name(experiment)
    if found is None:
        known = sorted(e.name for e in client.search_experiments())
        raise SystemExit(f"{store} has no experiment {experiment!r}; it has {known}")
    runs = client.search_runs([found.experiment_id])
    parent = next(run for run in runs if "mlflow.parentRunId" not in run.data.tags)
    children = [run for run in runs if run.data.tags.get("mlflow.parentRunId") == parent.info.run_id]
    names = [str(run.info.run_name) for run in [parent, *children]]
    return {"experiment": found.experiment_id, "parent": parent.info.run_id, "names": names, "columns": columns}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("store", type=Path, help="MLflow's sqlite file")
    parser.add_argument("experiment")
    parser.add_argument("out", type=Path, help="folder of the pictures")
    columns = ["metrics.`loss`", "metrics.`loss_increase`", "metrics.`kl`", "params.`recipe`"]
    parser.add_argument("--columns", nargs="+", default=columns)
    given = parser.parse_args()
    browser = shutil.which("chromium") or sys.exit("needs a browser: install the package chromium")
    store = given.store.resolve()
    runs = _runs(store, given.experiment, given.columns)
    server, devtools = (f"http://127.0.0.1:{_free_port()}" for _ in range(2))
    serve = [sys.executable, "-m", "mlflow", "server", "--host", "127.0.0.1", "--port", server.rsplit(":")[-1]]
    serve += ["--workers", "1", "--backend-store-uri", f"sqlite:///{store}"]
    size = f"1600,{max(900, 420 + 36 * len(runs['names']))}"  # the table makes only the rows that fit
    browse = [browser, "--headless", "--no-sandbox", "--disable-gpu", f"--window-size={size}", "about:blank"]
    with tempfile.TemporaryDirectory(ignore_cleanup_errors=True) as profile, contextlib.ExitStack() as stack:
        serving = stack.enter_context(_running(serve, MLFLOW_SERVER_ENABLE_JOB_EXECUTION="false"))
        port = f"--remote-debugging-port={devtools.rsplit(':')[-1]}"
        browsing = stack.enter_context(_running([*browse, port, f"--user-data-dir={profile}"]))
        _wait_for(f"{server}/health", serving)
        tabs = json.loads(_wait_for(f"{devtools}/json/list", browsing))
        tab = next(tab for tab in tabs if tab["type"] == "page")["webSocketDebuggerUrl"]
        given.out.mkdir(parents=True, exist_ok=True)
        asyncio.run(_take(tab, server, runs, given.out))


if __name__ == "__main__":
    main()
