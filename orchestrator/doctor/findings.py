"""Results of a check of `headfold doctor`."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from typing import Literal, TypedDict, cast

CHECK_NAMES = (
    "config",
    "nodes",
    "devices",
    "versions",
    "clocks",
    "shared-storage",
    "storage",
    "disk",
    "hub",
    "mlflow",
    "attention",
    "all-reduce",
    "training",
)
"""All checks, in their order."""

Status = Literal["ok", "warning", "failed", "skipped"]


class FindingRecord(TypedDict):
    """A finding as JSON."""

    check: str
    status: Status
    result: str
    remedy: str
    numbers: Mapping[str, float]


@dataclass(frozen=True)
class Finding:
    """A line of the report.

    Attributes:
        check: Name of the check.
        status: "failed" is a red line: a search would not run here, or not as it is configured.
        result: What was measured or observed.
        remedy: What to do about it; empty where nothing is to be done.
        numbers: What was measured, by name with its unit.
    """

    check: str
    status: Status
    result: str
    remedy: str = ""
    numbers: Mapping[str, float] = field(default_factory=dict)

    def record(self) -> FindingRecord:
        """Return the finding as JSON."""
        return cast(FindingRecord, asdict(self))


class DoctorRecord(TypedDict):
    """The JSON of `headfold doctor`."""

    ok: bool
    """Whether no check has failed."""
    seconds: float
    nodes: list[str]
    workers: str
    """The workers that were tried: number, devices, placement on nodes."""
    storage: str
    findings: list[FindingRecord]
