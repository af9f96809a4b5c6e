"""Violations of the import rule between the packages are found; `make lint` checks that there are none."""

from __future__ import annotations

import shutil
import subprocess
import sys
from pathlib import Path

REPOSITORY = Path(__file__).resolve().parents[2]
PACKAGES = ["headfold", "attention", "search_spaces", "trainers", "orchestrator"]

# What is written into which new module of a copy of the project, and the contract that must name it.
VIOLATIONS = {
    "orchestrator imports headfold": ("orchestrator", "import headfold", "orchestrator._violation -> headfold"),
    "attention imports trainers": ("attention", "import trainers", "attention._violation -> trainers"),
    "search_spaces imports trainers": ("search_spaces", "import trainers", "search_spaces._violation -> trainers"),
    "trainers imports orchestrator": ("trainers", "import orchestrator", "trainers._violation -> orchestrator"),
    "deepspeed outside the engine": ("trainers", "import deepspeed", "trainers._violation -> deepspeed"),
    "ray in search_spaces": ("search_spaces", "import ray", "search_spaces._violation -> ray"),
    "mlflow outside tracking": ("orchestrator", "import mlflow", "orchestrator._violation -> mlflow"),
    "peft outside the adapters": ("trainers", "import peft", "trainers._violation -> peft"),
    "triton outside the kernel": ("attention", "import triton", "attention._violation -> triton"),
    "optuna outside the searcher": ("orchestrator", "import optuna", "orchestrator._violation -> optuna"),
}


def _copy(target: Path) -> None:
    shutil.copy(REPOSITORY / "pyproject.toml", target)
    for package in PACKAGES:
        shutil.copytree(REPOSITORY / package, target / package, ignore=shutil.ignore_patterns("__pycache__"))


def _lint(folder: Path) -> subprocess.CompletedProcess[str]:
    # Run in the copy: the current folder comes first on the path, before the installed project.
    command = [
        str(Path(sys.executable).parent / "lint-imports"),
        "--no-cache",
    ]
    return subprocess.run(command, cwd=folder, capture_output=True, text=True)


def test_every_violation_is_found(tmp_path: Path) -> None:
    """All of them in one copy: building the graph of imports is what takes the time."""
    _copy(tmp_path)
    for package, line, _ in VIOLATIONS.values():
        with (tmp_path / package / "_violation.py").open("a") as file:
            file.write(f"{line}\n")
    done = _lint(tmp_path)
    assert done.returncode == 1, done.stdout + done.stderr
    assert [what for what, (*_, named) in VIOLATIONS.items() if named not in done.stdout] == []
