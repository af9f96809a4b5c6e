"""Searches of a tiny model with two trials that have trained, their promotion in this process, and kills in it."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from typing import Any

import pytest

from attention.plan import AttentionPlan, LayerPlan
from orchestrator.config.schema import SearchConfig
from orchestrator.promotion import promote
from orchestrator.promotion.gate import GateResult, check_candidates
from orchestrator.promotion.state import TRAINED, BaselineModel, PromotionEntry, TrainedModel
from orchestrator.search.trials.context import SearchSession, TrialContext
from orchestrator.storage.paths import SearchFolder
from orchestrator.storage.records import DONE, TrialRecord
from orchestrator.tracking.runs import Tracker
from orchestrator.tracking.sync import MlflowSync, parent_run

HALF = LayerPlan((0, 0, 1, 1), (0, 0, 1, 1))
ARTIFACTS = {"gate.yaml", "lineage.json", "plan.json", "README.md"}
APART = LayerPlan((0, 0, 1, 1), (0, 1, 0, 1))


def plan(layer: LayerPlan) -> AttentionPlan:
    return AttentionPlan((layer, layer), head_dim=8)


def entry(
    folder: SearchFolder,
    name: str = "head",
    *,
    recipe: str = "headfold",
    loss: float = 2.1,
    baseline_loss: float | None = 2.5,
    untrained_loss: float | None = None,
    trained: str | None = None,
) -> PromotionEntry:
    return PromotionEntry(
        name,
        recipe,
        0.5,
        4,
        status=TRAINED,
        trained=TrainedModel(trained or str(folder.trial(name) / "trained"), loss, untrained_loss=untrained_loss),
        baseline=None if baseline_loss is None else BaselineModel(None, baseline_loss, None),
    )


def with_baseline(one: PromotionEntry, weights: str, loss: float) -> PromotionEntry:
    """The entry, with a baseline of these weights."""
    return replace(one, baseline=BaselineModel(weights, loss, 4))


def checked(one: PromotionEntry, config: SearchConfig, context: TrialContext, folder: SearchFolder) -> GateResult:
    """The gate's result for a candidate."""
    mlflow: Any = None
    ((_, result),) = check_candidates([one], SearchSession(config, folder, context, mlflow, 1))
    assert not isinstance(result, str), result
    return result


def trial(name: str, recipe: str, loss: float, budget: float = 0.5) -> TrialRecord:
    rungs = [{"step": 0, "loss": loss + 1}, {"step": 4, "loss": loss, "kl": 0.1}]
    return TrialRecord(name, recipe, budget, 1e-3, {}, status=DONE, rungs=rungs, kv_bytes_per_token=int(256 * budget))


def promoted(
    config: SearchConfig, context: TrialContext, folder: SearchFolder, tracker: Tracker, parent: str
) -> dict[str, Any]:
    return promote.promote_trials(SearchSession(config, folder, context, sync_of(tracker, folder, parent), 1))


def sync_of(tracker: Tracker, folder: SearchFolder, parent: str) -> MlflowSync:
    """The state of a driver after its start."""
    return MlflowSync(lambda: tracker, replace(parent_run(folder.root), status=None, run_id=parent))


@contextmanager
def killed_in(monkeypatch: pytest.MonkeyPatch, owner: Any, name: str, *, done: bool = False) -> Iterator[None]:
    """The body must call `owner.name`, and dies there; with `done` once that has done its work."""
    real = getattr(owner, name)

    def killed(*args: Any, **kwargs: Any) -> None:
        if done:
            real(*args, **kwargs)
        raise KeyboardInterrupt

    with monkeypatch.context() as patch, pytest.raises(KeyboardInterrupt):
        patch.setattr(owner, name, killed)
        yield
