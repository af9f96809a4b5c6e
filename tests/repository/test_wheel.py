"""The installed wheel, far from the checkout, with all bundled files."""

from __future__ import annotations

import email
import re
import subprocess
import tarfile
import tomllib
import venv
import zipfile
from pathlib import Path

import pytest
from clean_environment import CleanEnvironment, build_wheel, copy_source
from command_line import run_here
from packaging.requirements import Requirement
from packaging.specifiers import SpecifierSet

from orchestrator.storage.shipped import shipped

REPOSITORY = Path(__file__).resolve().parents[2]
PROJECT = tomllib.loads((REPOSITORY / "pyproject.toml").read_text())["project"]
PACKAGES = ("headfold", "attention", "search_spaces", "trainers", "orchestrator")
LITTLE = [
    "search.recipes=[gqa,align]", "search.num_samples=0", "search.kv_ratios=[0.5]", "rungs.steps=[0,2,4]",
    "promotion.steps=2", "data.train.tokens=20000", "data.calibration.tokens=2048", "data.eval.tokens=2048",
]  # fmt: skip


def test_version_is_that_of_the_project(capsys: pytest.CaptureFixture[str]) -> None:
    assert run_here("--version") == 0
    assert capsys.readouterr().out == f"headfold {PROJECT['version']}\n"


def test_completion_knows_the_verbs(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    for name, value in {"_HEADFOLD_COMPLETE": "complete_bash", "COMP_WORDS": "headfold ex", "COMP_CWORD": "1"}.items():
        monkeypatch.setenv(name, value)
    assert run_here() == 0
    assert capsys.readouterr().out.split() == ["export"]


def test_bundled_files_are_found_and_the_rest_is_reported() -> None:
    assert shipped("configs/demo.yaml") == REPOSITORY / "configs" / "demo.yaml"
    with pytest.raises(FileNotFoundError, match=r"lacks configs/none\.yaml; reinstall it"):
        shipped("configs/none.yaml")


@pytest.fixture(scope="module")
def distributions(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path, Path]:
    """Wheel and sdist, built as for an index by `build`, and the programs of the environment that has it and twine."""
    folder = tmp_path_factory.mktemp("distributions")
    venv.create(folder / "venv", with_pip=True)
    programs = folder / "venv" / "bin"
    subprocess.run([programs / "pip", "install", "--quiet", "build", "twine"], check=True, timeout=600)
    source = copy_source(folder / "source")
    # The wheel is built of the sdist, as installers do that have no wheel
    subprocess.run([programs / "python", "-m", "build", "-o", folder / "dist", source], check=True, timeout=600)
    (wheel,), (sdist,) = ([*folder.glob(f"dist/headfold-*.{kind}")] for kind in ("whl", "tar.gz"))
    return wheel, sdist, programs


@pytest.mark.extended
def test_an_index_takes_wheel_and_sdist(distributions: tuple[Path, Path, Path]) -> None:
    """Twine renders the README as PyPI does, and reads the metadata."""
    wheel, sdist, programs = distributions
    command = [programs / "twine", "check", "--strict", wheel, sdist]
    checked = subprocess.run(command, capture_output=True, text=True, timeout=120)
    assert checked.returncode == 0 and checked.stdout.count("PASSED") == 2, checked.stdout + checked.stderr
    with zipfile.ZipFile(wheel) as inside:
        (name,) = [name for name in inside.namelist() if name.endswith(".dist-info/METADATA")]
        metadata = email.message_from_string(inside.read(name).decode())
    assert (metadata["Name"], metadata["Version"]) == (PROJECT["name"], PROJECT["version"])
    assert (metadata["License-Expression"], metadata["Description-Content-Type"]) == ("Apache-2.0", "text/markdown")
    assert SpecifierSet(metadata["Requires-Python"]) == SpecifierSet(PROJECT["requires-python"])
    required = [requirement for requirement in metadata.get_all("Requires-Dist", []) if "extra ==" not in requirement]
    assert {*map(Requirement, required)} == {*map(Requirement, PROJECT["dependencies"])}
    assert {*metadata.get_all("Provides-Extra", [])} == {*PROJECT["optional-dependencies"]}
    assert {*metadata.get_all("Classifier", [])} == {*PROJECT["classifiers"]}
    assert metadata.get_payload().strip() == (REPOSITORY / "README.md").read_text().strip()


@pytest.mark.extended
def test_the_sdist_has_what_the_readme_links_to(distributions: tuple[Path, Path, Path]) -> None:
    """The project has no public address, so that the links of its README are relative: an index shows no picture."""
    links = re.findall(r"\]\(([^)#]+)(?:#\S*)?\)", (REPOSITORY / "README.md").read_text())
    relative = [link for link in links if "://" not in link]
    with tarfile.open(distributions[1]) as inside:
        names = {name.partition("/")[2] for name in inside.getnames()}
    assert len(relative) > 20 and {*relative} - names == set()
    assert "urls" not in PROJECT, "with an address the README's links should be absolute"


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
