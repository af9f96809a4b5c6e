"""Programs that Headfold starts end with it, with all that they have started."""

from __future__ import annotations

import signal
import subprocess
import sys
import time
from pathlib import Path

import psutil
import pytest

from orchestrator.child_processes import Child

PARENT = """
import os, sys
from orchestrator.child_processes import Child
child = Child([sys.executable, "-c", sys.argv[1], sys.argv[2]], os.environ)
child.wait()
"""
PROGRAM = """
import pathlib, subprocess, sys, time
other = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(600)"])
pathlib.Path(sys.argv[1]).write_text("started")
time.sleep(600)
"""


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGHUP, signal.SIGINT, signal.SIGKILL])
def test_a_program_ends_with_its_parent(number: int, tmp_path: Path) -> None:
    mark = tmp_path / "started"
    parent = subprocess.Popen([sys.executable, "-c", PARENT, PROGRAM, str(mark)], stderr=subprocess.DEVNULL)
    deadline = time.monotonic() + 60
    while not mark.exists() and time.monotonic() < deadline:
        time.sleep(0.05)
    tree = psutil.Process(parent.pid).children(recursive=True)
    assert len(tree) == 3  # the supervisor, the program and what that has started
    parent.send_signal(number)
    parent.wait(timeout=30)
    assert psutil.wait_procs(tree, timeout=20)[1] == []


def test_exit_codes_and_signals_are_the_programs_own() -> None:
    for script, code in (("import sys; sys.exit(7)", 7), ("import os; os.abort()", -signal.SIGABRT), ("", 0)):
        child = Child([sys.executable, "-c", script], {}, stderr=subprocess.DEVNULL)
        assert child.wait(timeout=60) == code and not child.end()
    with pytest.raises(FileNotFoundError, match="there is no program '/no/python'"):
        Child(["/no/python"], {})
