"""A token in a tracking address: a whole search against a real MLflow server, and then a look for it everywhere."""

from __future__ import annotations

import contextlib
import os
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import time
import urllib.request
from collections.abc import Iterator
from pathlib import Path

import pytest
import yaml

REPOSITORY = Path(__file__).resolve().parents[3]
TOKEN = "hunter2-8f3a9c"


@pytest.fixture
def server(tmp_path: Path) -> Iterator[tuple[str, Path]]:
    """Host and port of an MLflow server on the loopback address, and the folder of its store."""
    store = tmp_path / "server"
    store.mkdir()
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    command = [sys.executable, "-m", "mlflow", "server", "--host", "127.0.0.1", "--port", str(port), "--workers", "1"]
    command += ["--backend-store-uri", f"sqlite:///{store}/server.db", "--artifacts-destination", str(store)]
    with (store / "server.log").open("wb") as log:
        process = subprocess.Popen(
            command,
            env=os.environ | {"MLFLOW_SERVER_ENABLE_JOB_EXECUTION": "false"},
            stdout=log,
            stderr=log,
            start_new_session=True,
        )
    try:
        deadline = time.monotonic() + 120
        while time.monotonic() < deadline:
            with contextlib.suppress(OSError), urllib.request.urlopen(f"http://127.0.0.1:{port}/health", timeout=2):
                break
            time.sleep(0.3)
        yield f"127.0.0.1:{port}", store
    finally:
        os.killpg(process.pid, signal.SIGTERM)
        process.wait(timeout=30)


@pytest.mark.slow
def test_a_token_in_the_tracking_address_is_told_nowhere(server: tuple[str, Path], tmp_path: Path) -> None:
    host, store = server
    file, storage = tmp_path / "mine.yaml", tmp_path / "runs"
    record = yaml.safe_load((REPOSITORY / "configs" / "demo.yaml").read_text())
    record |= {"storage": str(storage), "tracking": {"uri": f"http://user:{TOKEN}@{host}"}}
    record["rungs"] |= {"steps": [0]}
    record["search"] |= {"recipes": ["gqa"], "kv_ratios": [0.25], "num_samples": 0}
    record["data"] |= {"train": {"tokens": 4096}, "eval": {"tokens": 1024}, "calibration": {"tokens": 1024}}
    record["promotion"] = {"enabled": False}
    file.write_text(yaml.safe_dump(record))
    ray = tempfile.mkdtemp(prefix="hf-")  # short: Ray's sockets lie in it
    clean = {k: v for k, v in os.environ.items() if k not in ("MLFLOW_TRACKING_URI", "RAY_ADDRESS", "PYTHONPATH")}
    try:
        done = subprocess.run(
            [sys.executable, "-m", "orchestrator.main", "search", str(file)],
            cwd=REPOSITORY,
            env=clean | {"RAY_TMPDIR": ray, "OMP_NUM_THREADS": "1"},
            capture_output=True,
            text=True,
            timeout=600,
            check=False,
        )
        assert done.returncode == 0, done.stderr
        assert "***@" in done.stdout, "the address is told, without its token"
        assert TOKEN not in done.stdout + done.stderr
        told = (storage / "demo" / "search.yaml").read_text()
        assert host in told and "***@" in told
        places = [p for folder in (storage, store, Path(ray)) for p in folder.rglob("*") if p.is_file()]
        names = {p.name for p in places}
        assert {"server.db", "report.html", "journal.jsonl"} <= names, "what is looked through must be there"
        assert any(p.is_relative_to(store) and p.name == "report.html" for p in places), "the report is an artifact too"
        found = [str(p) for p in places if TOKEN.encode() in p.read_bytes()]
        assert found == []
    finally:
        shutil.rmtree(ray, ignore_errors=True)
