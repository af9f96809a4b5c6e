"""The report: one page that stands alone."""

from __future__ import annotations

import re
from html.parser import HTMLParser
from pathlib import Path
from typing import Any

import pytest
from journals import write_journal

from attention.plan import AttentionPlan
from orchestrator.config.schema import ConfigError
from orchestrator.reporting.pages.report_page import write_report
from orchestrator.storage import records
from orchestrator.storage.json_files import write_json
from orchestrator.storage.paths import SearchFolder
from orchestrator.storage.records import TrialRecord

BASE: dict[str, Any] = {"loss": 2.2, "kv_bytes_per_token": 8192, "digests": {"weights": "abc123"}}


def record(number: int, recipe: str, budget: float, losses: list[float], **more: Any) -> TrialRecord:
    rungs = [{"step": 8 * i, "loss": loss, "kl": loss - 2} for i, loss in enumerate(losses)]
    settings = {"status": records.DONE, "rungs": rungs, "kv_bytes_per_token": int(8192 * budget)}
    return TrialRecord(f"t{number}", recipe, budget, 1e-3, {}, **{**settings, **more})


@pytest.fixture
def folder(tmp_path: Path) -> SearchFolder:
    result = SearchFolder.fresh(tmp_path, "demo")
    write_journal(result.root)
    result.snapshot.write_text("name: demo\n# <script>alert(1)</script>\n")
    return result


def fill(folder: SearchFolder, trials: list[TrialRecord]) -> None:
    write_json(folder.original, BASE)
    write_json(folder.versions, {"torch": "2.13"})
    write_json(folder.state, {"command": "headfold search x.yaml", "parent_run": "r1", "seconds": 75})
    write_journal(folder.root, trials)
    for trial in trials:
        folder.trial(trial.trial_id).mkdir(parents=True)
        (folder.trial(trial.trial_id) / "plan.json").write_text(AttentionPlan.identity(4, 8, 32).to_json())


class Balanced(HTMLParser):
    """Fails on a tag that is closed without having been opened."""

    EMPTY = frozenset({"meta", "br", "path", "use", "rect", "image"})

    def __init__(self) -> None:
        super().__init__()
        self.open: list[str] = []
        self.text: list[str] = []

    def handle_starttag(self, tag: str, attrs: Any) -> None:
        if tag not in self.EMPTY:
            self.open.append(tag)

    def handle_endtag(self, tag: str) -> None:
        if tag not in self.EMPTY:
            assert self.open and self.open.pop() == tag, f"</{tag}> closes nothing"

    def handle_data(self, data: str) -> None:
        self.text.append(data)


def test_the_page_reports_front_trials_promotion_and_how_it_was_made(folder: SearchFolder) -> None:
    fill(
        folder,
        [
            record(1, "headfold", 0.25, [2.8, 2.4]),
            record(2, "gqa", 0.25, [7.5, 4.1]),
            record(3, "align", 0.5, [], status=records.FAILED, error="ValueError: <b>bad</b>"),
        ],
    )
    write_json(
        folder.promotion,
        {
            "candidates": {
                "t1": {
                    "trial_id": "t1",
                    "recipe": "headfold",
                    "kv_ratio": 0.25,
                    "steps": 64,
                    "loss": 2.3,
                    "baseline_loss": 3.9,
                    "status": "promoted",
                    "version": "1",
                    "folder": "/runs/x",
                    "kv_bytes_per_token": 2048,
                }
            }
        },
    )
    written = write_report(folder.root)
    page = Path(written["report"]).read_text()
    parser = Balanced()
    parser.feed(page)
    assert parser.open == []
    text = " ".join(parser.text)
    for word in (
        "headfold",
        "7.500",
        "4.100",
        "+0.200",
        "promoted",
        "3.900",
        "headfold search x.yaml",
        "abc123",
        "2.13",
    ):
        assert word in text
    assert "<b>bad</b>" not in page
    assert page.count("<script") == page.count("<script>") == 1 and "alert(1)</script>" not in page
    assert written["bytes"] < 3_000_000


def test_several_seeds_are_compared_with_their_spread(folder: SearchFolder) -> None:
    trials = [record(10 + s, "dha", 0.25, [2.8, 2.4 + 0.1 * s], seed=s) for s in range(3)]
    trials += [record(20 + s, "gqa", 0.25, [7.5, 4.1 + 0.2 * s], seed=s) for s in range(2)]
    trials.append(record(22, "gqa", 0.25, [7.5], seed=2, status=records.FAILED, error="diverged: not finite"))
    fill(folder, trials)
    written = write_report(folder.root)
    page = Path(written["report"]).read_text()
    assert "<h3>Comparison</h3>" in page
    assert "2.500 ± 0.100" in page
    assert "3 (1 diverged)" in page
    assert [row["recipe"] for row in written["comparison"]] == ["dha", "gqa"]


def test_one_seed_needs_no_comparison(folder: SearchFolder) -> None:
    fill(folder, [record(1, "headfold", 0.25, [2.8, 2.4], seed=0), record(2, "gqa", 0.25, [7.5, 4.1], seed=0)])
    assert "Comparison" not in Path(write_report(folder.root)["report"]).read_text()


def test_probes_are_counted_and_not_compared(folder: SearchFolder) -> None:
    trials = [record(10 + s, "asymgqa", 0.25, [2.8, 2.4], seed=s) for s in range(2)]
    trials += [record(30 + s, "asymgqa", 0.25, [2.7], seed=s, probe=True) for s in range(2)]
    fill(folder, trials)
    written = write_report(folder.root)
    assert "2 probes of the searcher" in Path(written["report"]).read_text()
    assert written["comparison"][0]["trials"] == 2


def test_the_page_needs_nothing_from_elsewhere(folder: SearchFolder) -> None:
    fill(folder, [record(1, "headfold", 0.25, [2.8, 2.4]), record(2, "gqa", 0.25, [7.5])])
    page = Path(write_report(folder.root)["report"]).read_text()
    assert not re.findall(r'(?:src|href)\s*=\s*"(?!#|data:)[^"]*"', page)
    assert "@import" not in page
    assert page.count("<svg") == 4  # the front for a wide and for a narrow page


@pytest.mark.extended
def test_many_trials_stay_below_the_limit(folder: SearchFolder) -> None:
    trials = [record(i, f"joint-{i:06}", 0.25 * (1 + i % 3), [7.0 - i / 100, 3.0, 2.5]) for i in range(400)]
    fill(folder, trials)
    assert write_report(folder.root)["bytes"] < 3_000_000


def test_a_search_without_a_result_has_a_page_too(folder: SearchFolder, tmp_path: Path) -> None:
    out = tmp_path / "deep" / "page.html"
    assert write_report(folder.root, out)["report"] == str(out)
    assert "No trial has reported yet" in out.read_text()


def test_a_folder_that_is_no_search_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="not the folder of a search"):
        write_report(tmp_path)
