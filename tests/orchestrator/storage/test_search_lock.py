"""One driver per search, after any kill and on any machine."""

from __future__ import annotations

import json
import os
import pickle
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from orchestrator.config.schema import ConfigError
from orchestrator.storage.journal import TRIAL, Journal, JournalError, read_events
from orchestrator.storage.lock import SearchLock, last_heartbeat

CONFIG = {"recipe": "gqa", "kv_ratio": 0.5, "learning_rate": 1e-3, "choices": {}}
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


def test_the_second_driver_is_refused_with_the_holder_of_the_search(tmp_path: Path) -> None:
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


def test_without_locks_the_heartbeat_decides_on_one_machine_too(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def unknown(*_: object) -> None:
        raise OSError("Function not implemented")

    process = hold(tmp_path / "lock", "here")
    monkeypatch.setattr("fcntl.flock", unknown)
    with pytest.raises(ConfigError, match=f"process {process.pid} on here"):
        SearchLock(tmp_path / "lock", beat=0.5, host="here").acquire()
    process.kill()
    process.wait()
    SearchLock(tmp_path / "lock", beat=0.05, host="here").acquire().release()


def test_where_locks_hold_on_one_machine_only_the_heartbeat_decides(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    process = hold(tmp_path / "lock", "there")
    monkeypatch.setattr("fcntl.flock", lambda *_: None)  # another machine's lock has no effect on such a disk
    # It returns at the first beat; with a busy machine the holder may be late
    with pytest.raises(ConfigError, match=f"process {process.pid} on there"):
        SearchLock(tmp_path / "lock", beat=0.5, host="here").acquire()
    process.send_signal(signal.SIGKILL)
    process.wait()
    SearchLock(tmp_path / "lock", beat=0.05, host="here").acquire().release()


def without_kernel_locks(monkeypatch: pytest.MonkeyPatch) -> None:
    """As on a shared file system that locks on one machine only."""
    monkeypatch.setattr("fcntl.flock", lambda *_: None)


def standing_still(file: Path) -> SearchLock:
    """A holder whose process was suspended: its heartbeats have stopped, and it has had no notice."""
    lock = SearchLock(file, beat=0.05, host="there").acquire("search 'x'")
    lock._ended.set()
    assert lock._thread is not None
    lock._thread.join()
    return lock


def test_a_holder_that_was_taken_over_writes_no_event_and_cuts_none_off(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    without_kernel_locks(monkeypatch)
    first = standing_still(tmp_path / "lock")
    journal = Journal(tmp_path / "journal.jsonl", first.check)
    journal.begin(2)
    second = SearchLock(tmp_path / "lock", beat=0.05, host="here").acquire("search 'x'")
    other = Journal(tmp_path / "journal.jsonl", second.check)
    other.append(TRIAL, trial="t1", config=CONFIG)
    assert pickle.loads(pickle.dumps(journal)).path == journal.path, "as Tune does with its searcher"
    with pytest.raises(JournalError, match=r"search 'x' was taken over by process \d+ on here, since 20"):
        journal.append(TRIAL, trial="t2", config=CONFIG)
    assert [event.get("trial") for event in read_events(other.path)] == [None, "t1"]
    second.check()
    first.release()
    assert json.loads((tmp_path / "lock").read_text())["host"] == "here", "nor does it release the other's lock"
    second.release()


def test_a_lock_that_another_has_released_is_lost(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    without_kernel_locks(monkeypatch)
    first = standing_still(tmp_path / "lock")
    SearchLock(tmp_path / "lock", beat=0.05, host="here").acquire().release()
    with pytest.raises(ConfigError, match="taken over by another process, which no longer runs"):
        first.check()


def test_a_heartbeat_does_not_take_a_search_back(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    without_kernel_locks(monkeypatch)
    first = standing_still(tmp_path / "lock")
    second = SearchLock(tmp_path / "lock", beat=0.05, host="here").acquire()
    first._keep(7)
    assert json.loads((tmp_path / "lock").read_text())["host"] == "here"
    first._write(8)  # it stood still between its look and its write
    second.check()
    assert json.loads((tmp_path / "lock").read_text())["host"] == "here"
    second.release()


def test_events_of_another_writer_are_never_cut_off(tmp_path: Path) -> None:
    """Also where nothing is known of a lock."""
    journal, other = Journal(tmp_path / "journal.jsonl"), Journal(tmp_path / "journal.jsonl")
    journal.begin(2)
    with pytest.raises(JournalError, match="changed by another process"):
        other.begin(2)
    assert len(read_events(journal.path)) == 1
    with pytest.raises(JournalError, match="changed by another process"):
        other.append("resume")


@pytest.mark.parametrize("content", ['{"pid": 1}', '{"host": "here", "pi', "[1]", "\x00\x00mine"])
def test_a_file_that_is_no_lock_is_distinguished(tmp_path: Path, content: str) -> None:
    (tmp_path / "lock").write_text(content)
    with pytest.raises(ConfigError, match="is no lock of a search: expected a JSON object with host, pid, since"):
        SearchLock(tmp_path / "lock").acquire()


def test_a_lock_of_a_former_version_is_taken_over(tmp_path: Path) -> None:
    (tmp_path / "lock").write_text('{"host": "gone", "pid": 1, "since": "2026", "token": "x", "beat": 3}')
    lock = SearchLock(tmp_path / "lock", beat=0.02).acquire()
    lock.check()
    lock.release()


def test_a_look_at_the_lock_of_a_dead_driver_leaves_the_time_of_its_death(tmp_path: Path) -> None:
    path = tmp_path / "driver.lock"
    SearchLock(path).check_free()
    SearchLock(path).acquire().release()
    os.utime(path, (1000, 1000))
    SearchLock(path).check_free()
    assert last_heartbeat(path, 5000) == 1000
    with SearchLock(path).acquire(), pytest.raises(ConfigError, match="is being run by"):
        SearchLock(path).check_free()
