"""MLflow records, against a real sqlite store."""

from __future__ import annotations

import contextlib
import json
import math
import os
import pickle
import shutil
import signal
import socket
import subprocess
import sys
import time
import urllib.request
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from mlflow import artifacts
from mlflow import transformers as flavour
from mlflow_at import mlflow_at

from orchestrator.cluster.session import last_error
from orchestrator.search.callbacks import SearchLog, progress_note
from orchestrator.search.resume import error_of
from orchestrator.storage import records
from orchestrator.storage.journal import END, REPORT, TRIAL, Journal, load_trials, read_events
from orchestrator.tracking.errors import TrackingError, redact
from orchestrator.tracking.logged_model import write_mlmodel
from orchestrator.tracking.runs import Tracker, default_uri
from orchestrator.tracking.sync import MlflowSync, parent_run


def run_of(tracker: Tracker, run_id: str) -> Any:
    return tracker.client.get_run(run_id)


def trial(number: int, recipe: str = "headfold", budget: float = 0.25, error_file: str | None = None) -> Any:
    config = {"recipe": recipe, "kv_ratio": budget, "learning_rate": 1e-3, "choices": {"grouping": "exact"}}
    return SimpleNamespace(trial_id=f"t{number}", config=config, error_file=error_file)


def report(step: int, loss: float, **more: Any) -> dict[str, Any]:
    return {
        "step": step,
        "rung": int(step > 0),
        "loss": loss,
        "loss_increase": loss - 2.0,
        "kl": 0.5,
        "tokens": 64 * step,
        "seconds": 1.0,
        **more,
    }


class Driven(SearchLog):
    """A log whose hooks are called as Tune calls them: when the journal has what they are about."""

    def on_trial_start(self, iteration: int, trials: list, trial: Any, **info: Any) -> None:
        if trial.trial_id not in self.records:
            self.journal.append(TRIAL, trial=trial.trial_id, config=trial.config)
        super().on_trial_start(iteration, trials, trial)

    def on_trial_result(self, iteration: int, trials: list, trial: Any, result: dict, **info: Any) -> None:
        if (trial.trial_id, result["step"]) not in self.journal.history.decisions:
            self.journal.append(REPORT, trial=trial.trial_id, result=result, decision="CONTINUE")
        super().on_trial_result(iteration, trials, trial, result)

    def on_trial_complete(self, iteration: int, trials: list, trial: Any, **info: Any) -> None:
        self.journal.append(END, trial=trial.trial_id, error=None, trace=None, lost=False)
        super().on_trial_complete(iteration, trials, trial)

    def on_trial_error(self, iteration: int, trials: list, trial: Any, **info: Any) -> None:
        self.journal.append(END, trial=trial.trial_id, error=error_of(trial), trace=trial.error_file, lost=False)
        super().on_trial_error(iteration, trials, trial)


def log_of(tracker: Tracker | None, tmp_path: Path, parent: str | None, expected: int = 3) -> Driven:
    journal = Journal(tmp_path / "search" / "journal.jsonl")
    journal.begin(rungs=2)
    sync = MlflowSync(lambda: tracker, replace(parent_run(tmp_path), run_id=parent)) if tracker else None
    return Driven(journal, sync, expected, original_loss=2.0)


def test_a_search_is_one_parent_with_a_child_for_each_trial(tracker: Tracker, tmp_path: Path) -> None:
    parent = tracker.start("search")
    log = log_of(tracker, tmp_path, parent)
    done, stopped, failed = trial(1), trial(2, "gqa"), trial(3, "align", error_file=str(tmp_path / "error.txt"))
    (tmp_path / "error.txt").write_text("Traceback\n  File x\nValueError: no such thing\n")
    for one in (done, stopped, failed):
        log.on_trial_start(0, [], one)
    facts = {"kv_bytes_per_token": 2048, "cache_bytes_measured": 131072, "parameters": 10, "actual_kv_ratio": 0.25}
    log.on_trial_result(0, [], done, report(0, 2.8, **facts))
    log.on_trial_result(0, [], done, report(5, 2.4))
    log.on_trial_complete(0, [], done)
    log.on_trial_result(0, [], stopped, report(0, 7.5, **facts))
    log.on_trial_complete(0, [], stopped)
    log.on_trial_error(0, [], failed)

    children = {run.data.tags["trial_id"]: run for run in tracker.children(parent)}
    assert {k: r.info.status for k, r in children.items()} == {"t1": "FINISHED", "t2": "FINISHED", "t3": "FAILED"}
    assert {k: r.data.tags["headfold.status"] for k, r in children.items()} == {
        "t1": records.DONE,
        "t2": records.STOPPED,
        "t3": records.FAILED,
    }
    series = tracker.client.get_metric_history(children["t1"].info.run_id, "eval_loss")
    assert [(point.step, point.value) for point in series] == [(0, 2.8), (5, 2.4)]
    assert children["t1"].data.params["recipe"] == "headfold"
    assert children["t1"].data.params["choices.grouping"] == "exact"
    assert children["t1"].data.metrics["kv_bytes_per_token"] == 2048
    assert children["t1"].data.metrics["eval_loss_delta"] == pytest.approx(0.4)
    assert children["t1"].data.metrics["perplexity"] == pytest.approx(math.exp(2.4))
    assert children["t1"].info.run_name == "headfold · 25%"
    journaled = {e["event"]: e["time"] for e in read_events(log.journal.path) if e.get("trial") == "t1"}
    times = children["t1"].info.start_time, children["t1"].info.end_time
    assert times == (int(1000 * journaled[TRIAL]), int(1000 * journaled[END]))
    assert children["t3"].data.tags["error"] == "ValueError: no such thing"


def test_relaxation_and_similarity_are_metrics_of_the_trial(tracker: Tracker, tmp_path: Path) -> None:
    parent = tracker.start("search")
    log = log_of(tracker, tmp_path, parent)
    one = trial(1, "dha")
    log.on_trial_start(0, [], one)
    log.on_trial_result(0, [], one, report(0, 5.0, similarity={"means": {"key_raw": 0.125, "key_aligned": 0.5}}))
    history = [{"step": s, "train_loss": 4.0 - s / 8, "own_share": 1 / s} for s in (1, 2)]
    for step in (5, 9):  # each report of a trial carries the whole history
        log.on_trial_result(0, [], one, report(step, 2.8, relaxation_history=history))
    (run,) = tracker.children(parent)
    assert run.data.metrics["similarity_key_aligned"] == 0.5
    series = tracker.client.get_metric_history(run.info.run_id, "relaxation_own_share")
    assert [(point.step, point.value) for point in series] == [(1, 1.0), (2, 0.5)]
    assert run.data.metrics["relaxation_train_loss"] == 3.75
    assert not {"relaxation_step", "relaxation_steps", "best_eval_loss"} & run.data.metrics.keys()


def test_an_interrupted_search_is_taken_up_in_the_same_runs(tracker: Tracker, tmp_path: Path) -> None:
    parent = tracker.start("search")
    log = log_of(tracker, tmp_path, parent)
    one = trial(1)
    log.on_trial_start(0, [], one)
    log.on_trial_result(0, [], one, report(0, 2.8))
    log.on_experiment_end([one])
    (child,) = tracker.children(parent)
    assert child.info.status == "KILLED"

    restored = log_of(tracker, tmp_path, parent)
    restored.on_trial_start(0, [], one)
    restored.on_trial_result(0, [], one, report(0, 2.8))
    restored.on_trial_result(0, [], one, report(5, 2.4))
    restored.on_trial_complete(0, [], one)
    (child,) = tracker.children(parent)
    assert child.info.status == "FINISHED"
    assert [rung["step"] for rung in restored.records["t1"].rungs] == [0, 5]


def test_a_version_is_registered_once_and_read_back_by_its_alias(tracker: Tracker, tmp_path: Path) -> None:
    folder = tmp_path / "exported"
    folder.mkdir()
    (folder / "config.json").write_text("{}")
    run = tracker.start("promotion")
    settings: dict[str, Any] = {"tags": {"gate": "passed", "loss": 2.4}, "description": "x"}
    first = tracker.register("demo", folder, run, **settings)
    again = tracker.register("demo", folder, run, **settings)
    assert first == again == "1"
    assert tracker.alias_version("demo", "kv25") is None
    tracker.set_alias("demo", "kv25", first)
    assert tracker.alias_version("demo", "kv25") == first
    version = tracker.client.get_model_version_by_alias("demo", "kv25")
    assert version.tags["gate"] == "passed"
    with mlflow_at(tracker.uri):
        result = artifacts.download_artifacts("models:/demo@kv25")
    assert (Path(result) / "config.json").read_text() == "{}"
    other = tracker.register("demo", folder, tracker.start("later promotion"), **settings)
    assert other == "2"
    assert tracker.alias_version("demo", "kv25") == "1"
    tracker.set_alias("demo", "kv25", other)
    assert str(tracker.client.get_model_version_by_alias("demo", "kv25").version) == "2"


def test_the_default_store_is_in_the_storage_folder(tracker: Tracker, tmp_path: Path) -> None:
    assert tracker.uri == default_uri(tmp_path)
    run = tracker.start("x")
    tracker.log_text(run, "hello", "note.txt")
    assert run_of(tracker, run).info.artifact_uri.startswith((tmp_path / "mlartifacts").as_uri())
    assert list((tmp_path / "mlartifacts").rglob("note.txt"))


def test_artifacts_of_a_database_are_in_the_storage_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """And not in the folder where the command was typed, as MLflow would have it."""
    present = tmp_path / "present"
    present.mkdir()
    monkeypatch.chdir(present)
    tracker = Tracker.open(f"sqlite:///{tmp_path / 'runs.db'}", "search", tmp_path / "storage")
    tracker.log_text(tracker.start("x"), "hello", "note.txt")
    assert list((tmp_path / "storage" / "mlartifacts").rglob("note.txt"))
    assert not list(present.iterdir())


OPEN = """
import sys
from pathlib import Path
from orchestrator.tracking.runs import Tracker, open_client
open_client("sqlite://")  # the import, before both start
Path(sys.argv[1], f"ready-{sys.argv[2]}").touch()
while len(list(Path(sys.argv[1]).glob("ready-*"))) < 2:
    pass
print(Tracker.open(None, "first", sys.argv[1]).experiment_id)
"""


@pytest.mark.extended
def test_two_searches_that_open_a_new_store_at_once_both_work(tmp_path: Path) -> None:
    command = [sys.executable, "-c", OPEN, str(tmp_path)]
    both = [subprocess.Popen([*command, name], stdout=subprocess.PIPE, text=True) for name in "ab"]
    result = {process.communicate(timeout=300)[0].strip() for process in both}
    assert [process.returncode for process in both] == [0, 0]
    assert len(result) == 1, "one experiment"


@pytest.mark.parametrize(
    ("text", "clean"),
    [
        ("postgresql://me:pass@db:5432/x", "postgresql://***@db:5432/x"),
        ("postgresql+psycopg2://me:p@ss@db/x", "postgresql+psycopg2://***@db/x"),
        ("postgresql://me:pa/ss@db/x", "postgresql://***@db/x"),
        ("https://token@host/path?a=b", "https://***@host/path?a=b"),
        ("sqlite:////tmp/mlflow.db", "sqlite:////tmp/mlflow.db"),
        ("mail me@home, see https://host/a@b", "mail me@home, see https://host/a@b"),
    ],
)
def test_credentials_are_hidden(text: str, clean: str) -> None:
    assert redact(text) == clean


def test_a_store_that_is_away_is_refused_without_its_password(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("MLFLOW_HTTP_REQUEST_MAX_RETRIES", "0")
    with pytest.raises(TrackingError) as caught:
        Tracker.open("http://me:secret@127.0.0.1:9", "x", tmp_path)
    assert "tracking.uri" in str(caught.value)
    assert "secret" not in str(caught.value)


def test_nothing_of_the_store_is_pickled(tmp_path: Path) -> None:
    """Tune keeps its callbacks in the folder of the search."""
    assert pickle.loads(pickle.dumps(log_of(None, tmp_path, None))).__dict__ == {}


def test_an_opened_store_is_not_that_of_what_runs_next(tmp_path: Path, empty_store: Path) -> None:
    """A second search of a process, and every process that the first one starts, would else write into it too."""
    before = dict(os.environ)
    shutil.copy(empty_store, tmp_path / "mlflow.db")
    tracker = Tracker.open(None, "tests", tmp_path)
    assert tracker.children(tracker.start("alone")) == []
    assert not {name for name, value in os.environ.items() if before.get(name) != value and str(tmp_path) in value}


def test_long_values_are_cut_to_what_mlflow_takes(tracker: Tracker) -> None:
    run = tracker.start("x")
    tracker.log_params(run, {"section": {f"k{i}": "v" * 7000 for i in range(150)}, "none": None})
    assert len(run_of(tracker, run).data.params) == 150


def test_the_progress_shows_done_running_stopped_best_and_what_is_to_come(tmp_path: Path) -> None:
    log = log_of(None, tmp_path, None, expected=4)
    for number, budget in ((1, 0.5), (2, 0.25), (3, 0.25)):
        log.on_trial_start(0, [], trial(number, budget=budget))
    log.on_trial_result(0, [], trial(1), report(0, 2.1))
    log.on_trial_result(0, [], trial(1), report(5, 2.3))  # training made it worse: the smallest one stays
    log.on_trial_complete(0, [], trial(1))
    log.on_trial_result(0, [], trial(2), report(0, 3.0))
    log.on_trial_complete(0, [], trial(2))
    assert log.rungs == (4, 8)  # all of two trials that have ended, none of the one that has just begun
    line = progress_note(list(log.records.values()), 4, 2.0)
    assert "1 done, 1 running, 1 stopped, 1 to come" in line
    assert "best loss increase by KV ratio: 50% +0.100 headfold, 25% +1.000" in line


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("Traceback:\n  raise x\nValueError: bad plan\n", "ValueError: bad plan"),
        ("trainers.loop.TrainingDiverged: loss is nan\nray.exceptions.RayTaskError: x\n", "loss is nan"),
        ("NameError: name 'q'\nAn unexpected internal error occurred.\n", "NameError: name 'q'"),
        ("killed\n", "killed"),
        ("", "unknown error"),
    ],
)
def test_an_error_is_reported_by_its_cause(text: str, message: str) -> None:
    assert message in last_error(text)


@pytest.mark.extended
def test_a_server_takes_runs_artifacts_and_versions(tmp_path: Path, empty_store: Path) -> None:
    """A tracking server refuses bare local folders as a source: the checkpoint goes up as a run artifact."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    shutil.copy(empty_store, tmp_path / "server.db")
    command = [sys.executable, "-m", "mlflow", "server", "--host", "127.0.0.1", "--port", str(port), "--workers", "1"]
    server = subprocess.Popen(
        [*command, "--backend-store-uri", f"sqlite:///{tmp_path}/server.db", "--artifacts-destination", str(tmp_path)],
        env=os.environ | {"MLFLOW_SERVER_ENABLE_JOB_EXECUTION": "false"},
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
        start_new_session=True,
    )
    try:
        address = f"http://127.0.0.1:{port}"
        deadline = time.monotonic() + 120
        while time.monotonic() < deadline:
            with contextlib.suppress(OSError), urllib.request.urlopen(f"{address}/health", timeout=2):
                break
            time.sleep(0.3)
        tracker = Tracker.open(address, "tests", tmp_path / "storage")
        run = tracker.start("promotion")
        tracker.log_point(run, {"loss": 2.5, "step": 3})
        tracker.log_text(run, "hello", "note.txt")
        folder = tmp_path / "exported"
        folder.mkdir()
        (folder / "config.json").write_text("{}")
        settings: dict[str, Any] = {"tags": {"gate": "passed"}, "description": "x"}
        version = tracker.register("demo", folder, run, **settings)
        assert tracker.register("demo", folder, run, **settings) == version
        tracker.set_alias("demo", "kv25", version)
        result = tracker.client.get_model_version_by_alias("demo", "kv25")
        assert result.source.startswith("mlflow-artifacts:/")
        assert {f.path for f in tracker.client.list_artifacts(run)} == {"model", "note.txt"}
        exported = tmp_path / "exported-2"
        shutil.copytree(Path(__file__).resolve().parents[3] / "examples" / "stdlib-llama", exported)
        assert write_mlmodel(exported, "stdlib-llama")
        version = tracker.register("demo", exported, tracker.start("another promotion"), **settings)
        (logged,) = tracker.client.search_logged_models([tracker.experiment_id])
        assert (str(logged.status), json.loads(logged.tags["mlflow.modelVersions"])[0]["version"]) == ("READY", version)
        with mlflow_at(address):
            loaded: Any = flavour.load_model(f"models:/demo/{version}", return_type="components")
        assert loaded["model"].config.model_type == "llama"
        assert not (tmp_path / "storage" / "mlflow.db").exists()
    finally:
        os.killpg(server.pid, signal.SIGTERM)
        with contextlib.suppress(subprocess.TimeoutExpired):  # uvicorn may wait for a connection that is still open
            server.wait(timeout=10)
        with contextlib.suppress(ProcessLookupError):
            os.killpg(server.pid, signal.SIGKILL)
        server.wait(timeout=30)


def test_probes_end_as_done_and_are_not_reported_as_the_best(tmp_path: Path) -> None:
    log = log_of(None, tmp_path, None)
    probe, one = trial(1), trial(2)
    probe.config |= {"plan": "{}", "probe": True}
    for each, loss in ((probe, 2.1), (one, 2.8)):
        log.on_trial_start(0, [], each)
        log.on_trial_result(0, [], each, report(0, loss, calibration_loss=loss + 0.5))
    log.on_trial_complete(0, [], probe)
    result, other = load_trials(tmp_path / "search")
    assert (result.probe, result.status, result.calibration_loss) == (True, records.DONE, 2.6)
    assert not other.probe
    line = progress_note([result, other], 3, 2.0)
    assert "1 done" in line and "+0.800" in line and "+0.100" not in line
