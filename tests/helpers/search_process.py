"""A search of the demo's config in a separate process, as a user starts one from a terminal."""

from __future__ import annotations

import contextlib
import os
import subprocess
import sys
import time
from collections.abc import Iterable
from pathlib import Path

REPOSITORY = Path(__file__).resolve().parents[2]
MARK = "HEADFOLD_TEST_STORAGE"  # inherited by every process of a search, Ray's among them

LITTLE = [
    "data.sequence_length=64",
    "data.train.tokens=16384",
    "data.eval.tokens=2048",
    "data.calibration.tokens=2048",
    "train.batch_size=4",
    "resources.max_concurrent=1",  # so that one worker group, and one more process, serve all trials
]
"""Settings of a search whose trials take seconds."""


def start_search(
    storage: Path, settings: Iterable[str], *arguments: str, repository: Path = REPOSITORY
) -> subprocess.Popen[str]:
    """Run `headfold search configs/demo.yaml` with `settings` in a new session, so that it can be killed whole.

    `repository`: the checkout whose code runs, in Ray's processes too.
    """
    not_the_users = ("RAY_ADDRESS", "RAY_AUTH_MODE", "MLFLOW_TRACKING_URI")
    environment = {k: v for k, v in os.environ.items() if k not in not_the_users}
    return subprocess.Popen(
        [sys.executable, str(repository / "orchestrator" / "main.py"), "search", "configs/demo.yaml", *settings,
         f"storage={storage}", *arguments],
        cwd=repository,
        env=environment
        | {"HF_HUB_OFFLINE": "1", "OMP_NUM_THREADS": "1", "RAY_worker_niceness": "0", MARK: str(storage)}
        | {"PYTHONPATH": str(repository)},
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        start_new_session=True,
    )  # fmt: skip


def left_over(storage: Path, seconds: float = 30) -> list[str]:
    """The commands of a search's processes that are still there, `seconds` after it has ended at the latest."""
    deadline = time.monotonic() + seconds
    while (result := _marked(f"{MARK}={storage}".encode())) and time.monotonic() < deadline:
        time.sleep(0.2)
    return result


def _marked(mark: bytes) -> list[str]:
    result = []
    for process in Path("/proc").glob("[0-9]*"):
        with contextlib.suppress(OSError):  # not ours, or gone
            if mark in (process / "environ").read_bytes().split(b"\0") and (command := _command(process)):
                result.append(command)
    return result


def _command(process: Path) -> str:
    """Empty for one that has ended and was not waited for yet."""
    return (process / "cmdline").read_bytes().replace(b"\0", b" ").decode(errors="replace").strip()
