"""The cluster of cluster.yaml, started on one machine: nodes come from zero, one is taken away, and all go again."""

from __future__ import annotations

import json
import shutil
import subprocess
import sys
import tempfile
import time
import urllib.error
import urllib.request
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import psutil
import pytest
from one_machine import REPOSITORY, OneMachine

pytestmark = [pytest.mark.extended, pytest.mark.timeout(900)]

STEPS = 30
SCRIPT = REPOSITORY / "tests" / "repository" / "cluster_trials.py"


@pytest.fixture(scope="module")
def cluster() -> Iterator[OneMachine]:
    folder = Path(tempfile.mkdtemp(prefix="hf", dir="/tmp"))  # a short path, for sockets
    created = OneMachine(folder)
    try:
        created.start()
        yield created
    finally:
        created.stop()
        shutil.rmtree(folder, ignore_errors=True)


def alive(cluster: OneMachine) -> list[str]:
    """Ids of the workers whose first process lives."""
    result = []
    for identity, node in cluster.nodes().items():
        try:
            if psutil.Process(node["pid"]).status() != psutil.STATUS_ZOMBIE:
                result.append(identity)
        except psutil.NoSuchProcess:
            continue
    return result


def until(condition: Callable[[], Any], seconds: float, what: str, cluster: OneMachine) -> Any:
    deadline = time.monotonic() + seconds
    while time.monotonic() < deadline:
        result = condition()
        if result:
            return result
        time.sleep(0.5)
    pytest.fail(f"no {what} after {seconds} s: {cluster.logs()}")


def steps_of(storage: Path) -> dict[str, list[dict[str, Any]]]:
    """The records of each trial, one per step."""
    return {f.stem: [json.loads(line) for line in f.read_text().splitlines()] for f in storage.glob("steps/*.jsonl")}


SIZE = """
import json
from dataclasses import asdict
from orchestrator.cluster.capacity import concurrency, live_nodes
from orchestrator.cluster.placement import Demand
from orchestrator.cluster.session import connected
from orchestrator.config.schema import read_search_config

with connected() as nodes:
    room = concurrency(nodes, Demand.of(read_search_config("configs/llama2-7b.yaml")))
    print(json.dumps({"room": room, "present": len(live_nodes()), "nodes": [asdict(some) for some in nodes]}))
"""


def test_a_cluster_counts_at_its_full_size_before_any_node_is_there(cluster: OneMachine) -> None:
    environment = cluster.environment | {"RAY_ADDRESS": f"127.0.0.1:{cluster.gcs}", "PYTHONPATH": str(REPOSITORY)}
    script = [sys.executable, "-c", SIZE]
    process = subprocess.run(script, env=environment, cwd=REPOSITORY, capture_output=True, text=True, check=False)
    assert process.returncode == 0, process.stderr
    size = json.loads(process.stdout.splitlines()[-1])
    assert (size["room"], size["present"]) == (2, 1)  # two nodes of eight A100, one trial each
    described = cluster.config["available_node_types"]
    counted = {(some["count"], *sorted(some["resources"].items())) for some in size["nodes"]}
    assert counted == {
        (kind.get("max_workers", 1), *sorted((name, n) for name, n in kind["resources"].items() if n))
        for kind in described.values()
    }


def test_workers_come_from_zero_one_is_lost_in_mid_trial_and_all_go(cluster: OneMachine) -> None:
    described = cluster.config["available_node_types"]
    storage = cluster.shared / "trials"
    assert alive(cluster) == []
    gpus = described["gpu_a10g"]["resources"]["GPU"]
    driver = subprocess.Popen(
        [sys.executable, str(SCRIPT), str(storage), "2", str(gpus), str(STEPS), "0.5"],
        env=cluster.environment | {"RAY_ADDRESS": f"127.0.0.1:{cluster.gcs}"},
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    )
    try:
        until(
            lambda: len(steps_of(storage)) == 2 and min(map(len, steps_of(storage).values())) >= 3,
            300,
            "third step of both trials",
            cluster,
        )
        assert len(alive(cluster)) == 2
        hit, before = min(steps_of(storage).items(), key=lambda trial: len(trial[1]))  # the other may be near its end
        assert len(before) < STEPS - 5
        lost = before[-1]["node"]
        cluster.kill(lost)
        out = driver.communicate(timeout=400)[0]
    finally:
        driver.kill()
    assert driver.returncode == 0, out
    (report,) = [line for line in out.splitlines() if line.startswith("{")]  # Ray also reports the lost node
    assert json.loads(report)["errors"] == 0
    for trial, steps in steps_of(storage).items():
        assert sorted({s["step"] for s in steps}) == list(range(1, STEPS + 1))
        for step in steps:
            own = {k: v for k, v in step["resources"].items() if k in described["gpu_a10g"]["resources"]}
            assert own == described["gpu_a10g"]["resources"]
        starts = [s["from"] for s in steps if s["step"] == s["from"] + 1]
        if trial == hit:
            assert len(starts) == 2 and starts[1] > 0  # from its checkpoint, not from the beginning
            assert len(steps) <= STEPS + 2  # at most what was under way is done again
            assert steps[-1]["node"] != lost
        else:
            assert starts == [0] and len(steps) == STEPS
    assert {node["type"] for node in cluster.nodes().values()} == {"gpu_a10g"}
    until(lambda: not alive(cluster), 120, "end of the idle workers", cluster)


def test_the_head_is_the_one_of_the_file(cluster: OneMachine) -> None:
    """Its commands unchanged, with tokens, and MLflow on the loopback address alone."""
    own = cluster.commands("head_start_ray_commands")
    written = [c for c in cluster.config["head_start_ray_commands"] if c != "ray stop"]
    assert len(own) == len(written) == 2
    for run, command in zip(own, written, strict=True):
        stored = [word for word in command.split() if word in run.split()]
        assert len(stored) >= len(command.split()) - 2  # a port and a folder differ
    with pytest.raises(urllib.error.HTTPError) as refused:
        urllib.request.urlopen(f"http://127.0.0.1:{cluster.dashboard}/api/jobs/", timeout=30)
    assert refused.value.code == 401
    cluster.wait_for_mlflow()
    listening = {
        c.laddr.ip
        for process in cluster.started
        for p in [psutil.Process(process.pid), *psutil.Process(process.pid).children(recursive=True)]
        for c in p.net_connections("tcp")
        if c.status == psutil.CONN_LISTEN and c.laddr.port in (cluster.mlflow, cluster.dashboard)
    }
    assert listening == {"127.0.0.1"}


def test_nothing_is_left_when_it_is_torn_down(cluster: OneMachine) -> None:
    assert cluster.stop() == []
    assert (cluster.shared / "mlflow" / "backup.db").exists()  # the last copy, made at the end
