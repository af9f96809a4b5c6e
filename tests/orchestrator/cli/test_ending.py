"""The end of a process: at once, but with all that is due done first."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

REPOSITORY = Path(__file__).resolve().parents[3]
BEFORE = """
import atexit, sys, threading, time
from orchestrator.cli.ending import ended_at_once
atexit.register(print, "registered before")
def late():
    time.sleep(0.3)
    print("thread")
with ended_at_once():
    atexit.register(print, "registered within")
    threading.Thread(target=late).start()
    print("begun")
"""


@pytest.mark.parametrize(
    ("end", "code", "told"),
    [
        ("sys.exit(0)", 0, ["begun", "thread", "registered within"]),
        ("sys.exit()", 0, ["begun", "thread", "registered within"]),
        ("sys.exit(3)", 3, ["begun", "thread", "registered within"]),
        ("sys.exit('why')", 1, ["begun", "thread", "registered within", "registered before"]),
        ("raise ValueError", 1, ["begun", "thread", "registered within", "registered before"]),
        ("pass", 0, ["begun", "thread", "registered within", "registered before"]),
    ],
)
def test_what_is_due_is_done_and_the_exit_code_is_kept(end: str, code: int, told: list[str]) -> None:
    done = subprocess.run(
        [sys.executable, "-c", f"{BEFORE}    {end}\n"], cwd=REPOSITORY, capture_output=True, text=True, check=False
    )
    assert (done.returncode, done.stdout.split("\n")[:-1]) == (code, told), done.stderr
    assert ("why" in done.stderr) == ("why" in end)
