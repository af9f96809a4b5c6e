"""`headfold report`, `watch` and `ui`: the three views of a search.

They read its files and change nothing.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import asdict
from pathlib import Path
from typing import Any

from orchestrator.config.options import ReportOptions, UIOptions, WatchOptions
from orchestrator.storage.paths import SearchFolder
from orchestrator.tasks.packages import check_packages
from orchestrator.tasks.task import Task


class SearchReport(Task[ReportOptions, Mapping[str, Any]]):
    """The page of a search."""

    @property
    def outputs(self) -> Mapping[str, str | Path | None]:
        return {"page": self.options.out}

    def check(self) -> None:
        SearchFolder.existing(self.options.search)

    def run(self) -> Mapping[str, Any]:
        """Write the page."""
        from orchestrator.reporting.pages.report_page import write_report

        return write_report(self.options.search, self.options.out)

    def show(self, record: Mapping[str, Any]) -> None:
        from orchestrator.reporting.console import print_comparison

        print_comparison(record["comparison"])
        print(f"report: {record['report']}")


def watch_progress(options: WatchOptions) -> None:
    """Show the progress of a search until it ends, or once."""
    from orchestrator.reporting import status
    from orchestrator.storage.outputs import check_results, write_result

    folder, file = SearchFolder.existing(options.search), options.json
    if str(file) == "-":
        print(json.dumps(asdict(status.read_status(folder)), indent=1))
        return
    check_results(file)
    view = status.watch_search(folder, every=options.every, once=options.once or file is not None)
    if file is not None:
        write_result(file, asdict(view))


def serve_tracking(options: UIOptions) -> None:
    """Serve MLflow's page of a search until it is interrupted."""
    from orchestrator.tracking.ui import serve_page

    check_packages("ui", "mlflow")
    serve_page(SearchFolder.existing(options.search), options.port)
