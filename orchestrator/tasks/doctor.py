"""`headfold doctor`: check a cluster in minutes before a search of days."""

from __future__ import annotations

import os
import time
from collections.abc import Sequence
from functools import cached_property

from attention.base.messages import one_of, reason
from orchestrator.config.options import DoctorOptions
from orchestrator.config.schema import ConfigError, SearchConfig, read_search_config
from orchestrator.doctor.findings import CHECK_NAMES, DoctorRecord, FindingRecord
from orchestrator.tasks.packages import SEARCH_PACKAGES, check_packages
from orchestrator.tasks.task import Task, require

_STORAGE = "runs"
_STYLES = {"ok": "green", "warning": "yellow", "failed": "bold red", "skipped": "dim"}


class Doctor(Task[DoctorOptions, DoctorRecord]):
    """An examination of the cluster of RAY_ADDRESS, else of a Ray on this machine."""

    def check(self) -> None:
        require(self.config, self.only)
        if self.options.storage is not None and self.options.config is not None:
            raise ConfigError(
                f"storage: got {self.options.storage!r} with --config; change it in the config: "
                f"storage={self.options.storage}"
            )
        check_packages("doctor", *SEARCH_PACKAGES)

    @cached_property
    def config(self) -> SearchConfig | None:
        """The configuration with the overrides of the command line; None without one."""
        overrides = list(self.options.overrides or ())
        if self.options.config is None:
            if overrides:
                raise ConfigError(
                    f"config: {overrides[0]!r} changes a configuration, and none was given; add "
                    "--config FILE"
                )
            return None
        return read_search_config(self.options.config, overrides)

    @cached_property
    def only(self) -> Sequence[str]:
        """The checks to make; none for all."""
        for name in self.options.only or ():
            if name not in CHECK_NAMES:
                raise ConfigError(f"only: {one_of('a check', CHECK_NAMES, name)}")
        return self.options.only or ()

    @property
    def storage(self) -> str:
        """The storage to test."""
        return self.config.storage if self.config else self.options.storage or _STORAGE

    def run(self) -> DoctorRecord:
        """Make the checks.

        Raises:
            ConfigError: If there is no cluster at RAY_ADDRESS.
        """
        from orchestrator.cluster.session import connected
        from orchestrator.doctor.examination import Examination

        started = time.monotonic()
        examination = Examination(
            self.config, self.storage, self.options.seconds, self.options.probe_mib * 2**20
        )
        try:
            with connected():
                findings = [one.record() for one in examination.run(self.only)]
                shape = examination.shape
        except ConnectionError as error:
            address = os.environ.get("RAY_ADDRESS", "this machine")
            raise ConfigError(
                f"RAY_ADDRESS: no Ray at {address} ({reason(error)}); start one (ray start --head)"
            ) from None
        placed = f"{shape.workers} x ({shape.gpus:g} GPU, {shape.cpus:g} CPU), {shape.strategy}"
        return {
            "ok": all(one["status"] != "failed" for one in findings),
            "seconds": time.monotonic() - started,
            "nodes": [node.name for node in examination.nodes],
            "workers": f"{placed}, on {shape.device}",
            "storage": self.storage,
            "findings": findings,
        }

    def show(self, record: DoctorRecord) -> None:
        from rich.table import Table
        from rich.text import Text

        from orchestrator.reporting.console import console

        table = Table(box=None, pad_edge=False)
        for name in ("check", "", "result"):
            table.add_column(name, no_wrap=name != "result", overflow="fold")
        for one in record["findings"]:
            status = Text(one["status"], style=_STYLES[one["status"]])
            table.add_row(Text(one["check"]), status, Text(one["result"]))
            if one["remedy"]:
                table.add_row("", Text("do"), Text(one["remedy"], style="italic"))
        console().print(table)
        print(f"workers: {record['workers']}; {record['seconds']:.0f} s")

    def exit_code(self, record: DoctorRecord) -> int:
        """Return 0.

        Raises:
            ConfigError: If a check has failed.
        """
        failed = dict.fromkeys(_failed(record["findings"]))
        if failed:
            raise ConfigError(f"doctor: failed: {', '.join(failed)}; see the table for remedies")
        return 0


def _failed(findings: Sequence[FindingRecord]) -> list[str]:
    return [one["check"] for one in findings if one["status"] == "failed"]
