"""MLflow on the head: its database survives the head, and its server a kill."""

from __future__ import annotations

import contextlib
import os
import signal
import sqlite3
import subprocess
import sys
import time
import urllib.request
from contextlib import closing
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import psutil
import pytest

from orchestrator.cluster.session import free_port
from orchestrator.storage.databases import back_up, restore
from orchestrator.tracking.mlflow_server import Server, ServerSettings, is_taken, try_to_back_up
from orchestrator.tracking.runs import Tracker


def fill(path: Path, rows: int) -> None:
    with closing(sqlite3.connect(path)) as store:
        store.execute("create table if not exists runs (id)")
        store.executemany("insert into runs values (?)", [(i,) for i in range(rows)])
        store.commit()


def count(path: Path) -> int:
    with closing(sqlite3.connect(path)) as store:
        return store.execute("select count(*) from runs").fetchone()[0]


def test_a_new_head_takes_the_database_of_the_lost_one(tmp_path: Path) -> None:
    own, kept = tmp_path / "own" / "mlflow.db", tmp_path / "shared" / "backup.db"
    assert not restore(own, kept)
    own.parent.mkdir()
    fill(own, 5)
    back_up(own, kept)
    fill(own, 2)
    assert not restore(own, kept) and count(own) == 7  # the existing one is newer
    own.unlink()
    assert restore(own, kept) and count(own) == 5
    assert [p.name for p in (*own.parent.iterdir(), *kept.parent.iterdir())] == ["mlflow.db", "backup.db"]


def test_a_shared_file_system_that_is_away_does_not_end_the_server(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    fill(tmp_path / "mlflow.db", 1)
    (tmp_path / "shared").write_text("not a folder")
    try_to_back_up(tmp_path / "mlflow.db", tmp_path / "shared" / "backup.db")
    assert "cannot back up to" in capsys.readouterr().out


def test_settings_come_from_the_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in [n for n in os.environ if n.startswith("HEADFOLD_MLFLOW_")]:
        monkeypatch.delenv(name)
    with pytest.raises(ValueError, match="HEADFOLD_MLFLOW_STORE must be set"):
        ServerSettings.of_environment()
    monkeypatch.setenv("HEADFOLD_MLFLOW_STORE", "sqlite:////home/x/mlflow.db")
    monkeypatch.setenv("HEADFOLD_MLFLOW_ARTIFACTS", "s3://bucket/mlflow")
    monkeypatch.setenv("HEADFOLD_MLFLOW_BACKUP", "/mnt/backup.db")
    assert ServerSettings.of_environment().database == Path("/home/x/mlflow.db")
    assert ServerSettings.of_environment().backup == Path("/mnt/backup.db")
    monkeypatch.setenv("HEADFOLD_MLFLOW_STORE", "postgresql://db/mlflow")
    assert ServerSettings.of_environment().backup is None
    monkeypatch.setenv("HEADFOLD_MLFLOW_STORE", "mysql://user:hidden@db/mlflow")
    settings = ServerSettings.of_environment()
    assert "hidden" not in " ".join(settings.command), "which all users of the machine see"
    assert settings.environment["MLFLOW_BACKEND_STORE_URI"] == "mysql://user:hidden@db/mlflow"


def test_a_server_that_does_not_end_is_killed_with_its_workers(capfd: pytest.CaptureFixture[str]) -> None:
    deaf = "import signal, subprocess, sys, time; signal.signal(signal.SIGTERM, signal.SIG_IGN)"
    child = f"subprocess.Popen([sys.executable, '-c', '{deaf}; time.sleep(600)'])"
    command = [sys.executable, "-c", f"{deaf}; {child}; time.sleep(600)"]
    settings: Any = SimpleNamespace(command=command, environment={})
    server = Server(settings)
    server.keep_up()
    assert server.process is not None
    tree = [psutil.Process(server.process.pid)]
    deadline = time.monotonic() + 60
    while len(tree) < 3 and time.monotonic() < deadline:
        tree = [tree[0], *tree[0].children(recursive=True)]
    server.end(patience=1)
    assert server.process.returncode == -signal.SIGKILL
    assert psutil.wait_procs(tree[1:], timeout=20)[1] == []
    assert len(tree) == 3
    assert "did not end within 1 s" in capfd.readouterr().out
    server.end()  # already ended


@pytest.mark.extended
def test_a_killed_server_comes_back_and_a_new_head_knows_its_runs(tmp_path: Path, empty_store: Path) -> None:
    port, own, kept = free_port(), tmp_path / "own" / "mlflow.db", tmp_path / "shared" / "backup.db"
    kept.parent.mkdir()
    kept.write_bytes(empty_store.read_bytes())  # as left by a head that was lost
    settings = {"STORE": f"sqlite:///{own}", "ARTIFACTS": str(tmp_path / "a"), "BACKUP": str(kept), "PORT": str(port)}
    environment = os.environ | {f"HEADFOLD_MLFLOW_{key}": value for key, value in settings.items()}
    head = subprocess.Popen([sys.executable, "-m", "orchestrator.tracking.mlflow_server"], env=environment)
    try:
        _wait_until_up(port)
        tracker = Tracker.open(f"http://127.0.0.1:{port}", "tests", tmp_path)
        run = tracker.start("before the kill")
        for child in psutil.Process(head.pid).children(recursive=True):
            with contextlib.suppress(psutil.NoSuchProcess):
                child.send_signal(signal.SIGKILL)
        deadline = time.monotonic() + 60
        while is_taken(port) and time.monotonic() < deadline:
            time.sleep(0.1)
        _wait_until_up(port)
        assert tracker.client.get_run(run).info.run_name == "before the kill"
        tree = psutil.Process(head.pid).children(recursive=True)
    finally:
        head.send_signal(signal.SIGTERM)
        assert head.wait(timeout=60) == 0
    assert psutil.wait_procs(tree, timeout=20)[1] == []
    own.unlink()
    assert restore(own, kept)
    with closing(sqlite3.connect(own)) as store:
        assert store.execute("select name from runs").fetchall() == [("before the kill",)]


def _wait_until_up(port: int) -> None:
    deadline = time.monotonic() + 200
    while time.monotonic() < deadline:
        with contextlib.suppress(OSError), urllib.request.urlopen(f"http://127.0.0.1:{port}/health", timeout=5):
            return
        time.sleep(0.2)
    pytest.fail("MLflow did not come up")
