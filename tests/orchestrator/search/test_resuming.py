"""A search that is killed after any event of its journal, and resumed, ends like an undisturbed one."""

from __future__ import annotations

import copy
import errno
import json
import math
import os
import subprocess
import sys
import time
import zlib
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from ray.tune.experiment import Trial
from ray.tune.schedulers import TrialScheduler

from attention.families import geometry_of
from attention.io.checkpoint import load_config
from orchestrator.config.schema import ConfigError, parse_config
from orchestrator.search.candidates import Candidate, candidate_space, named_candidates
from orchestrator.search.resume import JournaledScheduler, JournaledSearch, replay, settle
from orchestrator.search.schedulers import RungProblem, make_scheduler
from orchestrator.search.searchers import SearchProblem, make_searcher
from orchestrator.search.searchers.bayesian import FrontSearch
from orchestrator.storage import records
from orchestrator.storage.journal import (
    AGAIN,
    END,
    INTERRUPT,
    TRIAL,
    History,
    Journal,
    JournalError,
    load_trials,
    read_events,
    read_history,
)
from orchestrator.training.run import lost

RUNGS = 3


class Killed(Exception):
    """The end of the driver."""


class MortalJournal(Journal):
    """Kills the driver right after, or right before, its `fatal`-th event is written."""

    def __init__(self, path: Path, fatal: int, before: bool) -> None:
        super().__init__(path)
        self.left, self.before = fatal, before

    def append(self, event: str, **fields: Any) -> None:
        self.left -= 1
        if self.left == 0 and self.before:
            raise Killed
        super().append(event, **fields)
        if self.left == 0:
            raise Killed


class StubTrial(SimpleNamespace):
    def set_status(self, status: str) -> None:
        self.status = status


class StubSearch(JournaledSearch):
    """Trials that Tune need not know."""

    def _trial(self, spec: dict, trial_id: str, config: dict) -> Any:
        return StubTrial(trial_id=trial_id, config=config, status=Trial.PENDING, error_file=None)


def problem_of(
    demo_dir: Path, recipes: Sequence[str] = ("gqa", "asymgqa"), kv_ratios: Sequence[float] = (0.5, 0.25)
) -> SearchProblem:
    section: dict[str, Any] = {"recipes": list(recipes), "kv_ratios": list(kv_ratios), "learning_rates": [1e-4, 1e-3]}
    choices = {"grouping": ["exact", "merge"], "fusion": ["least_squares"], "objective": ["least_squares"]}
    config = parse_config(
        {"name": "x", "model": {"path": str(demo_dir)}, "search": section | {"search_space": choices}}
    )
    geometry = geometry_of(load_config(demo_dir))
    return SearchProblem(candidate_space(config, geometry), named_candidates(config, geometry), 4, 0)


def loss_of(config: dict[str, Any], rung: int) -> float:
    candidate = Candidate.from_config(config)
    own = f"{candidate.recipe.digest} {candidate.kv_ratio} {candidate.learning_rate}"
    return 2 + zlib.crc32(own.encode()) % 101 / 100 - rung / 10


def drive(
    journal: Journal,
    problem: SearchProblem,
    searcher_name: str,
    scheduler_name: str,
    rungs: int = RUNGS,
    factor: float = 2.0,
) -> None:
    """Behave as Tune does, one trial at a time: each that starts repeats all its reports."""
    journal.begin(rungs)
    searcher = make_searcher(searcher_name, problem)
    scheduler = make_scheduler(scheduler_name, RungProblem(rungs, factor, ("gqa",), trials=problem.total))
    scheduler.slots.capacity = 1
    settle(journal)
    replay(journal.history, searcher, scheduler)
    decided = JournaledScheduler(scheduler, journal)
    search = StubSearch(searcher, decided, journal)
    search._total_samples = problem.total

    def stop(trial: Any) -> None:
        decided.on_trial_remove(None, trial)
        search.on_trial_complete(trial.trial_id)

    controller = SimpleNamespace(search_alg=search, stop_trial=stop)
    idle = 0
    while not search.is_finished() or journal.history.open:
        trial = search.create_trial_if_possible({}) if not search.is_finished() else None
        if trial is not None:
            decided.on_trial_add(None, trial)
            if trial.status == Trial.PENDING:
                run(trial, decided, search, rungs)
        elif (trial := decided.choose_trial_to_run(controller)) is not None:
            run(trial, decided, search, rungs)
        else:
            idle += 1
            assert idle < 100, "the search goes nowhere"


def run(trial: Any, decided: JournaledScheduler, search: JournaledSearch, rungs: int) -> None:
    result: dict[str, Any] = {}
    for rung in range(rungs):
        result = {
            "loss": loss_of(trial.config, rung),
            "kv_bytes_per_token": int(8192 * trial.config["kv_ratio"]),
            "rung": rung,
            "step": 10 * rung,
            "training_iteration": rung + 1,
            "time_total_s": os.getpid(),
        }
        decision = decided.on_trial_result(None, trial, result)
        trial.status = Trial.PAUSED if decision == TrialScheduler.PAUSE else Trial.RUNNING
        if decision == TrialScheduler.STOP:
            break
        search.on_trial_result(trial.trial_id, result)
        if decision == TrialScheduler.PAUSE:
            return
    decided.on_trial_complete(None, trial, result)
    search.on_trial_complete(trial.trial_id, result=result)


@pytest.mark.parametrize("searcher", ["random", "optuna"])
@pytest.mark.parametrize(("scheduler", "before"), [("asha", True), ("asha", False), ("front", True), ("front", False)])
def test_killed_after_every_few_events_the_search_ends_as_one_that_was_left_alone(
    demo_dir: Path, tmp_path: Path, searcher: str, scheduler: str, before: bool
) -> None:
    problem = problem_of(demo_dir)
    drive(Journal(tmp_path / "undisturbed"), problem, searcher, scheduler)
    undisturbed = events_of(tmp_path / "undisturbed")
    assert sum(e["event"] == TRIAL for e in undisturbed) == problem.total
    decisions = {e.get("decision") for e in undisturbed if e["event"] == "report"}
    assert decisions == {"CONTINUE", "PAUSE" if scheduler == "front" else "STOP"}
    kills = 0
    while True:
        try:
            drive(MortalJournal(tmp_path / "killed", 2 + kills % 3, before), problem, searcher, scheduler)
            break
        except Killed:
            kills += 1
    assert kills > len(undisturbed) / 4
    assert events_of(tmp_path / "killed") == undisturbed


@pytest.mark.parametrize("before", [True, False])
def test_killed_while_it_closes_it_ends_as_one_that_was_left_alone(
    demo_dir: Path, tmp_path: Path, before: bool
) -> None:
    """With few trials for many rungs the last ones advance only because no others come."""
    problem = replace(problem_of(demo_dir), samples=1)

    def driven(journal: Journal) -> None:
        drive(journal, problem, "random", "front", rungs=5, factor=3.0)

    driven(Journal(tmp_path / "undisturbed"))
    undisturbed = events_of(tmp_path / "undisturbed")
    for fatal in range(len(undisturbed) // 2, len(undisturbed)):
        with pytest.raises(Killed):
            driven(MortalJournal(tmp_path / f"killed-{fatal}", fatal, before))
        driven(Journal(tmp_path / f"killed-{fatal}"))
        assert events_of(tmp_path / f"killed-{fatal}") == undisturbed


def events_of(file: Path) -> list[dict[str, Any]]:
    """The content of a journal without times."""
    return [{key: value for key, value in event.items() if key != "time"} for event in read_events(file)]


def test_every_prefix_of_a_journal_is_a_state_that_the_search_was_in(demo_dir: Path, tmp_path: Path) -> None:
    """A kill after any byte: complete lines are read, and the next writer continues from there."""
    journal = Journal(tmp_path / "journal.jsonl")
    drive(journal, replace(problem_of(demo_dir, ["gqa"], [0.5]), samples=1), "random", "front")
    lines = journal.path.read_bytes().splitlines(keepends=True)
    states = [vars(History())]
    fold = History()
    for event in read_events(journal.path):
        fold.add(event)
        states.append(copy.deepcopy(vars(fold)))
    assert len(lines) > 15 and states[-1] == vars(journal.history)
    folder = tmp_path / "cut"
    folder.mkdir()
    for whole in range(len(lines)):
        for cut in range(len(lines[whole])):
            (folder / "journal.jsonl").write_bytes(b"".join(lines[:whole]) + lines[whole][:cut])
            assert vars(read_history(folder / "journal.jsonl")) == states[whole]
        load_trials(folder)
        again = Journal(folder / "journal.jsonl")
        event = json.loads(lines[whole])
        again.append(event.pop("event"), **event)
        assert again.path.read_bytes() == b"".join(lines[: whole + 1])
        assert vars(again.history) == states[whole + 1]


def test_a_line_cut_short_is_dropped_and_the_next_one_is_whole(tmp_path: Path) -> None:
    journal = begun(tmp_path, "t0")
    with journal.path.open("a") as stream:
        stream.write('{"event": "end", "tri')
    assert [e["trial"] for e in read_events(journal.path)[1:]] == ["t0"]
    for trial in ("x" * 10_000, "t2"):
        journal.append(TRIAL, trial=trial, config=CONFIG)
    assert list(Journal(journal.path).history.records) == ["t0", "x" * 10_000, "t2"]
    journal.path.write_text('{"event"\n' + journal.path.read_text())
    with pytest.raises(JournalError, match="line 1 of 5"):
        load_trials(tmp_path)


CONFIG = {"recipe": "gqa", "kv_ratio": 0.5, "learning_rate": 1e-3, "choices": {}, "seed": 1}


def begun(folder: Path, *trials: str) -> Journal:
    """A journal in which some trials were suggested."""
    journal = Journal(folder / "journal.jsonl")
    journal.begin(RUNGS)
    for trial in trials:
        journal.append(TRIAL, trial=trial, config=CONFIG)
    return journal


FILL = """
import resource, signal, sys
from orchestrator.storage.journal import Journal, JournalError
signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
resource.setrlimit(resource.RLIMIT_FSIZE, (1000, 1000))
journal = Journal(sys.argv[1])
journal.begin(3)
for number in range(100):
    try:
        journal.append("resume", number=number)
    except JournalError as error:
        print(error)
        break
try:
    journal.append("resume")
except JournalError:
    print("refused")
"""


def test_a_full_disk_leaves_a_whole_journal_and_says_what_to_do(tmp_path: Path) -> None:
    file = tmp_path / "journal"
    process = subprocess.run([sys.executable, "-c", FILL, str(file)], capture_output=True, text=True, check=True).stdout
    assert f"{file}: cannot be written" in process
    assert "--resume" in process
    assert process.endswith("refused\n")
    events = read_events(file)[1:]
    assert [e["number"] for e in events] == list(range(len(events)))
    assert 10 < len(events) < 100
    Journal(file).append(INTERRUPT)
    assert Journal(file).history.interrupted


def test_a_disk_that_is_full_for_a_trial_ends_the_search_and_not_the_trial(demo_dir: Path, tmp_path: Path) -> None:
    """Otherwise all the others would fail after it, and the remaining ones would be promoted."""
    journal = begun(tmp_path, "t0")
    scheduler = JournaledScheduler(make_scheduler("asha", RungProblem(RUNGS, 2.0)), journal)
    search = JournaledSearch(make_searcher("random", problem_of(demo_dir)), scheduler, journal)
    (tmp_path / "error.txt").write_text("OSError: [Errno 28] No space left on device: 'model.safetensors'\n")
    trial = StubTrial(trial_id="t0", config=CONFIG, status=Trial.RUNNING, error_file=str(tmp_path / "error.txt"))
    scheduler.on_trial_error(None, trial)
    with pytest.raises(JournalError, match="No space left on device.*--resume"):
        search.on_trial_complete("t0", error=True)
    assert journal.history.open == ["t0"] and [e["event"] for e in read_events(journal.path)] == ["search", "trial"]


def report(trial: str, step: int, decision: str, **result: Any) -> dict[str, Any]:
    rung = {0: 0, 10: 1, 20: 2}[step]
    return {"event": "report", "trial": trial, "decision": decision, "result": {"step": step, "rung": rung, **result}}


def test_ends_that_a_kill_has_swallowed_are_written_and_lost_trials_are_tried_again(tmp_path: Path) -> None:
    journal = begun(tmp_path, "stopped", "done", "open", "lost", "failed")
    for event in (report("stopped", 0, "STOP"), report("done", 20, "CONTINUE"), report("open", 10, "CONTINUE")):
        journal.append(**event)
    journal.append(END, trial="lost", error="ActorDiedError", trace=None, lost=True)
    journal.append(END, trial="failed", error="ValueError", trace=None, lost=False)
    settle(journal)
    history = journal.history
    assert history.open == ["open", "lost"]
    assert set(history.ends) == {"stopped", "done", "failed"}
    assert [e["event"] for e in history.events[-3:]] == [END, END, AGAIN]
    settle(journal)
    assert len(read_events(journal.path)) == 14


def test_a_lost_trial_that_runs_again_teaches_the_searcher(demo_dir: Path, tmp_path: Path) -> None:
    problem, journal = problem_of(demo_dir), Journal(tmp_path / "journal.jsonl")
    journal.begin(RUNGS)
    drawn = next(FrontSearch(problem).draws(0))
    journal.append(TRIAL, trial="t0000", config=drawn.config())
    scores = {"loss": 3.0, "kv_bytes_per_token": 4096}
    journal.append(**report("t0000", 0, "CONTINUE", **scores))
    journal.append(END, trial="t0000", error="ActorDiedError", trace=None, lost=True)
    settle(journal)
    journal.append(**report("t0000", 10, "CONTINUE", **scores | {"loss": 2.5}))
    searcher = make_searcher("optuna", problem)
    assert isinstance(searcher, FrontSearch)
    replay(journal.history, searcher, make_scheduler("asha", RungProblem(RUNGS, 2.0, ("gqa",), trials=1)))
    assert [seen.values for seen in searcher._window()] == [[2.5, 4096.0]]


def test_records_are_what_the_journal_says(tmp_path: Path) -> None:
    journal = begun(tmp_path, "a", "b", "c", "d", "e")
    for event in (
        report("a", 0, "CONTINUE", loss=3.0, kv_bytes_per_token=2048, phases={"plan": 1.5}),
        report("a", 10, "STOP", loss=2.5, checkpoint_path="/x"),
        report("b", 0, "CONTINUE", loss=9.0),
        report("b", 20, "CONTINUE", loss=math.nan),
        report("c", 0, "PAUSE", loss=4.0),
    ):
        journal.append(**event)
    for trial, error in (("a", None), ("b", None), ("d", "ValueError: no")):
        journal.append(END, trial=trial, error=error, trace=None, lost=False)
    journal.append("run", trial="a", run_id="r1")

    def states() -> list[tuple[str, str, list[float | None]]]:
        return [(t.trial_id, t.status, [r["loss"] for r in t.rungs]) for t in load_trials(tmp_path)]

    assert states() == [
        ("a", records.STOPPED, [3.0, 2.5]),
        ("b", records.FAILED, [9.0, None]),
        ("c", records.WAITING, [4.0]),
        ("d", records.FAILED, []),
        ("e", records.RUNNING, []),
    ]
    first, second, *_ = load_trials(tmp_path)
    assert (first.run_id, first.kv_bytes_per_token, first.seconds) == ("r1", 2048, {"plan": 1.5})
    assert first.last["checkpoint_path"] == "/x" and abs(first.last["timestamp"] - time.time()) < 60
    assert "diverged" in (second.error or "")
    journal.append(INTERRUPT)
    assert [status for _, status, _ in states()[2:]] == [records.KILLED, records.FAILED, records.KILLED]
    settle(Journal(journal.path))
    assert [status for _, status, _ in states()[2:]] == [records.WAITING, records.FAILED, records.RUNNING]


@pytest.mark.parametrize(
    "first", ['{"event": "trial", "trial": "t0", "config": {}}', '{"event": "search", "format": 99}']
)
def test_a_journal_of_another_version_is_refused(tmp_path: Path, first: str) -> None:
    (tmp_path / "journal.jsonl").write_text(first + "\n")
    for read in (read_events, read_history, Journal):
        with pytest.raises(ConfigError, match="was started by a.* version .*start a new search"):
            read(tmp_path / "journal.jsonl")


@pytest.mark.parametrize(
    ("error", "expected"),
    [
        ("GroupError: [enforce fail at inline_container.cc:672] . unexpected pos 128 vs 0", True),  # torch.save
        ("ray.exceptions.ActorDiedError: the actor died because its node has died", True),
        ("WorkerGroupError: WorkerHealthCheckFailedError: worker 0 died", True),
        ("ControllerError: controller error:\nThe worker group startup timed out after 60 seconds waiting for 8", True),
        (OSError(errno.ENOSPC, os.strerror(errno.ENOSPC)), True),
        ("TrainingDiverged: training loss at step 2 of 3 is nan", False),
        ("ValueError: expected 4 heads", False),
    ],
)
def test_only_what_the_machines_have_done_is_tried_again(error: Any, expected: bool) -> None:
    assert lost(error) is expected
