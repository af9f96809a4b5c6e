"""Without optional packages: commands that do not need them work, and those that do name the package."""

from __future__ import annotations

import json
import re
import subprocess
import sys
import tomllib
import venv
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from bad_input_folder import make_folder
from clean_environment import CleanEnvironment, build_wheel
from command_line import run_here
from command_process import CommandProcess, commands
from hidden_packages import hide
from journals import write_journal

REPOSITORY = Path(__file__).resolve().parents[3]
LEFT_OUT = ("ray", "deepspeed", "mlflow", "optuna", "peft")


def names(lines: list[str]) -> dict[str, str]:
    return {re.split(r"[^\w.-]", line, maxsplit=1)[0]: line for line in lines}


def test_requirements_of_convert_are_those_of_the_project_less_five() -> None:
    lines = (REPOSITORY / "requirements" / "convert.txt").read_text().splitlines()
    listed = names([line for line in lines if line and not line.startswith("#")])
    project = names(tomllib.loads((REPOSITORY / "pyproject.toml").read_text())["project"]["dependencies"])
    assert listed == {name: line for name, line in project.items() if name not in LEFT_OUT}
    assert set(project) - set(listed) == set(LEFT_OUT)


@pytest.fixture(scope="module")
def without() -> Iterator[CommandProcess]:
    """The command in a process that has none of the five packages."""
    with commands({"COLUMNS": "200"}, hidden=LEFT_OUT) as run:
        yield run


def work_through(run: Any, folder: Path, model: Path, sizes: Sequence[str | Path]) -> None:
    """Convert, evaluate, inspect, export, estimate and list recipes: each must end with 0."""
    half = ["--model", model, "--recipe", "gqa", "--kv-ratio", "0.5"]
    page = ["--compare", "none", "--kv-ratio", "0.5", "--out", folder / "page.html", "--cache", folder / "cache"]
    result = ["--speed-tokens", "4", "--json", folder / "evaluated.json"]
    for command in (
        ["recipes", model],
        ["estimate", *half],
        ["convert", *half, "--out", folder / "half", "--calibration-tokens", "256", *sizes],
        ["evaluate", folder / "half", "--original", model, *result, *sizes],
        ["inspect", model, *page, "--calibration-tokens", "256", *sizes],
        ["export", folder / "half", "--target", "gqa", "--out", folder / "stock"],
    ):
        done = run(*command)
        assert done.returncode == 0, f"{command}: {done.stdout}{done.stderr}"
    assert json.loads((folder / "evaluated.json").read_text())["kv_ratio"] == 0.5
    assert (folder / "stock" / "config.json").is_file() and (folder / "page.html").stat().st_size > 10_000


def test_conversion_evaluation_and_export_need_none_of_them(
    without: CommandProcess, tmp_path: Path, tiny_model: Any
) -> None:
    inputs = tmp_path / "inputs"
    inputs.mkdir()
    make_folder(inputs, inputs, tiny_model)
    text = inputs / "texts" / "notes.txt"
    sizes = ["--eval-tokens", "64", "--sequence-length", "32", "--data", text]
    work_through(without, tmp_path, inputs / "model", sizes)


TRAINING = "--steps 1 --learning-rate 1e-3 --out trained"


@pytest.mark.parametrize(
    ("command", "package"),
    [
        ("search configs/demo.yaml --dry-run", "ray"),
        ("demo", "ray"),
        (f"train --architecture DEMO {TRAINING}", "ray"),
        (f"finetune --model DEMO {TRAINING}", "ray"),
        ("promote SEARCH", "ray"),
        ("ui SEARCH", "mlflow"),
        ("convert --model DEMO --recipe dha --kv-ratio 0.5", "deepspeed"),
    ],
)
def test_a_verb_that_needs_one_names_it(
    command: str, package: str, without: CommandProcess, tmp_path: Path, demo_dir: Path
) -> None:
    write_journal(tmp_path, [])
    (tmp_path / "search.yaml").write_text("name: demo\n")
    known = {"DEMO": str(demo_dir), "SEARCH": str(tmp_path)}
    done = without(*(known.get(word, word) for word in command.split()))
    assert done.returncode == 2, done.stderr
    last = done.stderr.splitlines()[-1]
    assert f"headfold: {command.split()[0]} needs the package {package}, which is not installed" in last
    install = last.partition("pip install ")[2]
    assert all(re.search(rf"\b{name}\b", install) for name in LEFT_OUT) and "torch" not in install
    assert "Traceback" not in done.stderr


def test_the_folder_of_the_demo_checkpoint_needs_none(without: CommandProcess) -> None:
    assert without("demo", "--path").returncode == 0


def test_adapters_are_missed_before_anything_starts(
    tmp_path: Path, demo_dir: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    for name in [name for name in sys.modules if name.partition(".")[0] == "peft"]:
        monkeypatch.delitem(sys.modules, name)
    monkeypatch.setattr(sys, "meta_path", [*sys.meta_path])
    hide(("peft",))
    tuned = ["--tuning", "lora", *TRAINING.split()[:-1], tmp_path / "trained"]
    assert run_here("finetune", "--model", demo_dir, *tuned) == 2
    assert "finetune needs the package peft" in capfd.readouterr().err


@pytest.mark.slow
@pytest.mark.extended
def test_an_environment_of_the_requirements_is_enough(tmp_path: Path, demo_dir: Path, little_text: str) -> None:
    """Only requirements/convert.txt and the wheel, with the torch of this environment's version."""
    clean = CleanEnvironment(tmp_path / "venv")
    venv.create(clean.folder, with_pip=True)
    pip = [clean.bin / "python", "-m", "pip", "install", "--quiet", "--disable-pip-version-check"]
    for packages in (
        [f"torch=={torch.__version__.partition('+')[0]}"],
        ["-r", REPOSITORY / "requirements" / "convert.txt"],
        ["--no-deps", build_wheel(tmp_path)],
    ):
        subprocess.run([*pip, *packages], check=True, timeout=1800, cwd=tmp_path)
    listed = subprocess.run([clean.bin / "python", "-m", "pip", "list"], capture_output=True, text=True, check=True)
    installed = {line.split()[0] for line in listed.stdout.splitlines()[2:]}
    assert "headfold" in installed and not installed & set(LEFT_OUT)

    def run(*arguments: Any) -> subprocess.CompletedProcess[str]:
        return clean.run("headfold", *arguments, cwd=tmp_path)

    work_through(run, tmp_path, demo_dir, ["--eval-tokens", "1024", "--sequence-length", "128", "--data", little_text])
    refused = run("search", REPOSITORY / "configs" / "demo.yaml", "--dry-run")
    assert refused.returncode == 2 and "search needs the package ray" in refused.stderr
