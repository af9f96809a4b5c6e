"""The Makefile's commands, and those who call them: hooks before a commit or a push, and continuous integration."""

from __future__ import annotations

import re
import subprocess
import tomllib
from pathlib import Path

import pytest
import yaml
from packaging.specifiers import SpecifierSet

REPOSITORY = Path(__file__).resolve().parents[2]
CALLERS = (".pre-commit-config.yaml", ".github/workflows/test.yml", ".ci/run")


def would_run(target: str, environment: Path) -> str:
    """Commands of make for a target whose virtual environment does not exist yet."""
    command = ["make", "--dry-run", "--no-print-directory", target, f"VENV={environment}"]
    return subprocess.run(command, cwd=REPOSITORY, capture_output=True, text=True, check=True).stdout


def installed(commands: str) -> set[str]:
    """The extras of all installations of Headfold among the commands."""
    return {extra for extras in re.findall(r"--editable '\.\[([\w,]+)\]'", commands) for extra in extras.split(",")}


@pytest.mark.parametrize(("target", "extras"), [("demo", {"demo"}), ("check", {"demo", "eval", "gpu", "dev"})])
def test_the_demo_installs_no_tools_of_the_tests(target: str, extras: set[str], tmp_path: Path) -> None:
    project = tomllib.loads((REPOSITORY / "pyproject.toml").read_text())["project"]
    assert extras <= set(project["optional-dependencies"])
    assert installed(would_run(target, tmp_path / "venv")) == extras


def test_an_environment_of_the_demo_gets_the_tools_and_is_not_made_again(tmp_path: Path) -> None:
    (tmp_path / ".installed").touch()
    commands = would_run("test", tmp_path)
    assert "-m venv" not in commands and "dev" in installed(commands)
    (tmp_path / ".installed-tools").touch()
    assert installed(would_run("test", tmp_path)) == set() == installed(would_run("demo", tmp_path))


def test_hooks_and_workflows_call_targets_that_there_are() -> None:
    targets = set(re.findall(r"^([a-z-]+):", (REPOSITORY / "Makefile").read_text(), re.MULTILINE))
    for name in CALLERS:
        called = set(re.findall(r"(?:entry: |run: |^)make ([a-z-]+)", (REPOSITORY / name).read_text(), re.MULTILINE))
        assert called and called <= targets, name
    workflow = yaml.safe_load((REPOSITORY / CALLERS[1]).read_text())
    assert [step["run"] for step in workflow["jobs"]["test"]["steps"] if "run" in step] == ["make test PYTHON=python"]


def test_the_workflow_names_exact_actions_and_pythons_that_are_allowed() -> None:
    """A tag of an action may be moved to other code, a commit not."""
    text = (REPOSITORY / CALLERS[1]).read_text()
    [job] = yaml.safe_load(text)["jobs"].values()
    uses = [step["uses"] for step in job["steps"] if "uses" in step]
    assert [action.partition("@")[0] for action in uses] == ["actions/checkout", "actions/setup-python"]
    assert len(re.findall(r"uses: [\w/-]+@[0-9a-f]{40}  # v\d+\.\d+\.\d+$", text, re.MULTILINE)) == len(uses)
    project = tomllib.loads((REPOSITORY / "pyproject.toml").read_text())["project"]
    named = {entry.rpartition(" ")[2] for entry in project["classifiers"] if re.search(r":: 3\.\d+$", entry)}
    assert set(job["strategy"]["matrix"]["python"]) == named
    assert all(version in SpecifierSet(project["requires-python"]) for version in named)


def test_continuous_integration_and_hooks_name_paths_that_there_are() -> None:
    workflows = (REPOSITORY / ".github" / "workflows").glob("*.yml")
    assert {str(path.relative_to(REPOSITORY)) for path in workflows} == {CALLERS[1]}, "and no other is tested here"
    for path in (REPOSITORY / ".github").rglob("*.yml"):
        for name in re.findall(r"\b[\w/]+\.(?:md|py|yaml|toml|sh)\b", path.read_text()):
            assert (REPOSITORY / name).exists(), (path.name, name)
