"""Work ahead of trials: a later candidate is converted while the trial before it occupies the slot.

The cluster is a separate Ray whose GPUs are numbers (`train.device=cpu`): one script that runs two searches.
"""

from __future__ import annotations

import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from json_output import last_json
from small_searches import small_search

from orchestrator.cluster import ray_tasks
from orchestrator.cluster.capacity import Nodes
from orchestrator.search import ahead
from orchestrator.search.ahead import HoldNodes, PlanAhead
from orchestrator.search.candidates import Candidate
from orchestrator.search.searchers import SEARCHERS
from orchestrator.search.trials.context import SearchSession
from orchestrator.storage.journal import END, REPORT, TRIAL, Journal
from orchestrator.storage.paths import SearchFolder
from search_spaces.recipes.catalogue import recipe
from tests.conftest import REPOSITORY
from trainers.settings import TrainSettings

NAMED = tuple(Candidate(recipe("gqa"), ratio, 1e-3) for ratio in (0.5, 0.25, 0.125))
NODE = Nodes(1, {"CPU": 8.0, "GPU": 2.0})
SCRIPT = """
import json, sys
import ray
from pathlib import Path
sys.path.insert(0, "tests/helpers")
from small_searches import small_search
from orchestrator.pipeline import search
from orchestrator.cluster.session import free_port
from orchestrator.storage.journal import read_events

def found(folder, plan_ahead):
    config = small_search(
        Path("examples/stdlib-llama"), folder, name=f"ahead-{plan_ahead}",
        search={"recipes": ["gqa", "least_squares"], "kv_ratios": [0.5, 0.25]}, rungs={"steps": [0, 240]},
        train={"device": "cpu", "num_workers": 1, "gpus_per_worker": 1, "cpus_per_worker": 1},
        promotion={"enabled": False},
        data={"max_epochs": 4},
        resources={"trial_gpus": 1, "trial_cpus": 1, "max_concurrent": 1, "plan_ahead": plan_ahead},
    )
    outcome = search(config)
    events = read_events(outcome.folder / "journal.jsonl")
    return {
        "order": [[e.get(k) for k in ("event", "trial", "config", "decision")] for e in events if e["event"] != "run"],
        "losses": [[r["loss"] for r in t.rungs] for t in outcome.trials],
        "phases": [sorted(t.seconds) for t in outcome.trials],
        "left": [p.name for p in outcome.folder.glob(".conversions")],
    }

port = free_port()
import os
os.environ["RAY_API_SERVER_ADDRESS"] = f"http://127.0.0.1:{port}"
ray.init(address="local", num_cpus=8, num_gpus=2, include_dashboard=True, dashboard_port=port, log_to_driver=False)
print(json.dumps([found(sys.argv[1], ahead) for ahead in (0, 1)]))
"""


@pytest.mark.extended
@pytest.mark.timeout(2400)
def test_no_slot_is_idle_while_a_candidate_is_planned(tmp_path: Path) -> None:
    """And nothing else changes: which trials there are, what is decided, and what they come to.

    A trial trains for longer than a task needs to start and to plan, some 15 s, or its successor plans for itself.
    """
    command = [sys.executable, "-c", SCRIPT, str(tmp_path)]
    ended = subprocess.run(command, cwd=REPOSITORY, capture_output=True, text=True, check=False)
    assert ended.returncode == 0, ended.stderr[-4000:]
    before, after = last_json(ended.stdout)
    for same in ("order", "losses"):
        assert after[same] == before[same]
    assert all("plan" in phases for phases in before["phases"])
    assert "plan" in after["phases"][0]  # nothing is ahead of the first
    assert len(after["phases"]) == 4
    assert not any("plan" in phases or "convert" in phases for phases in after["phases"][1:]), after["phases"]
    assert before["left"] == after["left"] == []


class Tasks:
    """Replaces Ray's tasks: records which were started and cancelled; each runs until it is in `ended`."""

    def __init__(self) -> None:
        self.started: list[Candidate] = []
        self.cancelled: list[Candidate] = []
        self.ended: list[Candidate] = []
        self.RayError = Exception

    def remote(self, **options: Any) -> Any:
        assert options["num_gpus"] == 1

        def start(candidate: Candidate, context: Any, folder: Path) -> Candidate:
            self.started.append(candidate)
            return candidate

        return lambda function: SimpleNamespace(remote=start)

    def wait(self, references: list[Candidate], timeout: float, **_: Any) -> tuple[list[Candidate], list[Candidate]]:
        ended = [reference for reference in references if reference in self.ended]
        return ended, [reference for reference in references if reference not in ended]

    def cancel(self, reference: Candidate, force: bool) -> None:
        self.cancelled.append(reference)


@pytest.fixture
def session(tmp_path: Path, demo_dir: Path) -> Any:
    config = small_search(
        demo_dir,
        tmp_path,
        train={"device": "cpu", "num_workers": 2, "gpus_per_worker": 1, "cpus_per_worker": 1},
        resources={"trial_gpus": 1, "max_concurrent": "auto"},
    )
    folder = SearchFolder(tmp_path / "small")
    folder.root.mkdir()
    settings = TrainSettings(batch_size=2).model_dump(mode="json")
    context: Any = SimpleNamespace(folder=str(folder.root), task={"num_gpus": 1})
    context.pool = None
    context.search_phase = lambda candidate: None
    context.settings = lambda recipe, rate: TrainSettings.model_validate(settings)
    context.relaxation_steps = lambda recipe: 0
    context.weights = context.model = context.dtype = context.device = "x"
    context.calibration_file = context.eval_file = context.mixed_moments = None
    return SearchSession(config, folder, context, None, 1)  # type: ignore[arg-type]


@pytest.fixture
def tasks(monkeypatch: pytest.MonkeyPatch) -> Tasks:
    created = Tasks()
    monkeypatch.setattr(ahead, "ray", created)
    monkeypatch.setattr(ray_tasks, "ray", created)
    monkeypatch.setattr(ahead, "live_nodes", lambda: [NODE])
    monkeypatch.setattr(ahead, "free_nodes", lambda: [NODE])
    monkeypatch.setattr(ahead, "CHECK_SECONDS", 0.0)
    return created


def searching(session: Any, named: tuple[Candidate, ...] = NAMED) -> tuple[PlanAhead, Journal]:
    journal = Journal(session.folder.journal)
    journal.begin(2)
    problem: Any = SimpleNamespace(named=named, samples=0, total=len(named), seed=0)
    searcher = SEARCHERS.get("grid")(problem)
    searcher.suggest("t0000")
    journal.append(TRIAL, trial="t0000", config=named[0].config())
    return PlanAhead(session, searcher, journal.history, named), journal


def report(journal: Journal, trial: str, rung: int) -> None:
    journal.append(REPORT, trial=trial, result={"step": rung, "rung": rung, "loss": 2.0}, decision="CONTINUE")


def test_one_candidate_is_ahead_where_a_gpu_is_free(session: Any, tasks: Tasks) -> None:
    plan_ahead, _ = searching(session)
    for _ in range(3):
        plan_ahead.on_step_end(0, [])
    assert tasks.started == [NAMED[1]]
    tasks.ended = [NAMED[1]]  # without a conversion: its trial says why
    plan_ahead.on_step_end(0, [])
    assert tasks.started == [NAMED[1]], "what failed is not tried again"


def test_the_conversion_of_a_trial_with_another_rate_is_not_ahead(session: Any, tasks: Tasks) -> None:
    """It is made already, by the trial before: the next one is."""
    rates = session.config.search.model_copy(update={"learning_rates": [1e-3, 1e-4]})
    session = replace(session, config=session.config.model_copy(update={"search": rates}))
    both = tuple(replace(NAMED[i], learning_rate=rate) for i in range(2) for rate in (1e-3, 1e-4))
    plan_ahead, _ = searching(session, both)
    plan_ahead.on_step_end(0, [])
    assert tasks.started == [both[2]]


def test_none_is_ahead_while_workers_run_that_need_all_gpus(session: Any, tasks: Tasks) -> None:
    plan_ahead, journal = searching(session)
    report(journal, "t0000", 0)
    plan_ahead.on_step_end(0, [])
    assert tasks.started == []


def test_none_is_ahead_where_the_gpus_are_in_use(session: Any, tasks: Tasks, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ahead, "free_nodes", lambda: [Nodes(1, {"CPU": 8.0})])  # by idle workers, or another search
    plan_ahead, _ = searching(session)
    plan_ahead.on_step_end(0, [])
    assert tasks.started == []


def test_workers_wait_no_longer_than_was_spent(session: Any, tasks: Tasks) -> None:
    plan_ahead, journal = searching(session)
    plan_ahead.on_step_end(0, [])
    (task,) = plan_ahead._tasks.values()
    task.started -= 60
    report(journal, "t0000", 0)  # it has planned: its workers need both GPUs
    plan_ahead.on_step_end(0, [])
    assert tasks.cancelled == [] and task.blocks_since is not None
    task.blocks_since -= 61
    task.started -= 61
    plan_ahead.on_step_end(0, [])
    assert tasks.cancelled == [NAMED[1]]
    plan_ahead.on_step_end(0, [])
    assert tasks.started == [NAMED[1]]


def test_what_is_under_way_ends_with_the_trials(session: Any, tasks: Tasks) -> None:
    plan_ahead, journal = searching(session)
    plan_ahead.on_step_end(0, [])
    session.folder.root.joinpath(".conversions").mkdir(exist_ok=True)
    plan_ahead.on_experiment_end([])
    assert tasks.cancelled == [NAMED[1]]
    assert session.folder.root.joinpath(".conversions").exists(), "a trial is open: an interrupted search goes on"
    journal.append(END, trial="t0000", error=None, trace=None, lost=False, bare=False)
    plan_ahead.on_experiment_end([])
    assert not session.folder.root.joinpath(".conversions").exists()


def test_nothing_is_ahead_without_gpus_or_with_zero(session: Any, tasks: Tasks) -> None:
    plan_ahead, _ = searching(session)
    assert plan_ahead.limit == 1

    def limit(number: int) -> int:
        resources = session.config.resources.model_copy(update={"plan_ahead": number})
        changed = replace(session, config=session.config.model_copy(update={"resources": resources}))
        return PlanAhead(changed, plan_ahead._searcher, plan_ahead._history, NAMED).limit

    assert [limit(number) for number in (0, 2)] == [0, 2]
    session.context.task = None
    assert limit(2) == 0


def test_nodes_are_reserved_for_later_trials_and_no_longer(session: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    four = Nodes(4, {"CPU": 8.0, "GPU": 2.0})
    monkeypatch.setattr(ahead, "live_nodes", lambda: [four])
    _, journal = searching(session)
    workers = {"CPU": 2.0, "GPU": 2.0}
    hold = HoldNodes(session, journal.history, expected=3)
    assert hold.bundles() == [workers] * 3, "the open trial, which plans, and two to come, of four nodes"
    for trial, config in zip(("t0001", "t0002"), NAMED[1:], strict=True):
        journal.append(TRIAL, trial=trial, config=config.config())
    journal.append(END, trial="t0000", error=None, trace=None, lost=False, bare=False)
    assert hold.bundles() == [workers] * 2
    monkeypatch.setattr(ahead, "live_nodes", lambda: [Nodes(1, four.resources)])
    assert hold.bundles() == [workers], "no node is bought for it"
    one = session.config.resources.model_copy(update={"max_concurrent": 1})
    limited = replace(session, config=session.config.model_copy(update={"resources": one}))
    monkeypatch.setattr(ahead, "live_nodes", lambda: [four])
    assert HoldNodes(limited, journal.history, expected=3).bundles() == [workers]
    report(journal, "t0001", 0)
    assert hold.bundles() == [workers], "Ray Train requests the node of a trial that trains"
