"""`convert` checks once, estimates once, and does what its estimate says."""

from __future__ import annotations

from collections import Counter
from pathlib import Path
from typing import Any

import pytest
from command_line import run_here

from attention.io import checkpoint
from orchestrator.config.options import ConvertOptions
from orchestrator.conversion.request import ConversionRequest
from orchestrator.resources import estimate
from orchestrator.tasks import convert
from orchestrator.tasks.convert import Convert

SIZES = ["--calibration-tokens", "512", "--eval-tokens", "512", "--sequence-length", "64", "--device", "cpu"]


@pytest.fixture
def calls(monkeypatch: pytest.MonkeyPatch, demo_dir: Path) -> Counter[str]:
    """Number of calls of functions that should run once."""
    counted: Counter[str] = Counter()

    def counting(name: str, function: Any) -> Any:
        def called(*arguments: Any, **more: Any) -> Any:
            counted[name] += 1
            return function(*arguments, **more)

        return called

    read = checkpoint.load_config

    def reading(source: str | Path, **more: Any) -> Any:
        counted["config.json"] += Path(source) == demo_dir
        return read(source, **more)

    monkeypatch.setattr(checkpoint, "load_config", reading)
    monkeypatch.setattr(ConversionRequest, "check", counting("check", ConversionRequest.check))
    monkeypatch.setattr(convert, "estimate_conversions", counting("estimate", convert.estimate_conversions))
    return counted


@pytest.mark.parametrize(
    "arguments",
    [
        ["--kv-ratio", "0.5", "--dry-run"],
        ["--kv-ratio", "0.5"],
        ["--kv-ratio", "0.5", "--out", "OUT"],
        ["--kv-ratio", "0.5", "--out", "OUT", "--layerwise"],
        ["--kv-bytes", "0.5,0.25", "--out", "OUT"],
    ],
    ids=" ".join,
)
def test_a_conversion_is_checked_and_estimated_once(
    arguments: list[str], calls: Counter[str], demo_dir: Path, tmp_path: Path, little_text: str
) -> None:
    command = ["convert", "--model", str(demo_dir), "--recipe", "gqa", "--data", little_text, *SIZES, *arguments]
    assert run_here(*[str(tmp_path / "out") if part == "OUT" else part for part in command]) == 0
    assert calls == {"config.json": 1, "check": 1, "estimate": 1}


def test_what_is_printed_is_what_is_done_where_the_system_does_not_report_its_memory(
    demo_dir: Path, tmp_path: Path, little_text: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(estimate, "available_bytes", lambda device=None: 0)
    sizes: dict[str, Any] = {"calibration_tokens": 512, "eval_tokens": 512, "sequence_length": 64, "device": "cpu"}
    task = Convert(
        ConvertOptions(
            model=demo_dir, recipe="gqa", kv_ratio=0.5, out=tmp_path / "out", calibration_data=little_text, **sizes
        )
    )
    assert not task.estimate.layerwise
    assert task.estimate.total.memory == task.estimate.points[0].resident
    assert "layerwise" not in task.run()


def test_a_dry_run_refuses_what_does_not_fit(
    demo_dir: Path, little_text: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(estimate, "available_bytes", lambda device=None: 2**20)
    command = ["convert", "--model", str(demo_dir), "--recipe", "gqa", "--data", little_text, *SIZES]
    for budget in (["--kv-ratio", "0.5,0.25"], ["--kv-bytes", "0.25", "--for", "llama.cpp"]):
        assert run_here(*command, *budget, "--dry-run") == 2
        assert "memory: this conversion does not fit" in capsys.readouterr().err


def test_numbers_lists_and_text_are_the_same_budget(demo_dir: Path) -> None:
    def ratios(**budget: Any) -> tuple[float, ...]:
        options = ConvertOptions(model=demo_dir, recipe="gqa", **budget)
        return Convert(options, config_only=True).request.kv_ratios

    assert ratios(kv_ratio=0.5) == ratios(kv_ratio="50%") == ratios(kv_heads=4) == ratios(kv_bytes="0.5") == (0.5,)
    assert ratios(kv_ratio=[0.5, 0.25]) == ratios(kv_ratio="0.5,0.25") == ratios(kv_heads=[4, 2]) == (0.5, 0.25)
