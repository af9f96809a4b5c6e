"""Headfold as a stranger has it: installed from its wheel, far from the checkout.

Third-party packages are those of the environment that runs the tests, through a .pth file: torch again would be
gigabytes. A .pth file does not read those of the folder that it names, so the editable Headfold there is not seen.
"""

from __future__ import annotations

import os
import subprocess
import sys
import sysconfig
import venv
from collections.abc import Collection, Mapping
from dataclasses import dataclass
from pathlib import Path

REPOSITORY = Path(__file__).resolve().parents[2]
OF_TESTS = ("PYTHONPATH", "VIRTUAL_ENV", "RAY_ADDRESS", "RAY_AUTH_MODE", "MLFLOW_TRACKING_URI")


def copy_source(source: Path) -> Path:
    """Copy the files that git knows here, as they are now."""
    listed = ["git", "ls-files", "--cached", "--others", "--exclude-standard"]
    names = subprocess.run(listed, cwd=REPOSITORY, capture_output=True, text=True, check=True).stdout.splitlines()
    for name in names:
        if (REPOSITORY / name).is_file():
            (source / name).parent.mkdir(parents=True, exist_ok=True)
            (source / name).write_bytes((REPOSITORY / name).read_bytes())
    return source


def build_wheel(out: Path) -> Path:
    """The wheel of the files that git knows here, as they are now."""
    source = copy_source(out / "source")
    command = [sys.executable, "-m", "pip", "wheel", "--quiet", "--no-deps", "--no-build-isolation", "-w", out, source]
    subprocess.run(command, check=True, timeout=300)
    (wheel,) = out.glob("headfold-*.whl")
    return wheel


def without(environment: Mapping[str, str], names: Collection[str]) -> dict[str, str]:
    return {key: value for key, value in environment.items() if key not in names}


@dataclass(frozen=True)
class CleanEnvironment:
    """A virtual environment in `folder` with Headfold's wheel."""

    folder: Path

    @classmethod
    def make(cls, folder: Path) -> CleanEnvironment:
        created = cls(folder / "venv")
        venv.create(created.folder, with_pip=True)
        wheel = build_wheel(folder)
        (packages,) = created.folder.glob("lib/python*/site-packages")
        # pip would find the editable Headfold of the same version on these paths, and install none
        install = [created.bin / "pip", "install", "--quiet", "--no-deps", "--no-index", wheel]
        subprocess.run(install, env=without(os.environ, OF_TESTS), check=True)
        (packages / "third_party.pth").write_text(sysconfig.get_path("purelib") + "\n")
        return created

    @property
    def bin(self) -> Path:
        return self.folder / "bin"

    def run(
        self, *command: str | Path, cwd: Path, minutes: float = 15, **environment: str
    ) -> subprocess.CompletedProcess[str]:
        """A command with this environment's programs first, and nothing of the checkout on Python's path."""
        clean = without(os.environ, OF_TESTS)
        clean |= {"PATH": f"{self.bin}{os.pathsep}{clean['PATH']}", "OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1"}
        clean |= {"RAY_worker_niceness": "0"}  # processes of other tests are not nice either
        given = [*map(str, command)]
        return subprocess.run(
            given, cwd=cwd, env=clean | environment, capture_output=True, text=True, timeout=60 * minutes
        )
