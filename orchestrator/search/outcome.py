"""What came out of a search, and the last lines that it prints."""

from __future__ import annotations

from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from orchestrator.reporting.comparison import compare_arms
from orchestrator.reporting.console import console, print_promoted, print_promotion
from orchestrator.reporting.promoted_models import promoted_models
from orchestrator.storage import records
from orchestrator.storage.records import TrialRecord, best_per_budget, front

INTERRUPTED = 130


@dataclass
class SearchOutcome:
    """What came out of a search.

    `exit_code`: 130 if interrupted; 1 if no trial gave a result, the baseline failed at a budget (nothing can be
    compared there), or a step of the promotion failed; else 0. Other failed trials are told, and the search stands.
    """

    folder: Path
    tracking: str
    original: dict[str, Any]
    trials: list[TrialRecord]
    baseline: str
    promotion: dict[str, Any] = field(default_factory=dict)
    interrupted: bool = False
    report: str | None = None

    @property
    def front(self) -> list[TrialRecord]:
        return front(self.trials)

    @property
    def exit_code(self) -> int:
        if self.interrupted:
            return INTERRUPTED
        compared = {t.kv_ratio for t in self.trials if t.usable and t.recipe == self.baseline}
        complete = compared == {t.kv_ratio for t in self.trials}
        return 0 if self.front and complete and not self.promotion.get("failed") else 1

    @property
    def status(self) -> str:
        """As which state the parent run ends."""
        return {0: records.DONE, INTERRUPTED: records.KILLED}.get(self.exit_code, records.FAILED)

    def to_dict(self) -> dict[str, Any]:
        return {
            "folder": str(self.folder),
            "tracking": self.tracking,
            "original": self.original,
            "original_loss": self.original.get("loss"),
            "trials": [asdict(t) for t in self.trials],
            "front": [t.trial_id for t in self.front],
            "best_per_budget": {f"{b:g}": t.trial_id for b, t in best_per_budget(self.trials).items()},
            "comparison": compare_arms(self.trials, self.original) if self.original else [],
            "promotion": self.promotion,
            "promoted": promoted_models(self.promotion),
            "interrupted": self.interrupted,
            "report": self.report,
        }


def print_outcome(outcome: SearchOutcome) -> None:
    """The last lines: failures, where things lie, and the models that were promoted with what serves them."""
    print_promotion(outcome.promotion)
    failed = sum(t.status == records.FAILED for t in outcome.trials)
    out = console()
    out.print()
    if outcome.interrupted:
        how = f"run the same command with --resume {outcome.folder.name} to go on"
        out.print(f"interrupted: the state is saved; {how}", markup=False)
    if failed:
        out.print(f"warning: {failed} of {len(outcome.trials)} trials failed; their errors are above and in MLflow")
    if not outcome.front:
        out.print("no trial gave a result")
    places = {"search": str(outcome.folder), "report": outcome.report, "MLflow": outcome.tracking}
    for name, place in (places | {"exported": outcome.promotion.get("exported")}).items():
        if place:
            print(f"{name:9}{place}")
    print_promoted(outcome.promotion)
