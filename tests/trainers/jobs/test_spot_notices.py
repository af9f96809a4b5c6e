"""The notices of three clouds, by their metadata servers on this machine (there is no cloud here)."""

from __future__ import annotations

import os
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from queue import Empty, Queue
from typing import Any

import pytest
from json_output import last_json
from metadata_server import MetadataServer

from trainers.jobs import spot_notices
from trainers.jobs.spot_notices import CLOUDS, Notice, NoticeWatch

REPOSITORY = Path(__file__).resolve().parents[3]
SCRIPT = Path(__file__).with_name("leaving_cluster.py")
SECONDS = {"EC2": 120, "GCE": 30, "Azure": 30}


@pytest.fixture(params=SECONDS)
def server(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Iterator[MetadataServer]:
    created = MetadataServer(request.param)
    for name, value in created.environment.items():
        monkeypatch.setenv(name, value)
    monkeypatch.setattr(spot_notices, "POLL_SECONDS", 0.05)
    yield created
    created.close()


def test_a_cloud_s_notice_is_seen_with_the_time_that_is_left(server: MetadataServer) -> None:
    result: Queue[Notice] = Queue()
    watch = NoticeWatch(result.put)
    with pytest.raises(Empty):
        result.get(timeout=0.5)
    assert not watch.seen.is_set() and server.requests
    server.announce(SECONDS[server.cloud])
    notice = result.get(timeout=30)
    assert watch.seen.is_set()
    assert notice.source.startswith(server.cloud)
    assert SECONDS[server.cloud] - 5 < notice.seconds <= SECONDS[server.cloud]


def test_only_its_own_cloud_answers(server: MetadataServer) -> None:
    for name, cloud in CLOUDS.items():
        if name == server.cloud:
            cloud.recognise()
            assert cloud.notice() is None
            continue
        for ask in cloud:
            with pytest.raises(OSError):
                ask()


def test_azure_is_recognised_before_it_answers_for_events(monkeypatch: pytest.MonkeyPatch) -> None:
    """The first question switches them on, which takes minutes on a fresh machine."""
    server = MetadataServer("Azure")
    server.late_events = 4
    for name, value in server.environment.items():
        monkeypatch.setenv(name, value)
    monkeypatch.setattr(spot_notices, "POLL_SECONDS", 0.05)
    monkeypatch.setattr(spot_notices, "_ANSWER_SECONDS", 0.2)
    server.announce(SECONDS["Azure"])
    result: Queue[Notice] = Queue()
    NoticeWatch(result.put)
    assert result.get(timeout=30).source.startswith("Azure")
    assert server.late_events == 0
    server.close()


def test_a_metadata_server_of_another_cloud_at_the_common_address(monkeypatch: pytest.MonkeyPatch) -> None:
    """All three have 169.254.169.254: a request for one cloud is answered by another with an error."""
    for cloud in SECONDS:
        server = MetadataServer(cloud)
        monkeypatch.setenv("AWS_EC2_METADATA_SERVICE_ENDPOINT", f"http://{server.host}")
        monkeypatch.setenv("GCE_METADATA_HOST", server.host)
        monkeypatch.setenv("HEADFOLD_AZURE_METADATA", f"http://{server.host}")
        answering = []
        for name, questions in CLOUDS.items():
            try:
                questions.recognise()
                answering.append(name)
            except (OSError, ValueError, KeyError):
                pass
        server.close()
        assert answering == [cloud]


def test_outside_of_a_cloud_nothing_is_watched_for_long(monkeypatch: pytest.MonkeyPatch) -> None:
    requested: list[int] = []

    def nobody() -> Any:
        requested.append(1)
        raise OSError("connection refused")

    monkeypatch.setattr(spot_notices, "CLOUDS", {"none": spot_notices.Cloud(nobody, nobody)})
    monkeypatch.setattr(spot_notices, "POLL_SECONDS", 0.0)
    watch = NoticeWatch(lambda _: None)
    watch.thread.join(10)
    assert not watch.thread.is_alive() and len(requested) == 3


@pytest.mark.parametrize(("drained", "trains", "seconds"), [(True, False, 0), (True, True, 1), (False, True, 0)])
def test_the_hook_of_a_container_waits_only_while_something_trains(
    monkeypatch: pytest.MonkeyPatch, drained: bool, trains: bool, seconds: float
) -> None:
    output: list[Notice] = []
    monkeypatch.setattr(spot_notices, "drain_node", lambda notice: (output.append(notice), drained)[1])
    monkeypatch.setattr(spot_notices, "_trains_here", lambda: trains)
    monkeypatch.setattr(sys, "argv", ["spot_notices", "--seconds", "1"])
    started = time.monotonic()
    assert spot_notices.leave_container() == (0 if drained else 1)
    assert seconds <= time.monotonic() - started < seconds + 10
    assert [notice.seconds for notice in output] == [1.0]


@pytest.mark.extended
@pytest.mark.timeout(900)
@pytest.mark.parametrize("cloud", ["EC2", "GCE"])
def test_a_training_saves_a_checkpoint_before_its_node_goes_and_resumes_elsewhere(
    tiny_job: Any, tmp_path: Path, cloud: str
) -> None:
    import torch
    from test_carrying import PLAN, SAME, Alone

    from trainers.jobs.run import run_job
    from trainers.settings import TrainSettings
    from trainers.zero import group_of_one

    sequences = torch.randint(0, 64, (60, 16), generator=torch.Generator().manual_seed(0))
    settings = TrainSettings(learning_rate=1e-4, cpus_per_worker=0.4)
    more: dict[str, Any] = {"milestones": (4000,), "max_failures": 0}
    job = tiny_job(tmp_path, PLAN, sequences, sequences[:4], settings, **more)
    (tmp_path / "job.json").write_text(job.to_json())
    environment = os.environ | {"PYTHONPATH": f"{REPOSITORY}:{REPOSITORY / 'tests' / 'helpers'}"}
    environment |= {"RAY_TRAIN_HEALTH_CHECK_INTERVAL_S": "0.2"}
    environment.pop("RAY_ADDRESS", None)
    environment.pop("RAY_TRAIN_ENABLE_PREEMPTION_WATCHER", None)
    command = [sys.executable, str(SCRIPT), str(tmp_path / "job.json"), cloud]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, check=False, timeout=800)
    assert done.returncode == 0, done.stderr[-4000:]
    happened = last_json(done.stdout)
    assert happened["checkpoint_before_the_end"] > 0
    assert happened["seconds_to_the_checkpoint"] < 15
    assert happened["nodes"][0] != happened["nodes"][1]
    group_of_one()
    from dataclasses import replace

    alone = replace(job, run_name="alone", out_dir=str(tmp_path / "alone" / "out"))
    expected = run_job(alone, Alone())["metrics"]
    assert {name: happened["report"][name] for name in SAME} == {name: expected[name] for name in SAME}
