"""The image of a node, as far as it can be checked without building it: versions, and that nothing is left out."""

from __future__ import annotations

import re
import tomllib
from pathlib import Path

import yaml
from packaging.requirements import Requirement
from packaging.version import Version

REPOSITORY = Path(__file__).resolve().parents[2]
PROJECT = tomllib.loads((REPOSITORY / "pyproject.toml").read_text())
IMAGE = (REPOSITORY / "deploy" / "Containerfile").read_text()


def locked() -> dict[str, Version]:
    lines = (REPOSITORY / "deploy" / "requirements.lock").read_text().splitlines()
    return {name: Version(version) for name, version in (line.split("==") for line in lines)}


def test_every_requirement_is_locked_to_a_version_that_it_allows() -> None:
    versions, project = locked(), PROJECT["project"]
    extras = project["optional-dependencies"]
    for text in [*project["dependencies"], *extras["eval"], *extras["gpu"]]:
        wanted = Requirement(text)
        assert versions[wanted.name] in wanted.specifier, text


def test_the_image_has_ray_as_locked_and_all_packages() -> None:
    (base,) = re.findall(r"^ARG BASE=rayproject/ray:([\d.]+)-py311-gpu$", IMAGE, re.MULTILINE)
    cluster = yaml.safe_load((REPOSITORY / "cluster.yaml").read_text())
    assert Version(base) == locked()["ray"]
    assert cluster["docker"]["worker_image"] == f"rayproject/ray:{base}-py311-gpu"
    copied = re.findall(r"^COPY --chown=\S+ (.+) /home/ray/headfold\S*$", IMAGE, re.MULTILINE)
    names = {name for line in copied for name in line.split()}
    assert all((REPOSITORY / name).exists() for name in names)
    assert {pattern.rstrip("*") for pattern in PROJECT["tool"]["setuptools"]["packages"]["find"]["include"]} <= names
    assert {"pyproject.toml", PROJECT["project"]["readme"], "configs"} <= names
