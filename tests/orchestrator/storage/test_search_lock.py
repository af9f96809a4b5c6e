"""One driver a search, whatever kills it and on whatever machine it was."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from orchestrator.config.schema import ConfigError
from orchestrator.storage.lock import SearchLock

HOLD = """
import sys, time
from orchestrator.storage.lock import SearchLock
SearchLock(sys.argv[1], beat=0.05, host=sys.argv[2]).acquire()
print("held", flush=True)
time.sleep(60)
"""


def hold(file: Path, host: str) -> subprocess.Popen[str]:
    process = subprocess.Popen([sys.executable, "-c", HOLD, str(file), host], stdout=subprocess.PIPE, text=True)
    assert process.stdout is not None
    assert process.stdout.readline() == "held\n"
    return process


def test_the_second_driver_is_refused_and_told_who_holds_the_search(tmp_path: Path) -> None:
    first = SearchLock(tmp_path / "lock", host="here").acquire()
    with pytest.raises(ConfigError, match=rf"search 'x' is being run by process {os.getpid()} on here, since 20"):
        SearchLock(tmp_path / "lock", host="here").acquire("search 'x'")
    first.release()
    SearchLock(tmp_path / "lock", host="here").acquire().release()


def test_a_killed_holder_holds_no_longer(tmp_path: Path) -> None:
    process = hold(tmp_path / "lock", "here")
    with pytest.raises(ConfigError, match=f"process {process.pid} on here"):
        SearchLock(tmp_path / "lock", host="here").acquire()
    process.send_signal(signal.SIGKILL)
    process.wait()
    SearchLock(tmp_path / "lock", host="here").acquire().release()


def test_where_locks_hold_on_one_machine_only_the_heartbeat_decides(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    process = hold(tmp_path / "lock", "there")
    monkeypatch.setattr("fcntl.flock", lambda *_: None)  # what another machine's lock looks like on such a disk
    with pytest.raises(ConfigError, match=f"process {process.pid} on there"):
        SearchLock(tmp_path / "lock", beat=0.05, host="here").acquire()
    process.send_signal(signal.SIGKILL)
    process.wait()
    SearchLock(tmp_path / "lock", beat=0.05, host="here").acquire().release()
