"""`make real`: its records, its page, and two of its parts in their smallest sizes."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from benchmarks.real import __main__ as command
from benchmarks.real import figure, parts, workspace
from benchmarks.real.page import CORE, GPU_RECORDS, PAGE, RECORDS, TITLES, page
from benchmarks.real.workspace import CommandError, Workspace
from benchmarks.records import Records, ended

REPOSITORY = Path(__file__).resolve().parents[2]


def records(tmp_path: Path, **parts: Any) -> Records:
    result = Records.open(tmp_path / "records.json", {"device": "2 CPU cores", "software": "torch 2"})
    for name, part in parts.items():
        result.add(name, {"seconds": 1.0, "date": "2027-01-01", "commit": "abc", "rows": [], "reason": ""} | part)
    return result


def test_the_page_is_that_of_the_records() -> None:
    text = page(Records.read(RECORDS), Records.read(GPU_RECORDS))
    assert PAGE.read_text(encoding="utf-8") == text, "write it again: make real ARGS=--page"


def test_the_page_compares_a_gpu_with_what_was_measured_without_one(tmp_path: Path) -> None:
    rows = [{"requested": ratio, "KV cache": "-", "increase": f"+{ratio}"} for ratio in ("67%", "34%")]
    here = records(tmp_path, gqa={"status": "done", "rows": rows, "seconds": 240.0})
    (tmp_path / "there").mkdir()
    there = records(
        tmp_path / "there",
        gqa={"status": "done", "rows": [{"requested": "34%", "KV cache": "33%", "increase": "+7"}], "seconds": 30.0},
        headfold_gqa={"status": "failed", "reason": "late"},
        search={"status": "done", "rows": [{"recipe": "align", "trained": "+0.5"}]},
    )
    there.card["device"] = "a GPU"
    section, _, apart = page(here, there).partition("## On a GPU")[2].partition("###")
    assert "A search with a short distillation on a GPU" in apart and "| align | +0.5 |" in apart
    assert "on **a GPU** (software torch 2)" in section
    assert "| `gqa`) | 33% | +7 | +34% | 30 s | 4 min |" in section.replace("Means of neighbours (", "")
    assert section.count("\n|") == 3, "what failed there is no row"


def test_every_part_has_a_title() -> None:
    from benchmarks.real.parts import PARTS

    assert list(PARTS) == list(TITLES)


def test_the_page_has_a_table_of_what_is_done_and_says_what_is_not(tmp_path: Path) -> None:
    row = {"recipe": "gqa", "increase": "+1.000 ± 0.100"}
    text = page(
        records(
            tmp_path,
            gqa={"status": "done", "rows": [row, row | {"KL": "1.2"}]},
            search={"status": "skipped", "reason": "no network"},
        )
    )
    assert "| recipe | increase |\n|---|---|\n| gqa | +1.000 ± 0.100 |" in text
    assert "Skipped: no network (2027-01-01, commit abc, 1 s.)" in text
    assert text.count("Not measured yet.") == len(TITLES) - 2
    assert f"2 CPU cores** (software torch 2): 1 of {len(TITLES)} parts" in text


def test_a_command_that_has_ended_is_not_run_again(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    script = "import sys, pathlib; pathlib.Path(sys.argv[-1]).write_text('{\"loss\": 2}'); print(sys.argv[1:])"
    monkeypatch.setattr(workspace, "_headfold", lambda: [sys.executable, "-c", script])
    work = Workspace(tmp_path)
    first = work.run("one", "inspect", "model")
    work.run("inspect", "inspect", "model")
    assert first["loss"] == 2 and first["wall_seconds"] > 0
    monkeypatch.setattr(workspace, "_headfold", lambda: [sys.executable, "-c", "raise SystemExit(3)"])
    assert work.run("one", "inspect", "model") == first
    with pytest.raises(CommandError, match=r"`headfold inspect other` exited with code 3"):
        work.run("one", "inspect", "other")
    with pytest.raises(CommandError, match=r"`headfold inspect model` exited with code 3"):
        work.run("two", "inspect", "model")
    (tmp_path / workspace.GGUF).touch()
    (tmp_path / "inspect.json").unlink()
    monkeypatch.setattr(
        workspace, "_headfold", lambda: [sys.executable, "-c", f"import time; time.sleep(0.2); {script}"]
    )
    first = command.measure("inspect", work)
    monkeypatch.setattr(workspace, "_headfold", lambda: [sys.executable, "-c", "raise SystemExit(3)"])
    assert command.measure("inspect", work) == first, "the time is that of its command, which is not run again"
    assert first["status"] == "done" and first["seconds"] > 0.2
    assert command.measure("gqa", work)["status"] == "failed"


def test_a_command_is_run_again_when_what_it_reads_was_written_later(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    script = "import sys, pathlib; pathlib.Path(sys.argv[-1]).write_text('{\"loss\": 2}')"
    monkeypatch.setattr(workspace, "_headfold", lambda: [sys.executable, "-c", script])
    work = Workspace(tmp_path, part="formats")
    (tmp_path / "model").mkdir()
    config = tmp_path / "model" / "config.json"
    config.touch()
    work.run("one", "evaluate", "model")
    assert work.has_finished("one", "evaluate", "model") and not work.has_finished("one", "evaluate", "other")
    later = (tmp_path / "one.json").stat().st_mtime + 10
    os.utime(config, (later, later))
    assert not work.has_finished("one", "evaluate", "model")
    replace(work, part="gqa").forget()
    assert (tmp_path / "one.json").is_file(), "another part has run it"
    work.forget()
    assert not (tmp_path / "one.json").is_file()
    for search in ("search", "promotion"):
        (tmp_path / "search" / search).mkdir(parents=True)
    replace(work, part="search").forget()
    left = [folder.name for folder in (tmp_path / "search").iterdir()]
    assert left == ["promotion"], "an unfinished search of the part would be continued"


def test_a_search_that_failed_is_continued_and_its_time_is_of_all_runs(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    script = "import sys, time, pathlib; pathlib.Path(sys.argv[-1]).write_text('{}'); time.sleep(0.2); sys.exit(%d)"
    monkeypatch.setattr(workspace, "_headfold", lambda: [sys.executable, "-c", script % 1])
    work = Workspace(tmp_path)
    with pytest.raises(CommandError, match="exited with code 1"):
        work.run("search", "search", "file.yaml")
    assert work.run("export", "export", "model", "--check")["wall_seconds"] > 0, "a failed check has its result"
    monkeypatch.setattr(workspace, "_headfold", lambda: [sys.executable, "-c", script % 0])
    assert work.run("search", "search", "file.yaml", "--resume")["wall_seconds"] > 0.4


def test_a_trial_without_a_result_has_a_row() -> None:
    failed = {"label": "align", "kv_ratio": 0.5, "actual_kv_ratio": None, "learning_rate": 1e-4}
    rows = list(parts._trials({"trials": [failed | {"rungs": [], "status": "failed"}]}))
    assert [(row["recipe"], row["trained"], row["status"]) for row in rows] == [("align", "", "failed")]


def test_the_picture_has_each_model_and_format_once(tmp_path: Path) -> None:
    row = {"recipe": "headfold_wide", "KV cache": "66.7%", "increase": "+0.082 ± 0.010"}
    formats = [
        {"model": "original", "cache": "q8_0", "engine bytes": "53.1%", "increase": "+0.000 ± 0.001"},
        {"model": "headfold_wide 67%", "cache": "f16", "engine bytes": "66.7%", "increase": "+0.082 ± 0.010"},
        {"model": "headfold_wide 67%", "cache": "q4_0", "engine bytes": "18.8%", "increase": "+0.169 ± 0.010"},
        {"model": "gqa 67%", "cache": "q4_0", "engine bytes": "18.8%", "increase": "+3.4 ± 0.1"},
    ]
    result = records(
        tmp_path,
        gqa={"status": "done", "rows": [row | {"recipe": "gqa", "increase": "+3.395 ± 0.102"}]},
        headfold_wide={"status": "done", "rows": [row]},
        generations={"status": "done", "rows": [{"question": "?", "model": "original", "answer": "!"}]},
    )
    before = figure.points(result)
    assert [(p.series, p.share, p.increase) for p in before] == [
        (figure.PUBLISHED, 0.667, 3.395),
        (figure.FEWER_HEADS, 0.667, 0.082),
    ]
    result.add("formats", result.parts["gqa"] | {"rows": formats})
    after = figure.points(result)
    assert after[:2] == before
    assert [(p.series, p.share, p.increase) for p in after[2:]] == [
        (figure.ORIGINAL, 0.531, 0.0),
        (figure.BOTH, 0.188, 0.169),
    ]
    searched = [
        {"recipe": "align", "KV cache": "33.3%", "untrained": "+4.054", "trained": "+3.313", "status": "done"},
        {"recipe": "gqa", "KV cache": "33.3%", "untrained": "+7.6", "trained": "+5.1", "status": "done"},
        {"recipe": "asymgqa", "KV cache": "33.3%", "untrained": "+7.6", "trained": "+5.1", "status": "copy"},
    ]
    result.add("search", result.parts["gqa"] | {"rows": searched})
    (point,) = set(figure.points(result)) - set(after)
    assert point == (figure.PUBLISHED, "align", pytest.approx(0.333), 4.054)
    axes = figure.draw(after).axes[0]
    drawn = sorted((line.get_xdata()[0], line.get_ydata()[0]) for line in axes.lines)
    assert drawn == [(0.188, 0.169), (0.531, figure.LEAST), (0.667, 0.082), (0.667, 3.395)]


def test_an_answer_ends_where_the_model_ends_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    answers = {"generations": [{"texts": {"checkpoint": "a | b<|im_end|>\n<|im_start|>", "original": "x\ny"}}]}
    monkeypatch.setattr(parts, "chosen", lambda work: {"headfold_wide": "folder"})
    monkeypatch.setattr(Workspace, "run", lambda self, name, *words: answers)
    rows = list(parts.generations(Workspace(tmp_path)))
    assert [(row["model"], row["answer"]) for row in rows] == [("headfold_wide", "a \\| b"), ("original", "x y")]


def test_a_fresh_folder_is_measured_whatever_the_page_has(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    part = {"status": "done", "seconds": 1.0, "date": "2027-01-01", "commit": "abc", "rows": [], "reason": ""}
    page_file = tmp_path / "page.json"
    started: list[str] = []
    forgotten: list[str] = []

    def measure(name: str, work: Workspace) -> Any:
        started.append(name)
        status = {"vLLM": "skipped", "gqa": "failed" if forgotten else "done"}.get(name, "done")
        return part | {"rows": [{"n": len(started)}], "status": status, "reason": "disk" if forgotten else ""}

    monkeypatch.setattr(command, "measure", measure)
    monkeypatch.setattr(command, "versions", lambda: "torch 2")
    monkeypatch.setattr("torch.cuda.is_available", lambda: False)
    monkeypatch.setattr(Workspace, "forget", lambda work: forgotten.append(work.part))
    shared = Records.open(page_file, {"device": f"{os.cpu_count()} CPU cores", "software": "torch 2"})
    for name in ("gqa", "vLLM"):
        shared.add(name, part)
    words = ["--records", str(page_file), "--folder", str(tmp_path / "real")]
    assert command.main(words) == 0 and started == list(CORE)
    assert command.main([*words, "--only", "vLLM"]) == 0 and started[-1] == "vLLM"
    assert command.main([*words, "--only", "gqa"]) == 0 and started[-1] == "vLLM", "the folder has it"
    parts = Records.read(page_file).parts
    assert parts["gqa"]["rows"] == [{"n": 1 + CORE.index("gqa")}] and parts["vLLM"]["rows"] == []
    assert command.main([*words, "--again", "gqa"]) == 1
    assert (started[-1], forgotten) == ("gqa", ["gqa"])
    again = Records.read(page_file).parts["gqa"]
    assert again["rows"] == parts["gqa"]["rows"], "what was measured stays"
    assert "**Failed** when it was measured again: 2027-01-01, commit abc: disk" in ended(again, "when.")


@pytest.mark.extended
@pytest.mark.timeout(3000)
def test_the_public_model_is_converted_and_loads_in_llama_cpp(tmp_path: Path) -> None:
    """With little text and short fits; docs/real.md has the numbers of the whole run."""
    pytest.importorskip("xllamacpp", reason="llama.cpp is not installed: pip install 'xllamacpp>=2026.10'")
    words = ["--quick", "--folder", str(tmp_path)]
    script = [sys.executable, str(REPOSITORY / "examples" / "real" / "smollm2.py"), *words]
    done = subprocess.run(script, capture_output=True, text=True, timeout=2900)
    recorded = Records.read(tmp_path / "records.json").parts
    if "cannot be downloaded" in recorded["fetch"]["reason"]:
        pytest.skip(recorded["fetch"]["reason"])
    assert done.returncode == 0, done.stderr
    assert {part["status"] for part in recorded.values()} == {"done"}, done.stdout
    for ratio, used in (("0.67", 60 / 90), ("0.5", 45 / 90)):
        result = json.loads((tmp_path / f"kv-{ratio}.json").read_text())
        assert result["kv_ratio"] == pytest.approx(used)
        assert result["original_loss"] < result["loss"] < result["original_loss"] + 1
        assert json.loads((tmp_path / f"gguf-{ratio}.json").read_text())["check"]["passed"]
    again = command.main([*words, "--only", "fetch", "--only", "defaults"])  # all is done: nothing runs
    assert again == 0
