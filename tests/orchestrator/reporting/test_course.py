"""The course of a search in a report, and the commands that make its points again."""

from __future__ import annotations

import shlex
from pathlib import Path
from typing import Any

import pytest
import yaml
from journals import write_journal
from transformers import AutoConfig

from attention.families import geometry_of
from orchestrator.config.schema import parse_config, read_search_config
from orchestrator.reporting.figures import course
from orchestrator.reporting.figures.course import proxy_agreement, seconds_by_phase, working_intervals
from orchestrator.reporting.pages.report_page import write_report
from orchestrator.reporting.repeat_command import command_of
from orchestrator.search.candidates import Candidate, named_candidates
from orchestrator.storage import records
from orchestrator.storage.json_files import write_json
from orchestrator.storage.paths import SearchFolder
from orchestrator.storage.records import TrialRecord
from search_spaces.recipes.catalogue import RECIPES, recipe


def trial(number: int, losses: list[float], budget: float = 0.25, **more: Any) -> TrialRecord:
    rungs = [
        {"step": 8 * i, "loss": loss, "seconds": 5.0 * (i or 1), "timestamp": 1000.0 + 20 * number + 30 * i}
        for i, loss in enumerate(losses)
    ]
    facts = {"status": records.DONE, "rungs": rungs, "kv_bytes_per_token": int(8192 * budget), "seconds": {"plan": 3.0}}
    choices = more.pop("choices", {})
    return TrialRecord(f"t{number}", f"arm{number % 3}", budget, 1e-3, choices, **{**facts, **more})


def test_agreement_is_that_of_the_ranks() -> None:
    finals = [2.0, 2.4, 2.1, 2.3, 2.2]  # ranks 1 5 2 4 3 where rung 0 says 1 2 3 4 5
    trials = [trial(i, [3.0 + i, last]) for i, last in enumerate(finals)]
    trials += [trial(10 + i, [3.0 + i, 2.0 + i], 0.5) for i in range(3)]  # too few for a figure
    trials.append(trial(20, [2.5], status=records.STOPPED))  # never trained: not among those compared
    result = proxy_agreement(trials)
    assert list(result) == [0.25]
    # 1 - 6 sum(d^2) / (n (n^2 - 1)) with differences 0, 3, 1, 0, 2
    assert result[0.25]["rho"] == pytest.approx(1 - 6 * 14 / (5 * 24))
    assert result[0.25]["regret"] == 0.0
    assert proxy_agreement([trial(i, [3.0 - i, 2.0 + i]) for i in range(4)])[0.25]["regret"] == pytest.approx(3.0)
    assert course.proxy_figure(trials) is not None
    assert course.proxy_figure(trials[-4:]) is None


def test_a_pause_is_a_gap_in_the_timeline() -> None:
    result = working_intervals(trial(0, [3.0, 2.5, 2.2]))
    # rung 0: 5 s of planning; rung 1: 5 s of workers; rung 2: 5 more, though the reports are 30 s apart
    assert result == [(995.0, 1000.0, 0), (1025.0, 1030.0, 8), (1055.0, 1060.0, 16)]
    assert working_intervals(TrialRecord("t", "gqa", 0.5, 1e-3, {}, rungs=[{"step": 0, "loss": 3.0}])) == []
    assert course.timeline_figure([trial(i, [3.0, 2.5]) for i in range(100)]) is not None


def test_time_is_reported_by_phase() -> None:
    result = seconds_by_phase(trial(0, [3.0, 2.5, 2.2], seconds={"evaluate": 2.0, "plan": 3.0, "odd": 1.0}))
    assert result == {"plan": 3.0, "evaluate": 2.0, "odd": 1.0, "train": 10.0}
    assert list(result)[:2] == ["plan", "evaluate"]
    assert "train" not in seconds_by_phase(trial(0, [3.0]))


@pytest.fixture
def folder(tmp_path: Path, demo_dir: Path) -> SearchFolder:
    created = SearchFolder.fresh(tmp_path, "mine")
    config = {
        "name": "mine",
        "model": {"path": str(demo_dir)},
        "search": {
            "kv_ratios": [0.5],
            "num_samples": 4,
            "search_space": {"grouping": ["exact"]},
            "recipes": ["headfold"],
        },
        "rungs": {"steps": [0, 8]},
    }
    created.snapshot.write_text(yaml.safe_dump(parse_config(config).model_dump(mode="json")))
    return created


@pytest.mark.parametrize("name", sorted(RECIPES))
def test_the_command_makes_the_same_candidate_again(name: str, folder: SearchFolder, demo_dir: Path) -> None:
    chosen = recipe(name)
    budget = 1.0 if name in ("directshare", "postshare") else 0.125 if name == "mqa" else 0.25
    record = trial(3, [3.0, 2.0], budget, choices=chosen.to_dict(), seed=7)
    record.recipe = f"joint-{chosen.digest[:6]}"
    command = command_of(record, str(folder.snapshot))
    assert command is not None
    program, verb, file, *overrides = shlex.split(command)
    assert (program, verb) == ("headfold", "search")
    config = read_search_config(file, overrides)
    geometry = geometry_of(AutoConfig.from_pretrained(demo_dir))
    (again,) = named_candidates(config, geometry)
    assert again.key == Candidate(chosen, budget, 1e-3, 7).key
    assert not config.promotion.enabled and config.search.num_samples == 0 and not config.rungs.stop


def test_a_plan_of_the_searchers_own_has_no_command(folder: SearchFolder) -> None:
    calibration = trial(1, [3.0], choices=recipe("asymgqa").to_dict(), calibration_loss=3.1)
    assert command_of(calibration, str(folder.snapshot)) is None


def test_the_page_reports_the_course_and_how_to_repeat(folder: SearchFolder) -> None:
    trials = [trial(i, [3.0 + i, 2.0 + i / 10], choices=recipe("gqa").to_dict(), seed=0) for i in range(6)]
    trials[0].rungs[-1]["weights_digest"] = "feedbeef"
    trials[0].plan_digest = "0123abcd"
    write_json(folder.original, {"loss": 1.9, "kv_bytes_per_token": 8192})
    write_journal(folder.root, trials)
    page = Path(write_report(folder.root)["report"]).read_text()
    for word in ("rho = +1.00", "When trials ran", "Time by phase", "feedbeef", "0123abcd", "headfold search"):
        assert word in page


@pytest.mark.slow
@pytest.mark.extended
def test_a_page_of_two_thousand_trials_stays_below_the_limit(folder: SearchFolder) -> None:
    choices = recipe("headfold").to_dict()
    trials = []
    for i in range(2000):
        losses = [7.0 - i / 1000, 3.0, 2.5 + (i * 7919 % 2000) / 1000][: 1 + i % 3]
        trials.append(trial(i, losses, 0.25 * (1 + i // 7 % 3), choices=choices))
    write_json(folder.original, {"loss": 1.9, "kv_bytes_per_token": 8192})
    write_journal(folder.root, trials)
    written = write_report(folder.root)
    assert written["bytes"] < 3_000_000
    assert "more are in journal.jsonl" in Path(written["report"]).read_text()
