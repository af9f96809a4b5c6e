"""A search as a Ray job, by the real command line: its log streams, and its exit code tells success or failure."""

from __future__ import annotations

import contextlib
import os
import socket
import subprocess
import sys
import tempfile
import time
import urllib.request
import uuid
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import psutil
import pytest
from ray.job_submission import JobStatus, JobSubmissionClient

from orchestrator.storage.journal import load_trials

pytestmark = pytest.mark.slow


REPOSITORY = Path(__file__).resolve().parents[2]
BIN = Path(sys.executable).parent
SMALL = [
    "name=job",
    "search.recipes=[gqa]",
    "search.kv_ratios=[0.5]",
    "search.num_samples=0",
    "rungs.steps=[0,1]",
    "promotion.enabled=false",
    "data.train.tokens=8192",
    "data.eval.tokens=2048",
    "data.calibration.tokens=2048",
]


@dataclass(frozen=True)
class Head:
    """A Ray of its own: the address of its job server, and the environment of whoever talks to it."""

    address: str
    environment: dict[str, str]


def _free_ports(count: int) -> list[int]:
    with contextlib.ExitStack() as stack:
        probes = [stack.enter_context(socket.socket()) for _ in range(count)]
        for probe in probes:
            probe.bind(("127.0.0.1", 0))
        return [probe.getsockname()[1] for probe in probes]


def _wait_until_up(address: str, process: subprocess.Popen[str], log: Path) -> None:
    deadline = time.monotonic() + 120
    while time.monotonic() < deadline and process.poll() is None:
        with contextlib.suppress(OSError), urllib.request.urlopen(f"{address}/api/version", timeout=5):
            return
        time.sleep(0.5)
    pytest.fail(f"ray start did not come up: {log.read_text()[-2000:]}")


@pytest.fixture(scope="module")
def head(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Head]:
    """`ray start --head --block` with a folder and ports of its own. Not ended by `ray stop`, which ends every Ray."""
    gcs, dashboard, agent, client = _free_ports(4)
    address = f"http://127.0.0.1:{dashboard}"
    log = tmp_path_factory.mktemp("head") / "ray.log"
    with tempfile.TemporaryDirectory(dir="/tmp", ignore_cleanup_errors=True) as folder:  # a short path, for sockets
        environment = os.environ | {
            "PATH": f"{BIN}{os.pathsep}{os.environ['PATH']}",
            "RAY_TMPDIR": folder,
            "OMP_NUM_THREADS": "1",
        }
        for name in ("RAY_ADDRESS", "RAY_API_SERVER_ADDRESS", "MLFLOW_TRACKING_URI"):
            environment.pop(name, None)
        command = f"ray start --head --block --num-cpus=2 --disable-usage-stats --port={gcs}"
        command += f" --dashboard-host=127.0.0.1 --dashboard-port={dashboard} --dashboard-agent-listen-port={agent}"
        command += f" --ray-client-server-port={client} --min-worker-port=0 --max-worker-port=0 --temp-dir={folder}"
        with log.open("w") as out:
            process = subprocess.Popen(
                [str(BIN / "ray"), *command.split()[1:]],
                env=environment,
                stdout=out,
                stderr=subprocess.STDOUT,
                text=True,
                start_new_session=True,
            )
        try:
            _wait_until_up(address, process, log)
            yield Head(address, environment)
        finally:
            _end(process.pid)


def _end(pid: int) -> None:
    """End a process and all that it has started, gently first."""
    tree = [psutil.Process(pid), *psutil.Process(pid).children(recursive=True)]
    tree[0].terminate()
    for left in psutil.wait_procs(tree, timeout=20)[1]:
        with contextlib.suppress(psutil.NoSuchProcess):
            left.kill()
    psutil.wait_procs(tree, timeout=20)


def _submit(head: Head, *overrides: str) -> tuple[str, subprocess.Popen[str]]:
    identity = f"test-{uuid.uuid4().hex[:8]}"
    command = [str(BIN / "ray"), "job", "submit", "--address", head.address, "--submission-id", identity]
    command += ["--working-dir", ".", "--", "python", "orchestrator/main.py", "search", "configs/demo.yaml", *overrides]
    return identity, subprocess.Popen(
        command,
        cwd=REPOSITORY,
        env=head.environment,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    )


def test_a_search_runs_as_a_job(head: Head, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("RAY_API_SERVER_ADDRESS", raising=False)  # of the tests' own Ray: it goes before what is given
    identity, process = _submit(head, *SMALL, f"storage={tmp_path / 'runs'}")
    client = JobSubmissionClient(head.address)
    seen, lines = None, []
    assert process.stdout
    for line in process.stdout:
        lines.append(line)
        if line.startswith("search ") and seen is None:
            seen = client.get_job_status(identity)
    assert process.wait() == 0, "".join(lines)
    assert seen == JobStatus.RUNNING, "the log came only after the job was over: " + "".join(lines)
    info = client.get_job_info(identity)
    assert info.status == JobStatus.SUCCEEDED and info.driver_exit_code == 0
    assert load_trials(tmp_path / "runs" / "job")


def test_a_refused_search_is_a_failed_job(head: Head, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("RAY_API_SERVER_ADDRESS", raising=False)
    identity, process = _submit(head, *SMALL, f"storage={tmp_path / 'runs'}", "search.kv_ratios=[2]")
    log = process.communicate(timeout=300)[0]
    assert process.returncode == 1
    assert "search.kv_ratios" in log and "(0, 1]" in log
    info = JobSubmissionClient(head.address).get_job_info(identity)
    assert info.status == JobStatus.FAILED and info.driver_exit_code == 2
    assert not (tmp_path / "runs").exists()
