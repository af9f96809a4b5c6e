"""The command line in the process of a test."""

from __future__ import annotations

from pathlib import Path

import pytest

from orchestrator import main


def run_here(*arguments: str | Path) -> int | str | None:
    """The command in this process; its exit code."""
    with pytest.raises(SystemExit) as ended:
        main.run([str(a) for a in arguments])
    return ended.value.code
