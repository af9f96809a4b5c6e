"""A trial's reports to Tune: one a rung, with all that searcher and scheduler look at."""

from __future__ import annotations

from typing import Any

from ray import tune
from ray.tune.integration.ray_train import TuneReportCallback

from orchestrator.search.trials.context import TrialContext
from orchestrator.training.run import add_steps


class ReportRungs:
    """Adds the trial's own facts (KV ratio, bytes, rung) to a milestone's report, since searcher and scheduler look at
    single reports. `before`: steps of the relaxation, which the run does not count and a trial does."""

    def __init__(self, context: TrialContext, facts: dict[str, Any], before: int) -> None:
        self._context, self._facts, self._before, self._told = context, facts, before, set[int]()

    def complete(self, metrics: dict[str, Any]) -> dict[str, Any] | None:
        """The report for Tune; None if it has been told."""
        report = self._facts | add_steps(metrics, self._before)
        if notes := [*self._facts.get("notes", ()), *metrics.get("notes", ())]:
            report["notes"] = notes
        step = report["step"]
        if step in self._told:
            return None
        self._told.add(step)
        increase = report["loss"] - self._context.original_loss
        return report | {"rung": self._context.rungs.index(step), "loss_increase": increase}

    def tell(self, metrics: dict[str, Any]) -> None:
        """From the trial's own process. Ends it, by SystemExit, if Tune stops the trial here."""
        if (report := self.complete(metrics)) is not None:
            tune.report(report)


class ForwardRungs(TuneReportCallback):
    """The same from the process of a Ray Train run of this trial alone."""

    def __init__(self, rungs: ReportRungs) -> None:
        super().__init__()
        self._rungs = rungs

    def after_report(self, run_context: Any, metrics: list[dict[str, Any]], checkpoint: Any) -> None:
        if (report := self._rungs.complete(metrics[0])) is not None:
            super().after_report(run_context, [report], None)
