"""Take the pictures of docs/images that show the results of a search, with a real browser.

    make demo 2>&1 | tee runs/demo/terminal.log
    python docs/screenshots.py runs/demo

Writes, from the newest search in that storage: the report (`report-wide.png`, `report-narrow.png`, `report-dark.png`:
the top of the page), the front (`front.png`), the front in engine bytes (`caches.png`), the
page of `headfold inspect` of its model (`inspect.png`; made again unless `--inspection` names one), MLflow on a first
visit (`mlflow-cold.png`), with the trials (`mlflow-runs.png`) and as `headfold ui` opens it (`mlflow-charts.png`), and
the terminal at the start, in the middle and at the end of the search (`terminal-*.svg`).

Needs a `chromium` on the path (in Debian: package `chromium`) and the extra `dev`.
"""

from __future__ import annotations

import argparse
import contextlib
import os
import re
import shutil
import socket
import subprocess
import sys
import tempfile
import time
import urllib.request
from collections.abc import Iterator
from pathlib import Path

from mlflow import MlflowClient
from playwright.sync_api import Browser, sync_playwright
from rich.console import Console
from rich.text import Text

from orchestrator.reporting.figures.caches import caches_figure
from orchestrator.reporting.figures.drawing import save_png
from orchestrator.reporting.figures.search import front_figure
from orchestrator.reporting.pages.report_page import write_report
from orchestrator.storage import records
from orchestrator.storage.cache_points import read_cache_points
from orchestrator.storage.journal import load_trials
from orchestrator.storage.json_files import read_json
from orchestrator.storage.paths import SearchFolder
from orchestrator.tracking.runs import Tracker
from orchestrator.tracking.ui import share_view

WAIT_S = 120.0
REPORTS = {
    "report-wide": (1600, 1000, "light"),
    "report-narrow": (390, 1700, "light"),
    "report-dark": (1600, 1000, "dark"),
}
COLUMNS, ROWS = 150, 34
"""Lines of the terminal; the last ones are shown."""
PROGRESS, TRIALS = r"trials: \d+ of \d+ rungs", r"Trials \("


ROOT = Path(__file__).resolve().parents[1]
"""Left out of paths on pictures: the folder of this checkout is private."""
SHORTEN = """root => {
  const walk = document.createTreeWalker(document.body, NodeFilter.SHOW_TEXT);
  for (let node = walk.nextNode(); node; node = walk.nextNode()) node.data = node.data.replaceAll(root, "");
}"""


# ---- pages -----------------------------------------------------------------------------------------------------------


def shoot(browser: Browser, url: str, out: Path, width: int, height: int, scheme: str = "light") -> None:
    """Take a picture of the top of a page."""
    page = browser.new_page(viewport={"width": width, "height": height}, color_scheme=scheme)  # type: ignore[arg-type]
    page.goto(url)
    page.evaluate(SHORTEN, f"{ROOT}/")
    page.screenshot(path=out)
    page.close()
    print(out)


def shoot_reports(browser: Browser, search: SearchFolder, out: Path) -> None:
    with tempfile.TemporaryDirectory() as folder:
        page = Path(folder) / "report.html"
        write_report(search.root, page)
        for name, (width, height, scheme) in REPORTS.items():
            shoot(browser, page.as_uri(), out / f"{name}.png", width, height, scheme)


def shoot_inspection(browser: Browser, model: str, page: Path | None, out: Path) -> None:
    with tempfile.TemporaryDirectory() as folder:
        made = page or Path(folder) / "inspection.html"
        if page is None:
            subprocess.run(
                [sys.executable, "-m", "orchestrator.main", "inspect", model, "--out", str(made)], check=True
            )
        shoot(browser, made.resolve().as_uri(), out / "inspect.png", 1600, 1250)


def draw_front(search: SearchFolder, out: Path) -> None:
    promoted = [c for c in read_json(search.promotion)["candidates"].values() if c["status"] == "promoted"]
    trials = records.without_probes(load_trials(search.root))
    print(save_png(front_figure(trials, read_json(search.original), promoted), out))


# ---- MLflow ----------------------------------------------------------------------------------------------------------


def shoot_mlflow(browser: Browser, search: SearchFolder, out: Path) -> None:
    """The runs of a search in a browser that knows nothing of MLflow yet: as they open, with the search's trials after
    a click on its [+], and the view that `headfold ui` opens."""
    store = search.storage.resolve() / "mlflow.db"
    run = MlflowClient(tracking_uri=f"sqlite:///{store}").get_run(read_json(search.state)["parent_run"])
    with mlflow_server(store) as server:
        runs = f"{server}/#/experiments/{run.info.experiment_id}/runs"
        page = browser.new_page(viewport={"width": 1600, "height": 1000})
        page.set_default_timeout(1000 * WAIT_S)

        def keep(name: str) -> None:
            page.wait_for_timeout(4000)  # charts further down, animations
            page.screenshot(path=out / f"{name}.png")
            print(out / f"{name}.png")

        page.goto(runs)
        row = page.get_by_role("row").filter(has_text=str(run.info.run_name))
        row.first.wait_for()
        keep("mlflow-cold")
        page.locator(ASSISTANT).click()
        page.locator(EXPAND).first.click()
        page.locator(CHILD).first.wait_for()
        keep("mlflow-runs")
        tracker = Tracker(server, run.info.experiment_id)
        page.goto(f"{server}{share_view(tracker, run.info.run_id)}")
        page.locator(NOTICE).dispatch_event("click")  # it moves, which a click waits out
        page.locator(".js-plotly-plot .trace").first.wait_for(state="attached")
        keep("mlflow-charts")
        page.close()


# Of MLflow 3.17: what a person clicks on, and a row that stands below another.
ASSISTANT = "button[data-component-id='mlflow.assistant.chat_panel.close']"
NOTICE = "button[data-component-id='mlflow.experiment_page.shared_view.dismiss']"
EXPAND = "button[data-component-id*='runnamecellrenderer']"
CHILD = "[role=row].ag-row >> nth=1"


@contextlib.contextmanager
def mlflow_server(store: Path) -> Iterator[str]:
    """The address of a server on a store, on the loopback address; ended with all of its children."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    command = [sys.executable, "-m", "mlflow", "server", "--host", "127.0.0.1", "--port", str(port), "--workers", "1"]
    process = subprocess.Popen(
        [*command, "--backend-store-uri", f"sqlite:///{store}"],
        env=os.environ | {"MLFLOW_SERVER_ENABLE_JOB_EXECUTION": "false"},
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
        start_new_session=True,
    )
    try:
        _wait_for(f"http://127.0.0.1:{port}/health", process)
        yield f"http://127.0.0.1:{port}"
    finally:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(process.pid, 15)
        process.wait(timeout=20)


def _wait_for(url: str, process: subprocess.Popen[bytes]) -> None:
    """Until `url` answers. Raises RuntimeError if its process ends or the time is up."""
    deadline = time.monotonic() + WAIT_S
    while time.monotonic() < deadline and process.poll() is None:
        with contextlib.suppress(OSError), urllib.request.urlopen(url, timeout=5):
            return
        time.sleep(0.2)
    raise RuntimeError(f"{process.args!r} did not answer at {url} within {WAIT_S:.0f} s")


# ---- terminal --------------------------------------------------------------------------------------------------------


def moments(log: str) -> dict[str, list[str]]:
    """Lines of a search's terminal at its beginning, in the middle, and at its end. Raises ValueError if it has not
    ended."""
    lines = log.splitlines()
    first = next((i for i, line in enumerate(lines) if re.match(PROGRESS, line)), None)
    last = next((i for i, line in enumerate(lines) if re.match(TRIALS, line)), None)
    if first is None or last is None:
        raise ValueError("the log is not of a search that has run to its end: it shows no progress, or no trials")
    going = [line for line in lines[first:last] if re.match(PROGRESS, line)]
    return {"start": lines[:first], "middle": going[: -(-2 * len(going) // 3)], "end": lines[last:]}


def draw_terminal(lines: list[str], title: str, out: Path) -> None:
    """The last of some lines as a picture of a terminal, without a font from elsewhere."""
    shown = Console(record=True, width=COLUMNS, file=open(os.devnull, "w"), highlight=False)  # noqa: PTH123, SIM115
    rows = [row for line in lines for row in Text(line).wrap(shown, COLUMNS, overflow="fold")]
    for row in rows[-ROWS:]:
        shown.print(row, markup=False)
    drawn = re.sub(r"@font-face \{.*?\}\s*", "", shown.export_svg(title=title), flags=re.DOTALL)
    out.write_text(drawn.replace("Fira Code, ", "ui-monospace, "), encoding="utf-8")
    print(out)


# ---- all of them -----------------------------------------------------------------------------------------------------


def newest(storage: Path) -> SearchFolder:
    """The newest search of a storage that has ended. Ends the program if there is none."""
    ended = [found for file in storage.glob("*/search.yaml") if (found := SearchFolder(file.parent)).ended]
    if not ended:
        sys.exit(f"{storage} has no search that has ended; run `make demo` first, or name its storage")
    return max(ended, key=lambda search: search.state.stat().st_mtime_ns)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("storage", type=Path, help="folder of the searches, e.g. runs/demo")
    parser.add_argument("--out", type=Path, default=Path(__file__).parent / "images", help="folder of the pictures")
    parser.add_argument("--log", type=Path, help="what the search has printed (default: terminal.log in the storage)")
    parser.add_argument("--inspection", type=Path, help="a page that `headfold inspect` has written")
    given = parser.parse_args()
    executable = shutil.which("chromium") or sys.exit("needs a browser: install the package chromium")
    log = given.log or given.storage / "terminal.log"
    if not log.is_file():
        sys.exit(f"no {log}: keep what the search prints with `make demo 2>&1 | tee {log}`, or name it with --log")
    search = newest(given.storage)
    terminal = moments(log.read_text(encoding="utf-8").replace(f"{ROOT}/", ""))
    given.out.mkdir(parents=True, exist_ok=True)
    for name, lines in terminal.items():
        draw_terminal(lines, f"headfold search: {name}", given.out / f"terminal-{name}.svg")
    draw_front(search, given.out / "front.png")
    if (figure := caches_figure(read_cache_points(search))) is not None:
        print(save_png(figure, given.out / "caches.png"))
    with sync_playwright() as driver:
        browser = driver.chromium.launch(executable_path=executable, args=["--no-sandbox"])
        shoot_reports(browser, search, given.out)
        shoot_mlflow(browser, search, given.out)
        shoot_inspection(browser, read_json(search.original)["model"], given.inspection, given.out)
        browser.close()


if __name__ == "__main__":
    main()
