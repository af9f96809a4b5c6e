"""Which step of a training is shipped, and what is said of it, with real checkpoints; no cluster."""

from __future__ import annotations

import shutil
from typing import Any

import pytest
from journals import write_journal
from promotions import checked, entry, promoted, trial

from orchestrator.config.schema import SearchConfig
from orchestrator.promotion.state import PROMOTED
from orchestrator.promotion.training import best_model
from orchestrator.reporting import console
from orchestrator.search.trials.context import TrialContext
from orchestrator.storage.paths import SearchFolder
from orchestrator.storage.records import TrialRecord
from orchestrator.tracking.runs import Tracker

pytestmark = pytest.mark.usefixtures("in_this_process")


def worse_with_training(folder: SearchFolder, name: str, recipe: str, losses: tuple[float, ...]) -> TrialRecord:
    """A trial of 4 steps with its untrained conversion, its trained weights, and those of its best rung."""
    trial_folder = folder.trial(name)
    shutil.copytree(trial_folder / "trained", trial_folder / "converted")
    result = trial(name, recipe, losses[-1])
    result.rungs = [{"step": step, "loss": loss} for step, loss in zip((0, 2, 4), losses, strict=True)]
    best = min((2, 4), key=lambda step: losses[step // 2])
    place = trial_folder / "trained" if best == 4 else trial_folder / "trained.best" / "step-000002"
    if best == 2:
        shutil.copytree(trial_folder / "trained", place)
    result.rungs[-1] |= {"best_step": best, "best_loss": losses[best // 2], "best_kl": 0.1, "best_dir": str(place)}
    return result


@pytest.mark.usefixtures("no_training")
@pytest.mark.parametrize(
    ("losses", "best", "what", "place"),
    [
        ((2.243, 2.3, 2.249), 0, "untrained conversion", "converted"),
        ((2.5, 2.2, 2.249), 2, "step 2", "trained.best/step-000002"),
        ((2.5, 2.3, 2.249), 4, "step 4", "trained"),
    ],
)
def test_the_best_measured_step_is_shipped(
    config: SearchConfig,
    context: TrialContext,
    folder: SearchFolder,
    tracker: Tracker,
    capsys: pytest.CaptureFixture[str],
    losses: tuple[float, ...],
    best: int,
    what: str,
    place: str,
) -> None:
    head = worse_with_training(folder, "head", "headfold", losses)
    base = worse_with_training(folder, "base", "gqa", (4.0, 2.8, 2.9))
    write_journal(folder.root, [head, base])
    state = promoted(config, context, folder, tracker, tracker.start("search"))
    (candidate,) = state["candidates"].values()
    report = {
        "status": PROMOTED,
        "loss": min(losses),
        "best_step": best,
        "shipped": what,
        "untrained_loss": losses[0],
        "last_loss": 2.249,
        "baseline_loss": 2.8,
        "baseline_step": 2,
        "original_loss": 2.0,
        "folder": str(folder.trial("head") / place),
    }
    assert {key: candidate[key] for key in report} == report
    assert candidate["checks"]["untrained_loss"] == losses[0] and candidate["lineage"]["data"]["steps"] == best
    run = tracker.client.get_run(candidate["run_id"])
    losses_told = ("untrained", "best", "last", "baseline", "original")
    metrics = [*(f"{which}_eval_loss" for which in losses_told), "best_step"]
    assert [run.data.metrics[name] for name in metrics] == [losses[0], min(losses), 2.249, 2.8, 2.0, best]
    assert tracker.client.get_model_version_by_alias("small", "kv50").tags["shipped"] == what
    console.print_promotion(state)
    printed = capsys.readouterr().out
    assert f"{what}, for stock transformers: " in printed
    assert ("training did not improve it; the untrained conversion is kept" in printed) == (best == 0)
    row = next(line.split() for line in printed.splitlines() if line.split()[:2] == ["headfold", "50%"])
    numbers = [f"{losses[0]:.3f}", f"{min(losses):.3f}", str(best), "2.249", "2.800", "2.000"]
    assert row[:9] == ["headfold", "50%", "4", *numbers]


def test_what_is_worse_than_its_own_untrained_conversion_is_refused(
    config: SearchConfig, folder: SearchFolder, context: TrialContext
) -> None:
    """Only where the untrained weights are gone."""
    (reason,) = checked(entry(folder, untrained_loss=2.05), config, context, folder).reasons
    assert "above the 2.0500 of the untrained conversion" in reason


def test_of_a_relaxation_it_is_reported_which_model_is_shipped(folder: SearchFolder) -> None:
    trial_folder = folder.trial("head")
    shutil.copytree(trial_folder / "trained", trial_folder / "converted")
    shutil.copytree(trial_folder / "trained", folder.root / "collapsed")
    relaxed = {"relaxation_steps": 2, "relaxed_dir": str(folder.root / "collapsed"), "collapsed_loss": 3.0}
    rungs = [{"step": 0, "loss": 2.5, "pooled": True}, {"step": 4, "loss": 2.6, **relaxed}]
    result = trial("head", "dha", 2.6)
    result.rungs = rungs

    def best(reports: list[dict[str, Any]]) -> tuple[int, str, str]:
        model = best_model(result, trial_folder, reports)
        assert model is not None
        return model.step, model.folder.name, model.what

    assert best([]) == (0, "converted", "pooled conversion, untrained: not what its relaxation trains from")
    rungs[1]["collapsed_loss"] = 2.4
    assert best([]) == (2, "collapsed", "relaxed model before any recovery")
    better = {
        "step": 8,
        "loss": 2.2,
        "best_step": 6,
        "best_loss": 2.1,
        "best_kl": 0.1,
        "best_dir": str(trial_folder / "trained"),
    }
    assert best([better]) == (6, "trained", "step 6")
