"""A search shaped for GPUs on a cluster that has none: Ray's own autoscaler and its provider of nodes on one machine.

The node types are those of `cluster.yaml`, from zero; their GPUs are numbers that Ray counts (`train.device=cpu`).
`python gpu_cloud.py FOLDER '{"node": NTH REPORT, "drain": NTH REPORT}' SETTING...` runs a search on it, takes away
nodes meanwhile, and prints the events as one JSON object. With `"monitor": 0` the autoscaler's process ends before the
search begins.
"""

from __future__ import annotations

import contextlib
import json
import os
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import psutil
import ray
import yaml
from ray._private.state import actors
from ray.autoscaler._private.fake_multi_node.node_provider import FAKE_HEAD_NODE_ID as HEAD
from ray.autoscaler._private.fake_multi_node.node_provider import FAKE_HEAD_NODE_TYPE as HEAD_TYPE
from ray.autoscaler._private.fake_multi_node.node_provider import FakeMultiNodeProvider
from ray.util.state import list_actors, list_tasks

from orchestrator.cluster.capacity import cluster_nodes, total
from orchestrator.cluster.session import DASHBOARD, free_port
from orchestrator.storage.journal import REPORT, read_events

REPOSITORY = Path(__file__).resolve().parents[3]
MARK = "HEADFOLD_GPU_CLOUD"
TYPE = "accelerator_type:"
PATIENCE = 1500.0
"""Seconds that the whole search may take."""
LARGE = """
from orchestrator.conversion import calibration
from orchestrator.main import run
calibration.SHARED_BYTES = 0
run()
"""
"""The command line, to which the statistics of any model are large: several workers make them."""
SETTINGS = {
    "RAY_FAKE_CLUSTER": "1",
    "AUTOSCALER_UPDATE_INTERVAL_S": "1",
    "AUTOSCALER_HEARTBEAT_TIMEOUT_S": "10",
    "RAY_AUTH_MODE": "disabled",
    "RAY_worker_niceness": "0",
    "RAY_enable_worker_prestart": "0",  # else a process for each CPU that a node says it has
    "RAY_prestart_worker_first_driver": "0",
    "RAY_health_check_initial_delay_ms": "1000",
    "RAY_health_check_period_ms": "1000",
    "RAY_health_check_failure_threshold": "5",
    "RAY_TRAIN_PREEMPTION_POLL_INTERVAL_S": "0.5",
    "HF_HUB_OFFLINE": "1",
    "OMP_NUM_THREADS": "1",
}


def of_type(resources: Mapping[str, float]) -> str | None:
    """Ray's name of the accelerators among some resources, of a bundle of a placement group too."""
    return next((name.removeprefix(TYPE).partition("_group_")[0] for name in resources if name.startswith(TYPE)), None)


def autoscaling(address: str) -> tuple[dict[str, Any], float]:
    """The autoscaler's configuration: `cluster.yaml` with nodes on this machine. Also CPUs of the head."""
    written = yaml.safe_load((REPOSITORY / "cluster.yaml").read_text())
    types = written["available_node_types"]
    head = types.pop(written["head_node_type"])["resources"]
    nodes = {name: {k: t[k] for k in ("resources", "min_workers", "max_workers")} for name, t in types.items()}
    # Its commands and files are for separate machines
    config = {key: type(value)() for key, value in written.items() if isinstance(value, (list, dict))}
    config |= {"worker_setup_commands": [], "cluster_synced_files": [], "file_mounts_sync_continuously": False}
    config |= {key: written[key] for key in ("cluster_name", "max_workers", "idle_timeout_minutes", "upscaling_speed")}
    # As one of Ray's own providers it would need a file that Ray's package does not contain [2.60]
    provider = {"type": "external", "module": f"{FakeMultiNodeProvider.__module__}.{FakeMultiNodeProvider.__name__}"}
    provider |= {"gcs_address": address, "launch_multiple": True, "head_node_id": HEAD}
    config |= {"provider": provider | {"disable_node_updaters": True, "disable_launch_config_check": True}}
    config |= {"available_node_types": {name: node | {"node_config": {}} for name, node in nodes.items()}}
    config["available_node_types"][HEAD_TYPE] = {"resources": head, "node_config": {}, "max_workers": 0}
    return config | {"head_node_type": HEAD_TYPE}, head["CPU"]


class Cloud:
    """Head and autoscaler. `kinds`: the accelerators of each node that was ever seen, by its id (None: the head)."""

    def __init__(self, folder: str) -> None:
        self.folder, port, self.dashboard = folder, free_port(), free_port()
        self.address = f"{ray.util.get_node_ip_address()}:{port}"
        self.kinds: dict[str, str | None] = {}
        config, cpus = autoscaling(self.address)
        file = Path(folder, "autoscaling.yaml")
        file.write_text(json.dumps(config))
        options = {"port": port, "dashboard-port": self.dashboard, "dashboard-host": "127.0.0.1", "temp-dir": folder}
        options |= {"autoscaling-config": file, "num-cpus": cpus, "dashboard-agent-listen-port": free_port()}
        options |= {"include-dashboard": "true", "disable-usage-stats": None}
        command = [str(Path(sys.executable).with_name("ray")), "start", "--head"]
        command += [f"--{key}" if value is None else f"--{key}={value}" for key, value in options.items()]
        as_head = {
            "RAY_enable_autoscaler_v2": "1",
            "RAY_CLOUD_INSTANCE_ID": HEAD,
            "RAY_OVERRIDE_NODE_ID_FOR_TESTING": HEAD,
        }
        started = subprocess.run(command, check=False, capture_output=True, text=True, env=os.environ | as_head)
        assert started.returncode == 0, started.stdout + started.stderr
        deadline = time.monotonic() + 120
        while not any("autoscaler/v2/monitor.py" in " ".join(p.cmdline()) for p in marked()):  # it starts last
            assert time.monotonic() < deadline, Path(folder, "session_latest/logs/monitor.err").read_text()
            time.sleep(0.2)

    def look(self) -> None:
        for node in ray.nodes():
            if node["Alive"]:
                self.kinds.setdefault(node["NodeID"], of_type(node["Resources"]))

    def busy(self, kind: str) -> list[str]:
        """Nodes with these accelerators on which Ray Train's workers live."""
        self.look()
        alive = [a for a in actors(actor_state_name="ALIVE").values() if a["ActorClassName"] == "RayTrainWorker"]
        return [a["Address"]["NodeID"] for a in alive if self.kinds.get(a["Address"]["NodeID"]) == kind]

    def alive(self, kind: str) -> list[str]:
        self.look()
        return [n["NodeID"] for n in ray.nodes() if n["Alive"] and self.kinds[n["NodeID"]] == kind]

    def kill(self, node: str) -> None:
        """Lose a machine: its raylet, and all processes that it had started."""
        for process in marked():
            if "raylet" in process.name() and f"--node-id={node}" in " ".join(process.cmdline()):
                for child in [*process.children(recursive=True), process]:
                    with contextlib.suppress(psutil.Error):
                        child.kill()
                return
        raise AssertionError(f"no raylet of node {node}")

    def drain(self, node: str) -> None:
        """Notice as a spot market gives it: the node is lost when its time is over."""
        command = [str(Path(sys.executable).with_name("ray")), "drain-node", "--address", self.address]
        command += ["--node-id", node, "--reason", "DRAIN_NODE_REASON_PREEMPTION", "--reason-message", "spot"]
        subprocess.run([*command, "--deadline-remaining-seconds", "10"], check=True, capture_output=True)
        time.sleep(10)
        if node in [n["NodeID"] for n in ray.nodes() if n["Alive"]]:
            self.kill(node)


def marked() -> list[psutil.Process]:
    result = []
    for process in psutil.process_iter():
        with contextlib.suppress(psutil.Error, OSError):
            mark = f"{MARK}={os.environ[MARK]}".encode() in Path(f"/proc/{process.pid}/environ").read_bytes()
            if mark and process.pid != os.getpid() and process.status() != psutil.STATUS_ZOMBIE:
                result.append(process)
    return result


def end_monitor() -> None:
    """The autoscaler's process, as the kernel ends one where memory is short."""
    for process in marked():
        if "autoscaler/v2/monitor.py" in " ".join(process.cmdline()):
            process.kill()
            process.wait(30)


@contextlib.contextmanager
def cloud() -> Iterator[Cloud]:
    folder = tempfile.mkdtemp(prefix="hf-ray-", dir="/tmp")  # short: paths of sockets are limited
    paths = [str(REPOSITORY), os.environ.get("PYTHONPATH")]
    os.environ.update(SETTINGS, **{MARK: folder, "PYTHONPATH": os.pathsep.join(filter(None, paths))})
    try:
        created = Cloud(folder)
        os.environ[DASHBOARD] = f"http://127.0.0.1:{created.dashboard}"
        ray.init(address=created.address, logging_level="ERROR", log_to_driver=False)
        yield created
    finally:
        ray.shutdown()
        for process in marked():
            with contextlib.suppress(psutil.Error):
                process.kill()
        shutil.rmtree(folder, ignore_errors=True)


def reports(journal: Path) -> int:
    return sum(event["event"] == REPORT for event in read_events(journal)) if journal.exists() else 0


def misplaced(made: Cloud) -> list[str]:
    """Tasks and actors that ran on other accelerators than the requested ones."""
    wrong = []
    tasks: list[Any] = list_tasks(limit=10_000, detail=True, timeout=300)  # of a busy machine
    processes: list[Any] = list_actors(limit=10_000, detail=True)
    requested = [(t.name, t.required_resources or {}, t.node_id) for t in tasks]
    requested += [(a.class_name, a.required_resources or {}, a.node_id) for a in processes]
    placed = [(name, needs, made.kinds.get(str(node))) for name, needs, node in requested if node]
    for name, needs, kind in placed:
        if of_type(needs) not in (None, kind):
            wrong.append(f"{name} asked for {of_type(needs)} and ran on {kind or 'the head'}")
    return wrong


def main(folder: Path, losses: Mapping[str, int], settings: Sequence[str]) -> dict[str, Any]:
    command = [sys.executable, "-c", LARGE, "search", "configs/llama2-7b.yaml", *settings]
    command += [f"storage={folder / 'runs'}", "--json", str(folder / "outcome.json")]
    with cloud() as created, (folder / "log").open("wb") as log:
        out: dict[str, Any] = {"at_first": sorted(kind or "head" for kind in _kinds(created)), "trained_on": []}
        if "monitor" in losses:
            end_monitor()
        own = os.environ | {"RAY_ADDRESS": created.address}
        search = subprocess.Popen(command, cwd=REPOSITORY, env=own, stdout=log, stderr=log, start_new_session=True)
        journal, todo = folder / "runs" / "gpus" / "journal.jsonl", dict(losses)
        deadline = time.monotonic() + PATIENCE
        while search.poll() is None and time.monotonic() < deadline:
            time.sleep(0.5)
            there = created.busy("A100")
            out["trained_on"] = sorted({*out["trained_on"], *(created.kinds[n] or "head" for n in there)})
            if "node" in todo and reports(journal) >= todo["node"] and (planning := created.alive("A10G")):
                created.kill(planning[0])
                out["killed"] = todo.pop("node")
            if "drain" in todo and reports(journal) >= todo["drain"] and there:
                created.drain(there[0])
                out["drained"] = todo.pop("drain")
        if search.poll() is None:
            os.killpg(search.pid, signal.SIGKILL)
        out |= {"code": search.wait(), "misplaced": misplaced(created), "log": (folder / "log").read_text()}
        out["nodes"] = {kind: list(created.kinds.values()).count(kind) for kind in ("A10G", "A100")}
        out["gpus"] = total(cluster_nodes(), "GPU")  # of all present nodes
    return out


def _kinds(made: Cloud) -> list[str | None]:
    made.look()
    return list(made.kinds.values())


if __name__ == "__main__":
    print(json.dumps(main(Path(sys.argv[1]), json.loads(sys.argv[2]), sys.argv[3:])))
