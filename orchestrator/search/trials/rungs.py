"""A trial's reports to Tune: one per rung, with everything that searcher and scheduler use."""

from __future__ import annotations

from typing import Any

from ray import tune
from ray.tune.integration.ray_train import TuneReportCallback

from orchestrator.search.trials.context import TrialContext
from orchestrator.training.run import TrainingReport, add_steps


class ReportRungs:
    """Reports of the milestones with the trial's own facts (KV ratio, bytes, rung).

    Searcher and scheduler read single reports.

    Args:
        offset: Steps of the relaxation, which count for the trial but not for the job.
    """

    def __init__(self, context: TrialContext, facts: TrainingReport, offset: int) -> None:
        self._context = context
        self._facts = facts
        self._offset = offset
        self._reported: set[int] = set()

    def complete(self, metrics: TrainingReport) -> dict[str, Any] | None:
        """Return the report for Tune; None if it has been reported."""
        report = {**self._facts, **add_steps(metrics, self._offset)}
        if notes := [*self._facts.get("notes", ()), *metrics.get("notes", ())]:
            report["notes"] = notes
        step = report["step"]
        if step in self._reported:
            return None
        self._reported.add(step)
        increase = report["loss"] - self._context.original_loss
        return report | {"rung": self._context.rungs.index(step), "loss_increase": increase}

    def report(self, metrics: TrainingReport) -> None:
        """Report from the trial's process, which exits by SystemExit if Tune stops the trial."""
        if (report := self.complete(metrics)) is not None:
            tune.report(report)


class ForwardRungs(TuneReportCallback):
    """The same from the process of a Ray Train run of this trial alone."""

    def __init__(self, rungs: ReportRungs) -> None:
        super().__init__()
        self._rungs = rungs

    def after_report(self, run_context: Any, metrics: list[Any], checkpoint: Any) -> None:
        if (report := self._rungs.complete(metrics[0])) is not None:
            super().after_report(run_context, [report], None)
