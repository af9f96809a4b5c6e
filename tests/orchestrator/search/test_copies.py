"""Trials that lead to the same model: found by their work, reported to the searcher, resumed, and shown."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from journals import write_journal
from ray.tune.schedulers import TrialScheduler
from ray.tune.search import Searcher

from attention.conversion.convert import convert
from attention.io import checkpoint
from attention.plan import AttentionPlan, LayerPlan
from orchestrator.config.schema import ConfigError, parse_config
from orchestrator.promotion.promote import _chosen
from orchestrator.reporting import console
from orchestrator.reporting.comparison import compare_arms, counts_text
from orchestrator.reporting.tables import trial_table
from orchestrator.search.candidates import Candidate
from orchestrator.search.duplicates import CopyingSearcher, work_digest
from orchestrator.search.resume import JournaledScheduler, JournaledSearch, replay
from orchestrator.search.schedulers import RungProblem, make_scheduler
from orchestrator.search.searchers import ResumableSearcher
from orchestrator.search.trials.context import TrialContext, training_job
from orchestrator.storage import records
from orchestrator.storage.journal import History, Journal, JournalError, load_trials, read_history
from orchestrator.storage.records import COPY, DONE, FAILED, TrialRecord, front
from search_spaces.recipes.catalogue import recipe
from trainers.settings import TrainSettings

PLAN = AttentionPlan((LayerPlan((0, 0, 1, 1), (0, 1, 0, 1)),) * 2, head_dim=8)


@pytest.fixture
def context(tmp_path: Path) -> TrialContext:
    return TrialContext(
        folder=str(tmp_path),
        model=str(tmp_path / "base"),
        dtype="float32",
        train_file="/text/train",
        eval_file="/text/eval",
        calibration_file="",
        calibration_cache="",
        rungs=(0, 4, 8),
        train=TrainSettings(batch_size=4).model_dump(mode="json"),
        original_loss=2.0,
    )


def work(context: TrialContext, name: str, model: Any, plan: AttentionPlan = PLAN, **candidate: Any) -> str:
    """The work of a trial whose conversion is written as a trial writes it."""
    folder = Path(context.folder) / "trials" / name
    checkpoint.save(convert(model, plan), folder / "converted", record={"recipe": name})
    (folder / "plan.json").write_text(plan.to_json())
    settings = {"recipe": recipe("gqa"), "kv_ratio": 0.5, "learning_rate": 1e-3, "seed": 0} | candidate
    return work_digest(training_job(context, folder, Candidate(**settings), name), folder)


def test_equal_work_is_what_ends_with_equal_weights(context: TrialContext, tiny_model: Any) -> None:
    model = tiny_model("llama")
    first = work(context, "a", model)
    assert work(context, "b", model, recipe=recipe("asymgqa")) == first, "another way to the same plan and weights"
    assert work(replace(context, checkpoint_minutes=7), "b", model) == first, "when it saves is not what it does"
    other = tiny_model("llama")
    with torch.no_grad():
        other.get_output_embeddings().weight[0, 0] += 1e-3
    turned = AttentionPlan((LayerPlan((0, 1, 0, 1), (0, 0, 1, 1)),) * 2, head_dim=8)
    different = [
        work(context, "c", other),
        work(context, "d", model, turned),
        work(context, "e", model, learning_rate=2e-3),
        work(context, "f", model, seed=1),
        work(context, "g", model, recipe=recipe("gqa", recovery="lora")),
    ]
    assert len({first, *different}) == 6


CONFIG = {"recipe": "own", "kv_ratio": 0.5, "learning_rate": 1e-3, "choices": {}, "seed": 0}


class Listening(ResumableSearcher):
    """Suggests as many trials as are requested, and records its calls."""

    def __init__(self, count: int) -> None:
        super().__init__(count)
        self.count, self.told = count, []

    def suggest(self, trial_id: str) -> Any:
        self.count -= 1
        return CONFIG if self.count >= 0 else Searcher.FINISHED

    def add_trial(self, trial_id: str, config: dict[str, Any]) -> None:
        self.count -= 1

    def on_trial_result(self, trial_id: str, result: dict) -> None:
        self.told.append((trial_id, result["loss"]))

    def on_trial_complete(self, trial_id: str, result: dict | None = None, error: bool = False) -> None:
        self.told.append((trial_id, "failed" if error else "ended"))

    def of(self, trial_id: str) -> list[Any]:
        return [what for name, what in self.told if name == trial_id]


class Search:
    """Journal, scheduler and searcher as a driver has them; `report` and `end` are what Tune calls."""

    def __init__(self, folder: Path) -> None:
        self.journal = Journal(folder / "journal.jsonl")
        self.journal.begin(3)
        self.history = self.journal.history
        self.inner = make_scheduler("asha", RungProblem(3, 2.0, ("gqa",)))
        self.searcher = Listening(4)
        copying = CopyingSearcher(self.searcher, self.inner.copies)
        replay(self.history, copying, self.inner)
        self.scheduler = JournaledScheduler(self.inner, self.journal)
        self.search = JournaledSearch(copying, self.scheduler, self.journal)
        self.trials = {}

    def start(self, number: int) -> None:
        config = self.search.searcher.suggest(f"t{number}")
        self.journal.append("trial", trial=f"t{number}", config=config)
        self.trials[number] = SimpleNamespace(trial_id=f"t{number}", config=config, status="RUNNING", last_result={})
        self.scheduler.on_trial_add(None, self.trials[number])

    def report(self, number: int, rung: int, loss: float, **more: Any) -> str:
        result = {"loss": loss, "kv_bytes_per_token": 1, "rung": rung, "step": 4 * rung, **more}
        decision = self.scheduler.on_trial_result(None, self.trials[number], result)
        if decision != TrialScheduler.STOP:
            self.search.on_trial_result(f"t{number}", result)
        else:
            self.scheduler.on_trial_complete(None, self.trials[number], result)
            self.search.on_trial_complete(f"t{number}", result)
        return decision


class Recording(ResumableSearcher):
    def __init__(self) -> None:
        super().__init__(9)
        self.calls: list[tuple[str, str]] = []

    def on_trial_result(self, trial_id: str, result: dict) -> None:
        self.calls.append(("report", trial_id))

    def on_trial_complete(self, trial_id: str, result: dict | None = None, error: bool = False) -> None:
        self.calls.append(("lost" if error else "end", trial_id))

    def reopen(self, trial_id: str) -> None:
        self.calls.append(("again", trial_id))


def test_a_lost_trial_that_runs_again_is_reported_for_its_copies_too() -> None:
    inner = Recording()
    searcher = CopyingSearcher(inner, {"copy": "first"})
    searcher.on_trial_result("first", {})
    searcher.on_trial_complete("copy", {})
    searcher.on_trial_complete("first", error=True)
    searcher.reopen("first")
    searcher.on_trial_result("first", {})
    searcher.on_trial_complete("first", {})
    assert inner.calls == [
        (kind, trial) for kind in ("report", "lost", "again", "report", "end") for trial in ("first", "copy")
    ]


def copies_in(history: History) -> dict[str, str]:
    return {name: record.copy_of for name, record in history.records.items() if record.copy_of}


def test_the_searcher_is_given_the_result_of_the_first(tmp_path: Path) -> None:
    search = Search(tmp_path)
    for number in range(3):
        search.start(number)
    assert search.report(0, 0, 3.0, work_digest="x") == TrialScheduler.CONTINUE
    assert search.report(1, 0, 3.0, work_digest="x") == TrialScheduler.STOP
    assert search.searcher.of("t1") == [3.0], "it has not ended for the searcher before the first one has"
    search.report(0, 1, 2.5)
    search.report(0, 2, 2.0)
    search.search.on_trial_complete("t0", {"loss": 2.0, "rung": 2})
    assert search.searcher.of("t1") == [3.0, 2.5, 2.0, "ended"]
    assert search.report(2, 0, 3.0, work_digest="x") == TrialScheduler.STOP
    assert search.searcher.of("t2") == [3.0, 2.5, 2.0, "ended"], "whose best may be any of them"
    assert copies_in(search.history) == {"t1": "t0", "t2": "t0"}


def test_trials_of_another_ratio_do_their_own_work(tmp_path: Path) -> None:
    """Of two ceilings with one plan each has its best trial."""
    search = Search(tmp_path)
    for number in range(3):
        search.start(number)
    search.trials[1].config = CONFIG | {"kv_ratio": 0.75}
    decisions = [search.report(number, 0, 3.0, work_digest="x") for number in range(3)]
    assert decisions == [TrialScheduler.CONTINUE, TrialScheduler.CONTINUE, TrialScheduler.STOP]


def test_a_trial_whose_process_dies_before_its_pause_pauses_when_it_reports_again(tmp_path: Path) -> None:
    search = Search(tmp_path)
    search.start(0)
    search.report(0, 0, 3.0)
    search.history.decisions["t0", 0] = TrialScheduler.PAUSE
    search.history.paused.add("t0")
    assert search.report(0, 0, 3.0) == TrialScheduler.PAUSE
    search.history.paused.discard("t0")  # it was chosen to continue
    assert search.report(0, 0, 3.0) == TrialScheduler.CONTINUE


def test_a_search_whose_journal_has_failed_ends(tmp_path: Path) -> None:
    search = Search(tmp_path)
    search.journal.failed = "the disk is full"
    with pytest.raises(JournalError, match="the disk is full"):
        search.scheduler.choose_trial_to_run(None)


def test_a_resumed_search_knows_its_copies(tmp_path: Path) -> None:
    first = Search(tmp_path)
    for number in range(2):
        first.start(number)
    first.report(0, 0, 3.0, work_digest="x")
    first.report(1, 0, 3.0, work_digest="x")
    second = Search(tmp_path)
    assert second.inner.copies == copies_in(second.history) == {"t1": "t0"}
    assert second.searcher.told == first.searcher.told
    second.trials = first.trials
    second.start(2)
    assert second.report(2, 0, 3.0, work_digest="x") == TrialScheduler.STOP
    second.report(0, 1, 2.5)
    assert second.searcher.of("t1") == [3.0, 2.5]


def record(name: str, recipe: str = "own", losses: tuple[float, ...] = (3.0, 2.0), **more: Any) -> TrialRecord:
    rungs = [{"step": 4 * rung, "rung": rung, "loss": loss} for rung, loss in enumerate(losses)]
    settings = {"status": DONE, "kv_bytes_per_token": 128, "seed": 0, "plan_digest": "p"} | more
    return TrialRecord(name, recipe, 0.5, 1e-3, {}, rungs=rungs, **settings)


def test_records_and_tables_tell_of_a_copy(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    write_journal(tmp_path, [record("a"), record("b", "twin", (3.0,), status=COPY, copy_of="a")])
    stored = read_history(tmp_path / "journal.jsonl").records["b"]
    assert (stored.status, stored.copy_of, len(stored.rungs)) == (COPY, "a", 1)
    trials = load_trials(tmp_path)
    twin = next(t for t in trials if t.trial_id == "b")
    assert (twin.loss, twin.step, twin.usable) == (2.0, 4, False), "its scores are those of the first"
    assert [t.trial_id for t in front(trials)] == ["a"]
    row = next(r for r in compare_arms(trials, {"loss": 2.0}) if r["recipe"] == "twin")
    assert row["loss"]["mean"] == 2.0 and counts_text(row) == "1 (1 copied)"
    console.print_trials(trials, {"loss": 2.0})
    printed, table = capsys.readouterr().out, trial_table(trials, {"loss": 2.0})
    for shown in (printed, str(table)):
        assert "same as a" in shown and "Trials with the same model as another one, not trained again: 1" in shown
    with pytest.raises(ConfigError, match="'b' led to the same model as a; promote that one"):
        config = parse_config({"name": "x", "model": {"path": "m"}, "search": {"kv_ratios": [0.5]}})
        _chosen(trials, ["b"], None, config, config)


def test_a_copy_of_a_trial_that_failed_has_failed(tmp_path: Path) -> None:
    write_journal(tmp_path, [record("a", status=FAILED, error="diverged"), record("b", status=COPY, copy_of="a")])
    copy = load_trials(tmp_path)[1]
    assert (copy.status, copy.error) == (FAILED, "the same model as a, which failed: diverged")


def test_tables_say_which_model_was_measured_untrained() -> None:
    pooled = record("a", "dha")
    pooled.rungs[0]["pooled"] = True
    trials = [pooled, record("b", "gqa")]
    page = str(trial_table(trials, {"loss": 2.0}))
    assert page.count("3.000 pooled") == 1 and records.POOLED_NOTE in page
    rows = compare_arms(trials, {"loss": 2.0})
    assert [row["pooled"] for row in rows] == [True, False]
    assert records.POOLED_NOTE not in str(trial_table(trials[1:], {"loss": 2.0}))
