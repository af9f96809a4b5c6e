"""Packages that a task needs and that may not be installed."""

from __future__ import annotations

import re
import shlex
import tomllib
from importlib import metadata
from importlib.util import find_spec

from orchestrator.storage.shipped import shipped

TRAINING_PACKAGES = ("ray", "deepspeed")
SEARCH_PACKAGES = (*TRAINING_PACKAGES, "mlflow")


class MissingPackageError(ValueError):
    """A package that a verb needs is not installed.

    The message names both, and how to install it.
    """


def check_packages(verb: str, *packages: str) -> None:
    """Raise MissingPackageError unless the packages are installed.

    They are those that only processes started by the verb import.
    """
    for package in packages:
        if find_spec(package) is None:
            raise MissingPackageError(install_message(verb, package))


def is_missing(package: str) -> bool:
    """Return whether Headfold requires a package that is not installed."""
    return package in _requirements() and find_spec(package) is None


def install_message(verb: str, package: str) -> str:
    """Return the message for a missing package: the verb that needs it, and how to install it."""
    required = _requirements()
    missing = [text for name, text in required.items() if not _is_installed(name)]
    if not missing:
        missing = [required.get(package, package)]
    return (
        f"{verb} needs the package {package}, which is not installed; install all that is missing "
        f"here: pip install {shlex.join(missing)}"
    )


def _requirements() -> dict[str, str]:
    """Return the requirement of each package that Headfold requires, without extras."""
    try:
        lines = metadata.requires("headfold") or []
    except metadata.PackageNotFoundError:  # a checkout that is not installed
        project = tomllib.loads(shipped("pyproject.toml").read_text(encoding="utf-8"))["project"]
        lines = project["dependencies"]
    texts = [line for line in lines if "extra ==" not in line]
    return {re.split(r"[^\w.-]", text, maxsplit=1)[0].lower(): text for text in texts}


def _is_installed(distribution: str) -> bool:
    try:
        metadata.version(distribution)
    except metadata.PackageNotFoundError:
        return False
    return True
