"""`make real`: its records, its page, and two of its parts in their smallest sizes."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from benchmarks.real import __main__ as command
from benchmarks.real.page import PAGE, RECORDS, TITLES, page
from benchmarks.real.workspace import CommandError, Workspace
from benchmarks.records import Records

REPOSITORY = Path(__file__).resolve().parents[2]


def records(tmp_path: Path, **parts: Any) -> Records:
    found = Records.open(tmp_path / "records.json", {"device": "2 CPU cores", "software": "torch 2"})
    for name, part in parts.items():
        found.add(name, {"seconds": 1.0, "date": "2027-01-01", "commit": "abc", "rows": [], "reason": ""} | part)
    return found


def test_the_page_is_that_of_the_records() -> None:
    assert PAGE.read_text(encoding="utf-8") == page(Records.read(RECORDS)), "write it again: make real ARGS=--page"


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
    assert "Skipped: no network (2027-01-01, commit abc.)" in text
    assert text.count("Not measured yet.") == len(TITLES) - 2
    assert "2 CPU cores** (software torch 2): 1 of 14 parts" in text


def test_a_command_that_has_ended_is_not_run_again(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from benchmarks.real import workspace

    script = "import sys, pathlib; pathlib.Path(sys.argv[-1]).write_text('{\"loss\": 2}'); print(sys.argv[1:])"
    monkeypatch.setattr(workspace, "_headfold", lambda: [sys.executable, "-c", script])
    work = Workspace(tmp_path)
    first = work.run("one", "inspect", "model")
    work.run("inspect", "inspect", "model")
    assert first["loss"] == 2 and first["wall_seconds"] > 0
    monkeypatch.setattr(workspace, "_headfold", lambda: [sys.executable, "-c", "raise SystemExit(3)"])
    assert work.run("one", "inspect", "model") == first
    with pytest.raises(CommandError, match=r"`headfold inspect model` ended with exit code 3"):
        work.run("two", "inspect", "model")
    (tmp_path / workspace.GGUF).touch()
    assert command.measure("inspect", work)["status"] == "done", "it has ended before"
    assert command.measure("gqa", work)["status"] == "failed"


@pytest.mark.extended
@pytest.mark.timeout(3000)
def test_the_public_model_is_converted_and_loads_in_llama_cpp(tmp_path: Path) -> None:
    """With little text and short fits; docs/real.md has the numbers of the whole run."""
    pytest.importorskip("xllamacpp", reason="llama.cpp is not installed: pip install 'xllamacpp>=2026.10'")
    words = ["--quick", "--folder", str(tmp_path)]
    script = [sys.executable, str(REPOSITORY / "examples" / "real" / "smollm2.py"), *words]
    done = subprocess.run(script, capture_output=True, text=True, timeout=2900)
    parts = Records.read(tmp_path / "records.json").parts
    if "cannot be downloaded" in parts["fetch"]["reason"]:
        pytest.skip(parts["fetch"]["reason"])
    assert done.returncode == 0, done.stderr
    assert {part["status"] for part in parts.values()} == {"done"}, done.stdout
    for ratio, used in (("0.67", 60 / 90), ("0.5", 45 / 90)):
        found = json.loads((tmp_path / f"kv-{ratio}.json").read_text())
        assert found["kv_ratio"] == pytest.approx(used)
        assert found["original_loss"] < found["loss"] < found["original_loss"] + 1
        assert json.loads((tmp_path / f"gguf-{ratio}.json").read_text())["check"]["passed"]
    again = command.main([*words, "--only", "fetch", "--only", "defaults"])  # all is done: nothing runs
    assert again == 0
