"""What the optuna searcher has learnt lies in a database and outlives the process."""

from __future__ import annotations

import dataclasses
import subprocess
import sys
import textwrap
from pathlib import Path
from typing import Any

import optuna
import pytest
from optuna.storages import JournalStorage
from optuna.storages.journal import JournalFileBackend
from test_searcher_contract import complete, drive, problem

from orchestrator.search.candidates import Candidate
from orchestrator.search.searchers import SEARCHERS, SearchProblem
from orchestrator.search.searchers.bayesian import BEST, RECENT, FrontSearch


@pytest.fixture
def task(demo_dir: Path, tmp_path: Path) -> SearchProblem:
    return dataclasses.replace(problem(demo_dir, "optuna"), database=str(tmp_path / "optuna.journal"))


def study(task: SearchProblem) -> optuna.Study:
    """With Optuna's own tools, as a user would look into it."""
    return optuna.load_study(study_name="headfold", storage=JournalStorage(JournalFileBackend(str(task.database))))


def make(task: SearchProblem) -> Any:
    return SEARCHERS.get("optuna")(task)


def test_a_search_that_is_told_again_goes_on_with_the_same_candidates(demo_dir: Path, task: SearchProblem) -> None:
    whole = drive(make(problem(demo_dir, "optuna")))
    first = drive(make(task), stop=len(task.named) + 2)
    assert first == whole[: len(first)]
    assert drive(make(task)) == whole  # nothing but the file is left of the first one
    told = [c for c in task.named if task.space.locate(c) is not None]  # what lies outside is run without telling
    assert len(study(task).trials) == len(told) + task.samples > task.samples


def test_a_kill_between_suggestion_and_result_leaves_nothing_running(demo_dir: Path, task: SearchProblem) -> None:
    """Another process suggests and is killed; this one gets the same suggestion, and the study holds no stuck trial."""
    folder = Path(__file__).parent
    script = f"""
        import dataclasses, os, signal, sys
        from pathlib import Path
        sys.path.insert(0, {str(folder)!r})
        from test_searcher_contract import drive, problem
        from orchestrator.search.searchers import SEARCHERS
        task = dataclasses.replace(problem(Path({str(demo_dir)!r}), "optuna"), database={task.database!r})
        searcher = SEARCHERS.get("optuna")(task)
        drive(searcher, stop=len(task.named) + 1)
        print(searcher.suggest("t-killed"), flush=True)
        os.kill(os.getpid(), signal.SIGKILL)
    """
    run = subprocess.run(
        [sys.executable, "-c", textwrap.dedent(script)], capture_output=True, text=True, cwd=Path.cwd()
    )
    assert run.returncode == -9, run.stderr
    states = {trial.state for trial in study(task).trials}
    assert states == {optuna.trial.TrialState.COMPLETE}
    again = make(task)
    drive(again, stop=len(task.named) + 1)
    assert str(again.suggest("t-new")) == run.stdout.strip()


def test_a_trial_counts_with_its_highest_rung_and_once(task: SearchProblem) -> None:
    searcher = make(task)
    config = searcher.suggest("a")
    report = {"loss": 3.0, "kv_bytes_per_token": 4096.0, "rung": 0}
    searcher.on_trial_result("a", report)
    searcher.on_trial_result("a", report)  # told again after a restart
    searcher.on_trial_result("a", report | {"loss": 2.0, "rung": 1})
    searcher.on_trial_complete("a")  # paused there, and stopped in the end: Tune has no result for it
    assert config["kv_ratio"] == 0.5
    assert [tuple(trial.values) for trial in study(task).trials] == [(3.0, 4096.0), (2.0, 4096.0)]
    assert [o.values for o in make(task)._seen.values()] == [(2.0, 4096.0)]


@pytest.mark.parametrize(
    "end", [{"result": {"loss": float("nan"), "kv_bytes_per_token": 1, "rung": 1}}, {"error": True}]
)
def test_diverged_and_failed_trials_teach_nothing(task: SearchProblem, end: dict[str, Any]) -> None:
    searcher = make(task)
    searcher.suggest("a")
    searcher.on_trial_result("a", {"loss": 3.0, "kv_bytes_per_token": 4096.0, "rung": 0})
    searcher.on_trial_complete("a", **end)
    assert not searcher._seen and not make(task)._seen


def test_a_proposal_rests_on_a_bounded_number_of_results(demo_dir: Path) -> None:
    """The newest, and the best by rank however old: else every proposal would take longer than the one before."""
    searcher = make(problem(demo_dir, "optuna"))
    assert isinstance(searcher, FrontSearch)
    config = searcher.suggest("t")
    complete(searcher, "t", config)
    point = next(iter(searcher._seen.values())).point
    for number in range(500):
        searcher._points[f"t{number}"] = point
        loss = 1.0 if number == 3 else 2.0 + number / 1000
        searcher.on_trial_result(f"t{number}", {"loss": loss, "kv_bytes_per_token": 4096.0, "rung": 1})
        window = searcher._window()
        assert len(window) <= RECENT + BEST
    assert window[-1].values[0] == pytest.approx(2.499)
    assert min(window, key=lambda o: o.values).values[0] == 1.0  # the third of five hundred
    assert Candidate.from_config(searcher.suggest("next")).kv_ratio in (0.5, 0.25)
