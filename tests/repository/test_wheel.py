"""What a stranger installs: the wheel, far from the checkout, with all that comes along."""

from __future__ import annotations

import subprocess
import tomllib
import zipfile
from pathlib import Path

import pytest
from clean_environment import CleanEnvironment, build_wheel
from command_line import run_here

from orchestrator.storage.shipped import shipped

REPOSITORY = Path(__file__).resolve().parents[2]
PACKAGES = ("headfold", "attention", "search_spaces", "trainers", "orchestrator")
LITTLE = [
    "search.recipes=[gqa,align]", "search.num_samples=0", "search.kv_ratios=[0.5]", "rungs.steps=[0,2,4]",
    "promotion.steps=2", "data.train.tokens=20000", "data.calibration.tokens=2048", "data.eval.tokens=2048",
]  # fmt: skip


def test_version_is_that_of_the_project(capsys: pytest.CaptureFixture[str]) -> None:
    assert run_here("--version") == 0
    project = tomllib.loads((REPOSITORY / "pyproject.toml").read_text())["project"]
    assert capsys.readouterr().out == f"headfold {project['version']}\n"


def test_completion_knows_the_verbs(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    for name, value in {"_HEADFOLD_COMPLETE": "complete_bash", "COMP_WORDS": "headfold ex", "COMP_CWORD": "1"}.items():
        monkeypatch.setenv(name, value)
    assert run_here() == 0
    assert capsys.readouterr().out.split() == ["export"]


def test_what_comes_along_is_found_and_the_rest_is_told() -> None:
    assert shipped("configs/demo.yaml") == REPOSITORY / "configs" / "demo.yaml"
    with pytest.raises(FileNotFoundError, match=r"lacks configs/none\.yaml; reinstall it"):
        shipped("configs/none.yaml")


@pytest.mark.extended
def test_the_wheel_holds_every_file_of_the_packages(tmp_path: Path) -> None:
    wheel = build_wheel(tmp_path)
    inside = set(zipfile.ZipFile(wheel).namelist())
    listed = subprocess.run(["git", "ls-files", *PACKAGES], cwd=REPOSITORY, capture_output=True, text=True, check=True)
    of_users = {name for name in listed.stdout.split() if not name.endswith("/ruff.toml")}
    assert of_users - inside == set()
    assert any(name.endswith("licenses/LICENSE") for name in inside)
    assert not any(name.startswith(("tests/", "benchmarks/", "configs/")) for name in inside)
    assert wheel.stat().st_size < 10e6


@pytest.mark.extended
def test_the_demo_runs_from_the_wheel(tmp_path: Path) -> None:
    stranger = CleanEnvironment.make(tmp_path)
    where = stranger.run("python", "-c", "import orchestrator; print(orchestrator.__file__)", cwd=tmp_path).stdout
    assert Path(where).is_relative_to(stranger.folder)
    done = stranger.run("headfold", "demo", *LITTLE, cwd=tmp_path)
    assert done.returncode == 0, done.stdout + done.stderr
    assert "LlamaForCausalLM, Headfold not importable" in done.stdout
    assert "llama.cpp" in done.stdout and "demo: exported checkpoint  " in done.stdout
    assert {"demo", "gguf", "mlflow.db", "outcome.json"} <= {path.name for path in (tmp_path / "runs/demo").iterdir()}
