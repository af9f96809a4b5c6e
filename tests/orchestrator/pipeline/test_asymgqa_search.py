"""A real search with the asymgqa searcher on two cores: probes, Ctrl-C, a resume, the trained best plan."""

from __future__ import annotations

import os
import signal
import subprocess
import time
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import pytest
from ray.tune.search import Searcher
from search_process import LITTLE, left_over, start_search

from attention.plan import AttentionPlan
from orchestrator.config.schema import read_search_config
from orchestrator.search.prepare import head_similarities, trial_context
from orchestrator.search.searchers import make_searcher
from orchestrator.search.validation import validate_search
from orchestrator.storage.journal import load_trials
from orchestrator.storage.json_files import read_json
from orchestrator.storage.paths import SearchFolder
from orchestrator.storage.records import DONE, KILLED, TrialRecord
from orchestrator.tracking.runs import Tracker

pytestmark = [pytest.mark.extended, pytest.mark.timeout(1500)]

REPOSITORY = Path(__file__).resolve().parents[3]
SMALL = [
    "name=walk",
    "search.searcher=asymgqa",
    "search.recipes=[gqa]",
    "search.kv_ratios=[0.25]",
    "search.num_samples=16",
    "search.search_space={}",
    "search.params={searcher.chains: 2, grouping.accept: 0.3}",
    "rungs.steps=[0,1]",
    "promotion.enabled=false",
    *LITTLE,
    "resources.max_concurrent=auto",  # parallel chains
]


def start(storage: Path, *arguments: str) -> subprocess.Popen[str]:
    return start_search(storage, SMALL, *arguments)


def measured_probes(folder: Path) -> list[TrialRecord]:
    return [t for t in load_trials(folder) if t.probe and t.calibration_loss is not None]


def decisions(storage: Path, trials: list[TrialRecord], monkeypatch: pytest.MonkeyPatch) -> list[dict[str, Any]]:
    """The suggestions of a searcher that was never interrupted, if its probes have the losses that `trials` have."""
    monkeypatch.chdir(REPOSITORY)
    config = read_search_config("configs/demo.yaml", [*SMALL, f"storage={storage}"])
    prepared, folder = validate_search(config), SearchFolder(storage / "walk")
    context = trial_context(config, prepared, folder, read_json(folder.original))
    searcher = make_searcher("asymgqa", replace(prepared.problem, similarities=partial(head_similarities, context)))
    losses = {t.plan_digest: t.calibration_loss for t in trials if t.probe}
    configs: list[dict[str, Any]] = []
    while (config := searcher.suggest(f"t{len(configs)}")) != Searcher.FINISHED:
        assert isinstance(config, dict)
        if config.get("probe"):
            loss = losses[AttentionPlan.from_json(config["plan"]).digest]
            searcher.on_trial_complete(f"t{len(configs)}", {"calibration_loss": loss})
        configs.append(config)
    return configs


def test_probes_ctrl_c_and_the_best_plan_trained(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder = tmp_path / "walk"
    first = start(tmp_path)
    deadline = time.monotonic() + 600
    while time.monotonic() < deadline and first.poll() is None and len(measured_probes(folder)) < 2:
        time.sleep(0.1)
    assert first.poll() is None, first.communicate()[0]
    os.killpg(first.pid, signal.SIGINT)  # as the terminal does for Ctrl-C: to Ray's processes too
    log = first.communicate(timeout=300)[0]
    assert first.returncode == 130, log
    assert "--resume" in log and "Traceback" not in log
    assert left_over(tmp_path) == []
    assert KILLED in {t.status for t in load_trials(folder)}
    tracker, parent = Tracker.open(None, "headfold", tmp_path), read_json(folder / "state.json")["parent_run"]
    assert tracker.client.get_run(parent).info.status == "KILLED"
    assert "RUNNING" not in {run.info.status for run in tracker.children(parent)}
    before = {t.plan_digest: t.calibration_loss for t in measured_probes(folder)}
    assert 2 <= len(before) < 15

    second = start(tmp_path, "--resume")
    log = second.communicate(timeout=900)[0]
    assert second.returncode == 0, log
    trials = load_trials(folder)
    assert {t.status for t in trials} == {DONE}
    probes = [t for t in trials if t.probe]
    (baseline,) = [t for t in trials if t.recipe == "gqa"]
    (final,) = [t for t in trials if t.recipe == "asymgqa-search" and not t.probe]
    after = {t.plan_digest: t.calibration_loss for t in probes}
    assert before.items() <= after.items(), "nothing that was measured is lost, or measured again"
    assert f"{len(probes)} probes of the searcher" in log

    # Probes end untrained and leave no weights; the best plan is trained like any candidate.
    assert {t.step for t in probes} == {0}
    assert (baseline.step, final.step) == (1, 1)
    folders = {t.trial_id: folder / "trials" / t.trial_id for t in trials}
    assert not any((folders[t.trial_id] / "converted").exists() for t in probes)
    assert (folders[final.trial_id] / "converted" / "model.safetensors").exists()
    plan = AttentionPlan.from_json((folders[final.trial_id] / "plan.json").read_text())
    assert (plan.kv_ratio, final.actual_kv_ratio) == (0.25, 0.25)
    whole = [t for t in probes if t.actual_kv_ratio == 0.25]
    assert final.plan_digest == min(whole, key=lambda t: t.calibration_loss or 9.0).plan_digest
    assert final.calibration_loss == pytest.approx(after[final.plan_digest], abs=1e-6)

    # Every decision is the one that a search without the interruption takes.
    expected = decisions(tmp_path, trials, monkeypatch)
    named = [AttentionPlan.from_json(c["plan"]).digest for c in expected if c.get("probe")]
    assert len(named) == len(after)
    assert set(named) == set(after)
    assert AttentionPlan.from_json(expected[-1]["plan"]).digest == final.plan_digest
