"""Real searches on two cores: Ray Tune, Ray Train, DeepSpeed, MLflow, on the demo checkpoint."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest

from orchestrator.results import DONE, FAILED, KILLED, load_trials, read_json
from orchestrator.tracking import Tracker

pytestmark = [pytest.mark.slow, pytest.mark.timeout(1500)]

REPOSITORY = Path(__file__).resolve().parents[2]
SMALL = [
    "name=small",
    "search.searcher=grid",
    "search.recipes=[gqa,headfold]",
    "search.budgets=[0.25]",
    "search.samples=0",
    "rungs.steps=[0,1,3]",
    "promotion.steps=2",
    "data.sequence_length=64",
    "data.train.tokens=16384",
    "data.eval.tokens=2048",
    "data.calibration.tokens=2048",
    "train.batch_size=4",
]

LOAD_PLAIN = """
import sys
for name in ("attention", "search_spaces", "trainers", "orchestrator"):
    sys.modules[name] = None  # importing it raises
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer
model = AutoModelForCausalLM.from_pretrained(sys.argv[1], dtype=torch.float32).eval()
AutoTokenizer.from_pretrained(sys.argv[1])
with torch.no_grad():
    print(model.config.num_key_value_heads, model(torch.arange(40).view(1, 40)).logits.double().sum().item())
"""


def start(storage: Path, *arguments: str) -> subprocess.Popen[str]:
    environment = {k: v for k, v in os.environ.items() if k not in ("RAY_ADDRESS", "MLFLOW_TRACKING_URI")}
    return subprocess.Popen(
        [sys.executable, str(REPOSITORY / "orchestrator" / "main.py"), "search", "configs/demo.yaml", *SMALL,
         f"storage={storage}", *arguments],
        cwd=REPOSITORY,
        env=environment | {"HF_HUB_OFFLINE": "1", "OMP_NUM_THREADS": "1"},
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        start_new_session=True,
    )  # fmt: skip


def runs_of(storage: Path, folder: Path, monkeypatch: pytest.MonkeyPatch) -> tuple[Any, list[Any]]:
    """The parent run of a search and its children."""
    monkeypatch.setenv("MLFLOW_TRACKING_URI", "")
    tracker = Tracker.open(None, "headfold", storage)
    parent = read_json(folder / "state.json")["parent_run"]
    return tracker.client.get_run(parent), tracker.children(parent)


def test_a_search_that_is_interrupted_goes_on_and_ends_in_an_exported_checkpoint(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = tmp_path / "small"
    first = start(tmp_path)
    deadline = time.monotonic() + 600
    while time.monotonic() < deadline and first.poll() is None:
        if any(t.rungs for t in load_trials(folder / "trials.json")):
            break
        time.sleep(0.2)
    assert first.poll() is None, first.communicate()[0]
    os.killpg(first.pid, signal.SIGINT)  # as the terminal does for Ctrl-C: to Ray's processes too
    log = first.communicate(timeout=300)[0]
    assert first.returncode == 130, log
    assert "--resume" in log
    assert "Traceback" not in log
    assert KILLED in {t.status for t in load_trials(folder / "trials.json")}
    parent, children = runs_of(tmp_path, folder, monkeypatch)
    assert parent.info.status == "KILLED"
    assert "RUNNING" not in {run.info.status for run in children}

    second = start(tmp_path, "--resume", "--json", str(tmp_path / "outcome.json"))
    log = second.communicate(timeout=900)[0]
    assert second.returncode == 0, log
    outcome = json.loads((tmp_path / "outcome.json").read_text())
    assert outcome["folder"] == str(folder)
    trials = load_trials(folder / "trials.json")
    assert {(t.recipe, t.status, t.step) for t in trials} == {("gqa", DONE, 3), ("headfold", DONE, 3)}
    assert all([r["step"] for r in t.rungs] == [0, 1, 3] for t in trials)
    losses = {t.recipe: t.loss for t in trials}
    assert losses["headfold"] < losses["gqa"] - 1

    (candidate,) = outcome["promotion"]["candidates"].values()
    assert (candidate["recipe"], candidate["status"], candidate["steps"]) == ("headfold", "promoted", 5)
    assert candidate["loss"] < candidate["baseline_loss"]
    parent, children = runs_of(tmp_path, folder, monkeypatch)
    assert parent.info.status == "FINISHED"
    assert {run.info.status for run in children} == {"FINISHED"}
    kinds = sorted(run.data.tags["headfold.kind"] for run in children)
    assert kinds == ["promotion baseline", "promotion candidate", "trial", "trial"]
    assert "front.png" in {
        f.path for f in Tracker.open(None, "headfold", tmp_path).client.list_artifacts(parent.info.run_id)
    }
    assert Path(outcome["report"]).stat().st_size > 10_000

    loaded = subprocess.run(
        [sys.executable, "-c", LOAD_PLAIN, outcome["promotion"]["exported"]],
        cwd=tmp_path,
        capture_output=True,
        text=True,
        check=False,
        timeout=300,
    )
    assert loaded.returncode == 0, loaded.stderr
    assert loaded.stdout.split()[0] == "2"


def test_a_failing_trial_is_told_and_the_others_go_on(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A learning rate that no optimiser can hold."""
    rates = ["search.learning_rates=[3e-4,1e38]", "search.recipes=[gqa]", "promotion.enabled=false"]
    process = start(tmp_path, *rates)
    log = process.communicate(timeout=900)[0]
    folder = tmp_path / "small"
    trials = {t.learning_rate: t for t in load_trials(folder / "trials.json")}
    assert process.returncode == 0, log
    assert trials[3e-4].status == DONE
    assert trials[1e38].status == FAILED
    assert "Error" in (trials[1e38].error or "")
    assert "1 of 2 trials failed" in log
    assert str(trials[1e38].error).split(":")[0] in log
    parent, children = runs_of(tmp_path, folder, monkeypatch)
    assert parent.info.status == "FINISHED"
    assert sorted(run.info.status for run in children) == ["FAILED", "FINISHED"]
    assert [e for run in children if (e := run.data.tags.get("error"))] == [trials[1e38].error]
