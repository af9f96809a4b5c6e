"""The result of a search, and the last lines that it prints."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any, TypedDict

from orchestrator.reporting.comparison import compare_arms
from orchestrator.reporting.console import (
    console,
    print_caches,
    print_ending,
    print_promotion,
)
from orchestrator.reporting.promoted_models import promoted_models
from orchestrator.storage import records
from orchestrator.storage.cache_points import CachePoint, engine_front
from orchestrator.storage.records import OriginalRecord, TrialRecord, best_per_budget, front

INTERRUPTED = 130


class SearchRecord(TypedDict):
    """The JSON of `headfold search`."""

    folder: str
    tracking: str
    original: OriginalRecord
    original_loss: float | None
    trials: list[Mapping[str, Any]]
    """The fields of each `TrialRecord`."""
    front: list[str]
    """Ids of the trials that no other trial beats."""
    best_per_budget: dict[str, str]
    """Id of the best trial by KV ratio."""
    comparison: list[Any]
    """Comparison of the arms (`orchestrator.reporting.comparison`)."""
    promotion: Mapping[str, Any]
    promoted: list[Any]
    engine_caches: list[CachePoint]
    """Models with their caches in the formats of engines."""
    engine_front: list[CachePoint]
    """Points that no other one beats in both bytes of the engine and loss."""
    interrupted: bool
    report: str | None


@dataclass
class SearchOutcome:
    """The result of a search.

    Attributes:
        folder: Its folder.
        tracking: The address of MLflow.
        original: The original model.
        trials: All trials.
        baseline: The recipe of the baseline.
        promotion: The content of `promotion.json`; empty without a promotion.
        caches: Models with their caches in the formats of engines.
        interrupted: Whether it was interrupted.
        report: The path of its page.
    """

    folder: Path
    tracking: str
    original: OriginalRecord
    trials: list[TrialRecord]
    baseline: str
    promotion: Mapping[str, Any] = field(default_factory=dict)
    caches: list[CachePoint] = field(default_factory=list)
    interrupted: bool = False
    report: str | None = None

    @property
    def front(self) -> list[TrialRecord]:
        return front(self.trials)

    @property
    def exit_code(self) -> int:
        """The exit code of the process.

        130 if interrupted; 1 if no trial has a result, the baseline failed at a budget (nothing can
        be compared there), or a step of the promotion failed; else 0. Other failed trials are
        reported, and the search stands.
        """
        if self.interrupted:
            return INTERRUPTED
        compared = {t.kv_ratio for t in self.trials if t.usable and t.recipe == self.baseline}
        complete = compared == {t.kv_ratio for t in self.trials}
        return 0 if self.front and complete and not self.promotion.get("failed") else 1

    @property
    def status(self) -> str:
        """The state in which the parent run ends."""
        return {0: records.DONE, INTERRUPTED: records.KILLED}.get(self.exit_code, records.FAILED)

    def to_dict(self) -> SearchRecord:
        return {
            "folder": str(self.folder),
            "tracking": self.tracking,
            "original": self.original,
            "original_loss": self.original.get("loss"),
            "trials": [asdict(t) for t in self.trials],
            "front": [t.trial_id for t in self.front],
            "best_per_budget": {
                f"{b:g}": t.trial_id for b, t in best_per_budget(self.trials).items()
            },
            "comparison": compare_arms(self.trials, self.original) if self.original else [],
            "promotion": self.promotion,
            "promoted": promoted_models(self.promotion, self.caches),
            "engine_caches": self.caches,
            "engine_front": engine_front(self.caches),
            "interrupted": self.interrupted,
            "report": self.report,
        }


def print_outcome(outcome: SearchOutcome) -> None:
    """Print promotion, caches, failures, and the last lines."""
    print_promotion(outcome.promotion)
    print_caches(outcome.caches)
    failed = sum(t.status == records.FAILED for t in outcome.trials)
    out = console()
    out.print()
    if outcome.interrupted:
        how = f"to continue, run the same command with --resume {outcome.folder.name}"
        out.print(f"interrupted: the state is saved; {how}", markup=False)
    if failed:
        out.print(
            f"warning: {failed} of {len(outcome.trials)} trials failed; their errors are above "
            "and in MLflow"
        )
    if not outcome.front:
        out.print("no trial gave a result")
    print_ending(outcome.promotion, outcome.caches, outcome.folder, outcome.report)
