"""`make gpu` without a GPU: its records, its page, and all of its parts in their smallest sizes."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from benchmarks.gpu import __main__ as command
from benchmarks.gpu.page import MEASURED, NOTHING, PAGE, TITLES, page
from benchmarks.records import Records, RecordsError

REPOSITORY = Path(__file__).resolve().parents[2]
CARD = {"device": "NVIDIA H100 80GB HBM3", "driver": "580.1"}
ROW = {"name": "a step", "value": 0.25, "unit": "s", "note": "2 layers | 3"}


def part(status: str = "done", reason: str = "", rows: Any = (ROW,)) -> Any:
    return {
        "status": status, "reason": reason, "seconds": 12.0, "date": "2027-01-01", "commit": "abc", "rows": list(rows)
    }  # fmt: skip


def test_the_page_is_that_of_the_records() -> None:
    records = Records.read(MEASURED) if MEASURED.exists() else None
    assert PAGE.read_text(encoding="utf-8") == page(records), "write it again: python -m benchmarks.gpu --page"


def test_without_records_the_page_says_that_nothing_was_measured() -> None:
    text = page(None)
    assert "Nothing has been measured on a GPU yet" in NOTHING and NOTHING in text
    assert "make gpu" in text and "| a step |" not in text


def test_the_page_names_the_card_and_what_is_missing_or_has_failed(tmp_path: Path) -> None:
    records = Records.open(tmp_path / "r.json", CARD)
    records.add("kernel", part())
    records.add("vllm", part("skipped", "vLLM is not installed", ()))
    records.add("offload", part("failed", "RuntimeError: no nvcc", ()))
    text = page(Records.read(tmp_path / "r.json"))
    assert "Measured on **NVIDIA H100 80GB HBM3** (driver 580.1): 1 of " in text
    assert "| a step | 0.25 | s | 2 layers / 3 |" in text
    assert "Skipped: vLLM is not installed" in text and "**Failed**: RuntimeError: no nvcc" in text
    assert text.count("Not measured yet.") == len(TITLES) - 3
    assert "Nothing has been measured" not in text


def test_records_of_another_card_are_not_mixed(tmp_path: Path) -> None:
    file = tmp_path / "r.json"
    Records.open(file, CARD).add("kernel", part())
    assert Records.open(file, CARD | {"driver": "581"}).is_done("kernel")
    with pytest.raises(RecordsError, match=r"NVIDIA H100 80GB HBM3.*NVIDIA A100.*RECORDS=FILE"):
        Records.open(file, CARD | {"device": "NVIDIA A100"})
    file.write_text("{}")
    with pytest.raises(RecordsError, match="no file of records"):
        Records.open(file, CARD)


@pytest.fixture
def children(monkeypatch: pytest.MonkeyPatch) -> list[tuple[str, float]]:
    """The requested parts, with the seconds given to each; "step" fails, "vllm" is skipped."""
    requested: list[tuple[str, float]] = []
    answers = {"--card": {"card": CARD}, "step": {"failed": "out of memory"}, "vllm": {"skipped": "not installed"}}

    def child(given: Any, name: str, seconds: float) -> Any:
        requested.append((name, seconds))
        return {"rows": [] if name in answers else [ROW]} | answers.get(name, {})

    monkeypatch.setattr(command, "child", child)
    return requested


def test_a_rerun_resumes_with_what_is_missing_or_has_failed(
    children: list[tuple[str, float]], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    words = ["--device", "cpu", "--records", str(tmp_path / "r.json")]
    assert command.main(words) == 1
    assert [name for name, _ in children] == ["--card", *TITLES]
    children.clear()
    assert command.main(words) == 1
    assert [name for name, _ in children] == ["--card", "step", "vllm"]
    children.clear()
    command.main([*words, "--only", "kernel", "--again", "kernel"])
    assert [name for name, _ in children] == ["--card", "kernel"]
    assert "out of memory" in capsys.readouterr().out


def test_it_ends_in_time_and_says_that_it_can_be_resumed(
    children: list[tuple[str, float]], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    clock = iter(range(0, 100_000, 100))
    monkeypatch.setattr(command, "time", SimpleNamespace(monotonic=lambda: float(next(clock))))
    words = ["--device", "cpu", "--records", str(tmp_path / "r.json"), "--minutes", "10"]
    assert command.main(words) == 3
    begun = [name for name, _ in children[1:]]
    assert begun == list(TITLES)[: len(begun)] and 0 < len(begun) < len(TITLES)
    assert all(seconds <= 600 for _, seconds in children[1:])


def test_what_is_ended_for_the_time_of_the_call_is_no_failure(
    children: list[tuple[str, float]], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    late = {"card": CARD, "rows": [ROW], "late": "it took more than 300 s"}
    monkeypatch.setattr(command, "child", lambda given, name, seconds: late)
    file = tmp_path / "r.json"
    assert command.main(["--device", "cpu", "--records", str(file), "--minutes", "5"]) == 3
    assert not file.exists()
    assert command.main(["--device", "cpu", "--records", str(file), "--only", "step"]) == 1
    assert json.loads(file.read_text())["parts"]["step"]["reason"] == "it took more than 300 s"


@pytest.mark.extended
@pytest.mark.timeout(1500)
@pytest.mark.parametrize("device", ["cpu", "fgpu"])
def test_make_gpu_to_its_end(device: str, tmp_path: Path) -> None:
    """All parts; llama.cpp stands for vLLM, which is not installed."""
    file = tmp_path / "r.json"
    command_line = [sys.executable, "-m", "benchmarks.gpu", "--device", device, "--records", str(file)]
    command_line += ["--engine", "llama.cpp"]
    done = subprocess.run(command_line, cwd=REPOSITORY, env=os.environ, capture_output=True, text=True, timeout=1400)
    parts = json.loads(file.read_text())["parts"]
    assert list(parts) == list(TITLES)
    assert {name: part["reason"] for name, part in parts.items() if part["status"] != "done"} == {}
    assert done.returncode == 0 and all(part["rows"] for part in parts.values())
    assert all(row["value"] == row["value"] for part in parts.values() for row in part["rows"])


@pytest.mark.extended
def test_a_part_that_does_not_end_is_ended(tmp_path: Path) -> None:
    arguments = command.parse(["--device", "cpu"])
    answer = command.child(arguments, "step", 1.0)
    assert answer["late"].startswith("it took more than 1 s")
