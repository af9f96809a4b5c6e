"""The image of a node, as far as it can be checked without building it: versions, and that nothing is left out. And the
dashboard: that it draws all exported metrics, in the form that Ray's Grafana loads."""

from __future__ import annotations

import itertools
import json
import re
import shutil
import subprocess
import sys
import tomllib
import zipfile
from pathlib import Path

import pytest
import yaml
from clean_environment import copy_source
from packaging.requirements import Requirement
from packaging.specifiers import SpecifierSet
from packaging.version import Version
from ray.dashboard.modules.metrics.grafana_dashboard_factory import generate_train_grafana_dashboard

from orchestrator.tracking import gauges
from trainers.jobs import ray_link

REPOSITORY = Path(__file__).resolve().parents[2]
PROJECT = tomllib.loads((REPOSITORY / "pyproject.toml").read_text())
IMAGE = (REPOSITORY / "deploy" / "Containerfile").read_text()


def locked() -> dict[str, Version]:
    lines = (REPOSITORY / "deploy" / "requirements.lock").read_text().splitlines()
    return {name: Version(version) for name, version in (line.split("==") for line in lines)}


def copied() -> dict[str, str]:
    """Destinations of what the image copies into the folder of Headfold, by their paths here."""
    result = {}
    for sources, target in re.findall(r"^COPY --chown=\S+ (.+) /home/ray/headfold(\S*)$", IMAGE, re.MULTILINE):
        for source in sources.split():
            result[source] = target.strip("/") or Path(source).name
    return result


def test_every_requirement_is_locked_to_a_version_that_it_allows() -> None:
    versions, project = locked(), PROJECT["project"]
    extras = project["optional-dependencies"]
    for text in [*project["dependencies"], *extras["eval"], *extras["gpu"]]:
        expected = Requirement(text)
        assert versions[expected.name] in expected.specifier, text


def test_the_image_has_ray_as_locked_and_all_packages() -> None:
    (base,) = re.findall(r"^ARG BASE=rayproject/ray:([\d.]+)-py311-gpu$", IMAGE, re.MULTILINE)
    cluster = yaml.safe_load((REPOSITORY / "cluster.yaml").read_text())
    assert Version(base) == locked()["ray"]
    assert cluster["docker"]["worker_image"] == f"rayproject/ray:{base}-py311-gpu"
    assert re.findall(r"--build-arg BASE=rayproject/ray:(\S+)-cpu ", IMAGE) == [f"{base}-py311"]
    assert Version("3.11") in SpecifierSet(PROJECT["project"]["requires-python"])
    assert "--python-version 3.11 " in IMAGE, "the lock file is of another Python"
    names = copied().keys()
    assert len(names) == sum(len(line.split()) - 3 for line in IMAGE.splitlines() if line.startswith("COPY --chown"))
    assert all((REPOSITORY / name).exists() for name in names)
    assert {pattern.rstrip("*") for pattern in PROJECT["tool"]["setuptools"]["packages"]["find"]["include"]} <= names
    assert {"pyproject.toml", PROJECT["project"]["readme"], "configs"} <= names
    for file in itertools.chain(*PROJECT["tool"]["setuptools"]["data-files"].values()):  # else pip cannot build there
        assert names & {file, *map(str, Path(file).parents)}, file


@pytest.mark.extended
def test_the_files_of_the_image_make_the_wheel(tmp_path: Path) -> None:
    """The packages that the last step of the image installs, without a builder of images."""
    source = copy_source(tmp_path / "source")
    for name, target in copied().items():
        (tmp_path / "image" / target).parent.mkdir(parents=True, exist_ok=True)
        copy = shutil.copytree if (source / name).is_dir() else shutil.copy2
        copy(source / name, tmp_path / "image" / target)
    wheels = []
    for folder in ("source", "image"):
        out = tmp_path / f"wheel of {folder}"
        command = [sys.executable, "-m", "pip", "wheel", "--quiet", "--no-deps", "--no-build-isolation", "-w", out]
        subprocess.run([*command, tmp_path / folder], check=True, timeout=300)
        wheels.append({info.filename: info.CRC for info in zipfile.ZipFile(next(out.iterdir())).infolist()})
    assert wheels[0] == wheels[1]


def test_the_dashboard_draws_every_gauge_and_nothing_else() -> None:
    dashboard = json.loads((REPOSITORY / "deploy" / "grafana" / "headfold.json").read_text())
    labels = {name: {*of} for name, (_, of) in gauges.GAUGES.items()}
    labels |= {name: {"search", "trial"} for name, _ in ray_link.WORKER_GAUGES.values()}
    drawn = {}
    for panel in dashboard["panels"]:
        (target,) = panel["targets"]
        (name,) = re.findall(r"^ray_(\w+){search=~\"\$search\"}(?: > 0)?$", target["expr"])
        drawn[name] = {*re.findall(r"{{(\w+)}}", target["legendFormat"])}
    assert drawn == labels
    (query,) = [variable["definition"] for variable in dashboard["templating"]["list"] if variable["type"] == "query"]
    assert re.fullmatch(r"label_values\(ray_(\w+), search\)", query)[1] in labels  # type: ignore[index]


def test_the_dashboard_has_the_form_of_rays_own() -> None:
    ours = json.loads((REPOSITORY / "deploy" / "grafana" / "headfold.json").read_text())
    rays = json.loads(generate_train_grafana_dashboard()[0])
    assert ours.keys() <= rays.keys() and ours["schemaVersion"] == rays["schemaVersion"]
    known = {key for row in rays["panels"] for panel in row.get("panels", [row]) for key in panel}
    assert all(panel.keys() <= known for panel in ours["panels"])
    assert len({panel["id"] for panel in ours["panels"]}) == len(ours["panels"])
    (of_rays,) = [v for v in rays["templating"]["list"] if v["name"] == "datasource"]
    (datasource,) = [v for v in ours["templating"]["list"] if v["name"] == "datasource"]
    assert datasource.items() <= of_rays.items()
