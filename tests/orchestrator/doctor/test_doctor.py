"""`headfold doctor` on a real Ray: what it says of a cluster that will do, and of faults that can be made here."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
import ray
from command_line import run_here
from gated_hub import GATED, OPEN, TOKEN, gated_hub
from json_output import last_json

from orchestrator.doctor import probes
from orchestrator.doctor.calls import NoAnswerError, alive_nodes, call
from orchestrator.doctor.judgement import judge_hub

Checks = Mapping[str, list[dict[str, Any]]]
FEW = ("nodes", "devices", "versions", "clocks", "shared-storage", "storage", "disk", "hub", "mlflow")


def doctor(file: Path, *words: str) -> tuple[Any, Checks]:
    """Its exit code, and its findings by check."""
    code = run_here("doctor", *words, "--probe-mib", "1", "--json", file)
    findings = json.loads(file.read_text())["findings"]
    return code, {name: [one for one in findings if one["check"] == name] for name in {f["check"] for f in findings}}


def states(checks: Checks) -> dict[str, set[str]]:
    return {name: {one["status"] for one in result} for name, result in checks.items()}


def only(*names: str) -> list[str]:
    return [word for name in names for word in ("--only", name)]


def test_a_cluster_that_will_do(
    ray_cluster: None, empty_store: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    storage = tmp_path / "runs"
    storage.mkdir()
    shutil.copy(empty_store, storage / "mlflow.db")
    code, checks = doctor(tmp_path / "d.json", "--storage", str(storage), *only(*FEW))
    result = states(checks)
    assert code == (2 if "failed" in result["disk"] else 0)
    # How fast and how empty a disk must be is a test of the judgement: this machine's may be busy or full
    assert result.pop("storage") <= {"ok", "warning"}
    assert result.pop("disk") <= {"ok", "failed"}
    assert result == {name: {"ok"} for name in FEW if name not in ("storage", "disk")}
    assert checks["storage"][0]["numbers"]["write_bytes_per_second"] > 0
    assert checks["clocks"][0]["numbers"]["seconds"] < 0.5
    output = capsys.readouterr().out
    assert "torch 2." in output and "nothing is needed from it" in output
    remaining = [path.name for path in storage.iterdir()]
    assert set(remaining) <= {"mlflow.db", ".mlflow.db.opening"}, "a lock stays, and nothing else"


def test_storage_that_cannot_be_written_stops_no_other_check(
    ray_cluster: None, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "file").write_text("")
    expected = only("shared-storage", "storage", "versions", "mlflow", "training")
    code, checks = doctor(tmp_path / "d.json", "--storage", str(tmp_path / "file" / "runs"), *expected)
    assert code == 2
    assert states(checks) == {
        "shared-storage": {"failed"},
        "storage": {"skipped"},
        "versions": {"ok"},
        "mlflow": {"skipped"},
        "training": {"skipped"},
    }
    assert "file/runs" in checks["shared-storage"][0]["result"] and checks["shared-storage"][0]["remedy"]
    printed = capsys.readouterr()
    assert "failed: shared-storage" in printed.err and "Traceback" not in printed.err


def test_workers_that_no_node_can_hold(ray_cluster: None, tmp_path: Path) -> None:
    words = ["--config", "configs/demo.yaml", "train.num_workers=64", "train.batch_size=64", f"storage={tmp_path}"]
    code, checks = doctor(tmp_path / "d.json", *words, *only("config", "all-reduce", "clocks"))
    assert code == 2
    assert states(checks) == {"config": {"failed", "skipped"}, "all-reduce": {"skipped"}, "clocks": {"ok"}}
    assert "train.num_workers" in checks["config"][0]["result"]


def test_what_hangs_is_ended(ray_cluster: None, tmp_path: Path) -> None:
    def hang(file: str) -> None:
        Path(file).write_text(str(os.getpid()))
        time.sleep(600)

    node, file = alive_nodes()[0], tmp_path / "pid"
    with pytest.raises(NoAnswerError, match="within 5 s"):
        call(hang, str(file), node=node, seconds=5)
    deadline = time.monotonic() + 30
    while Path("/proc", file.read_text()).exists():
        assert time.monotonic() < deadline, "its process goes on"
        time.sleep(0.1)
    assert call(lambda: 1, node=node, seconds=30) == 1


def test_a_gated_model_without_a_token_and_with_one(ray_cluster: None, tmp_path: Path) -> None:
    """In a separate process, since huggingface_hub reads its settings once."""

    def seen(token: str | None, *models: str) -> Any:
        with gated_hub() as address:
            environment = {"HF_ENDPOINT": address, "HF_HUB_OFFLINE": "0", "HF_HOME": str(tmp_path)}
            environment |= {} if token is None else {"HF_TOKEN": token}
            task: Any = ray.remote(num_cpus=0, runtime_env={"env_vars": environment})(probes.hub_facts)
            return ray.get(task.remote(list(models), []))

    without = seen(None, GATED, OPEN, "nobody/nothing")
    assert without["reachable"] and not without["token"] and set(without["missing"]) == {GATED, "nobody/nothing"}
    result = judge_hub({"a": without}, [GATED, OPEN])
    assert [one.status for one in result] == ["failed", "failed"]
    assert "no token" in result[0].result and "HF_TOKEN" in result[0].remedy
    allowed, stranger = seen(TOKEN, GATED), seen("hf_other", GATED)
    assert judge_hub({"a": allowed}, [GATED])[0].status == "ok"
    refused = judge_hub({"a": stranger}, [GATED])
    assert refused[0].status == "failed" and f"https://huggingface.co/{GATED}" in refused[0].remedy
    assert TOKEN not in str([allowed, result, refused]) and "hf_other" not in str([stranger, refused])


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["--only", "nccl"], "must be one of"),
        (["train.seed=1"], "--config FILE"),
        (["--config", "none.yaml"], "no configuration file"),
        (["--config", "configs/demo.yaml", "--storage", "x"], "storage=x"),
        (["--config", "configs/demo.yaml", "train.sed=1"], "train.sed"),
    ],
)
def test_wrong_words_are_refused(words: list[str], message: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert run_here("doctor", *words) == 2
    assert message in capsys.readouterr().err


SCRIPT = Path(__file__).with_name("sick_cluster.py")


@pytest.fixture(scope="module")
def examined(tmp_path_factory: pytest.TempPathFactory) -> Any:
    """Two nodes on this machine, see `sick_cluster.py`."""
    folder = tmp_path_factory.mktemp("examined")
    environment = os.environ | {"RAY_TRAIN_ENABLE_PREEMPTION_WATCHER": "0"}
    command = [sys.executable, str(SCRIPT), str(folder)]
    done = subprocess.run(command, cwd=SCRIPT.parents[3], env=environment, capture_output=True, text=True, timeout=840)
    assert done.returncode == 0, done.stderr[-4000:]
    return last_json(done.stdout)


def statuses(result: Any) -> dict[str, set[str]]:
    names = {one["check"] for one in result["findings"]}
    return {name: {one["status"] for one in result["findings"] if one["check"] == name} for name in names}


@pytest.mark.extended
def test_every_check_on_two_nodes(examined: Any) -> None:
    result, (first, second) = examined["well"], examined["well"]["nodes"]
    assert result["code"] == 0 and result["ok"] and first != second
    bad = {name: states for name, states in statuses(result).items() if not states <= {"ok", "warning", "skipped"}}
    assert not bad
    assert statuses(result)["config"] == {"skipped"}
    by_check = {one["check"]: one for one in result["findings"]}
    assert "gloo" in by_check["all-reduce"]["result"] and by_check["all-reduce"]["numbers"]["workers"] == 2
    assert "one ZeRO 3 step in bfloat16, 2 worker(s)" in by_check["training"]["result"]
    assert "flash (CPU)" in by_check["attention"]["result"]


@pytest.mark.extended
def test_gpus_that_only_ray_counts(examined: Any) -> None:
    result = examined["gpus"]
    assert result["code"] == 2
    red = {name for name, states in statuses(result).items() if "failed" in states}
    assert red == {"devices", "attention", "all-reduce", "training"}
    assert all(one["remedy"] for one in result["findings"] if one["status"] == "failed")
    assert examined["left"] == []


@pytest.mark.extended
def test_as_a_ray_job(examined: Any) -> None:
    assert examined["job"]["ended"], examined["job"]["log"][-3000:]
    assert statuses(examined["job"]) == {"nodes": {"ok"}, "versions": {"ok"}}


@pytest.mark.extended
def test_a_sick_node_is_named(examined: Any) -> None:
    result = examined["sick"]
    assert result["code"] == 2 and len(result["nodes"]) == 4
    assert statuses(result) == {"nodes": {"ok"}, "disk": {"ok"}, "versions": {"failed"}, "clocks": {"failed"}}
    (version,) = [one for one in result["findings"] if one["check"] == "versions"]
    (clock,) = [one for one in result["findings"] if one["check"] == "clocks"]
    assert version["result"].startswith("numpy differs: ") and "0.0.1 on " in version["result"]
    assert clock["numbers"]["seconds"] == pytest.approx(90, abs=2)
    assert clock["result"].partition(":")[0] in version["result"].rpartition("0.0.1 on ")[2]
