"""A search that is killed after any event of its journal, and goes on, ends as one that was left alone."""

from __future__ import annotations

import errno
import os
import subprocess
import sys
import zlib
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from ray.tune.experiment import Trial
from ray.tune.schedulers import TrialScheduler
from ray.tune.search import Searcher

from attention.families import geometry_of
from attention.io.checkpoint import load_config
from orchestrator.config.schema import parse_config
from orchestrator.search.callbacks import SearchLog
from orchestrator.search.candidates import Candidate, candidate_space, named_candidates
from orchestrator.search.journal import AGAIN, END, History, Journal, JournalError
from orchestrator.search.resume import JournaledScheduler, JournaledSearch, lost, replay, settle
from orchestrator.search.schedulers import RungProblem, SlotSearcher, make_scheduler
from orchestrator.search.schedulers.halving import rung_resource
from orchestrator.search.searchers import SearchProblem, make_searcher
from orchestrator.storage import records

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


def problem_of(demo_dir: Path) -> SearchProblem:
    section = {"recipes": ["gqa", "asymgqa"], "kv_ratios": [0.5, 0.25], "learning_rates": [1e-4, 1e-3]}
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


def drive(journal: Journal, problem: SearchProblem, searcher_name: str, scheduler_name: str) -> None:
    """What Tune does, one trial at a time: each that starts tells all its reports again."""
    history = History(journal.events())
    searcher = make_searcher(searcher_name, problem)
    scheduler = make_scheduler(scheduler_name, RungProblem(RUNGS, 2.0, ("gqa",), trials=problem.total))
    scheduler.slots.capacity = 1
    settle(journal, history, RUNGS)
    replay(history, searcher, scheduler)
    decided = JournaledScheduler(scheduler, journal, history)
    search = StubSearch(SlotSearcher(searcher, scheduler.slots), decided, journal, history)
    search._total_samples = problem.total

    def stop(trial: Any) -> None:
        decided.on_trial_remove(None, trial)
        search.on_trial_complete(trial.trial_id)

    controller = SimpleNamespace(search_alg=search, stop_trial=stop)
    while not search.is_finished() or history.open:
        trial = search.create_trial_if_possible({}) if not search.is_finished() else None
        if trial is not None:
            decided.on_trial_add(None, trial)
            if trial.status == Trial.PENDING:
                run(trial, decided, search)
        elif (trial := decided.choose_trial_to_run(controller)) is not None:
            run(trial, decided, search)


def run(trial: Any, decided: JournaledScheduler, search: JournaledSearch) -> None:
    result: dict[str, Any] = {}
    for rung in range(RUNGS):
        result = {
            "loss": loss_of(trial.config, rung),
            "kv_bytes_per_token": int(8192 * trial.config["kv_ratio"]),
            "rung": rung,
            "step": 10 * rung,
            "resource": rung_resource(rung, 2.0),
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
@pytest.mark.parametrize(
    ("scheduler", "before"), [("budget", True), ("budget", False), ("front", True), ("front", False)]
)
def test_killed_after_every_few_events_the_search_ends_as_one_that_was_left_alone(
    demo_dir: Path, tmp_path: Path, searcher: str, scheduler: str, before: bool
) -> None:
    problem = problem_of(demo_dir)
    drive(Journal(tmp_path / "undisturbed"), problem, searcher, scheduler)
    undisturbed = Journal(tmp_path / "undisturbed").events()
    assert len(History(undisturbed).configs) == problem.total
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
    assert Journal(tmp_path / "killed").events() == undisturbed


def test_a_line_cut_short_is_dropped_and_the_next_one_is_whole(tmp_path: Path) -> None:
    journal = Journal(tmp_path / "journal")
    journal.append(END, trial="t0", error=None)
    with journal.path.open("a") as stream:
        stream.write('{"event": "end", "tri')
    assert [e["trial"] for e in journal.events()] == ["t0"]
    journal.append(END, trial="x" * 10_000, error=None)
    journal.append(END, trial="t2", error=None)
    assert [e["trial"] for e in journal.events()] == ["t0", "x" * 10_000, "t2"]
    journal.path.write_text('{"event"\n' + journal.path.read_text())
    with pytest.raises(JournalError, match="line 1 of 4"):
        journal.events()


FILL = """
import resource, signal, sys
from orchestrator.search.journal import Journal, JournalError
signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
resource.setrlimit(resource.RLIMIT_FSIZE, (1000, 1000))
journal = Journal(sys.argv[1])
for number in range(100):
    try:
        journal.append("end", trial=f"t{number}")
    except JournalError as error:
        print(error)
        break
try:
    journal.append("end", trial="small")
except JournalError:
    print("refused")
"""


def test_a_full_disk_leaves_a_whole_journal_and_says_what_to_do(tmp_path: Path) -> None:
    file = tmp_path / "journal"
    told = subprocess.run([sys.executable, "-c", FILL, str(file)], capture_output=True, text=True, check=True).stdout
    assert f"{file}: cannot be written" in told
    assert "--resume" in told
    assert told.endswith("refused\n")
    events = Journal(file).events()
    assert [e["trial"] for e in events] == [f"t{n}" for n in range(len(events))]
    assert 20 < len(events) < 100
    Journal(file).append(END, trial="after")
    assert Journal(file).events()[-1]["trial"] == "after"


def report(trial: str, step: int, decision: str, **result: Any) -> dict[str, Any]:
    rung = {0: 0, 10: 1, 20: 2}[step]
    return {"event": "report", "trial": trial, "decision": decision, "result": {"step": step, "rung": rung, **result}}


def test_ends_that_a_kill_has_swallowed_are_written_and_lost_trials_are_tried_again(tmp_path: Path) -> None:
    journal = Journal(tmp_path / "journal")
    for trial in ("stopped", "done", "open", "lost", "failed"):
        journal.append("trial", trial=trial, config={})
    for event in (report("stopped", 0, "STOP"), report("done", 20, "CONTINUE"), report("open", 10, "CONTINUE")):
        journal.append(**event)
    journal.append(END, trial="lost", error="ActorDiedError", trace=None, lost=True)
    journal.append(END, trial="failed", error="ValueError", trace=None, lost=False)
    history = History(journal.events())
    settle(journal, history, RUNGS)
    assert history.open == ["open", "lost"]
    assert set(history.ends) == {"stopped", "done", "failed"}
    assert [e["event"] for e in journal.events()[-3:]] == [END, END, AGAIN]
    settle(journal, history, RUNGS)
    assert len(journal.events()) == 13


def test_records_are_brought_to_where_the_journal_is(tmp_path: Path) -> None:
    config = {"recipe": "gqa", "kv_ratio": 0.5, "learning_rate": 1e-3, "choices": {}, "seed": 1}
    events: list[dict[str, Any]] = [{"event": "trial", "trial": t, "config": config} for t in ("a", "b", "c")]
    events += [
        report("a", 0, "CONTINUE", loss=3.0),
        report("a", 10, "STOP", loss=2.5),
        report("b", 0, "STOP", loss=9.0),
    ]
    events += [{"event": END, "trial": t, "error": None, "trace": None, "lost": False} for t in ("a", "b")]
    log = SearchLog(tmp_path / "trials.json", None, None, 3, RUNGS, 2.0)
    log.reconcile(History(events))
    found = records.load_trials(tmp_path / "trials.json")
    assert [(t.trial_id, t.status, [r["loss"] for r in t.rungs]) for t in found] == [
        ("a", records.STOPPED, [3.0, 2.5]),
        ("b", records.STOPPED, [9.0]),
        ("c", records.WAITING, []),
    ]


@pytest.mark.parametrize(
    ("error", "expected"),
    [
        ("GroupError: [enforce fail at inline_container.cc:672] . unexpected pos 128 vs 0", True),  # torch.save
        ("ray.exceptions.ActorDiedError: the actor died because its node has died", True),
        ("WorkerGroupError: WorkerHealthCheckFailedError: worker 0 died", True),
        (OSError(errno.ENOSPC, os.strerror(errno.ENOSPC)), True),
        ("TrainingDiverged: training loss at step 2 of 3 is nan", False),
        ("ValueError: expected 4 heads", False),
    ],
)
def test_only_what_the_machines_have_done_is_tried_again(error: Any, expected: bool) -> None:
    assert lost(error) is expected


def test_a_searcher_that_changed_its_mind_does_not_change_the_record(
    demo_dir: Path, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    problem = problem_of(demo_dir)
    searcher = make_searcher("random", problem)
    first = searcher.suggest("t0000")
    assert first != Searcher.FINISHED
    events = [{"event": "trial", "trial": "t0000", "config": {**first, "learning_rate": 0.5}}]  # type: ignore[dict-item]
    replay(History(events), make_searcher("random", problem), make_scheduler("budget", RungProblem(RUNGS, 2.0)))
    assert "the searcher now suggests another trial" in caplog.text
