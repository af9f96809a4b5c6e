"""The cluster of cluster.yaml on one machine: its node types, resources and start commands, read from the file.

Only parts that one machine cannot provide are replaced: the provider (a node is a separate `ray start` here), ports,
memory, the idle time, the folders of the nodes and the bucket. Containers, mounts and installation are left out, and
`ray stop`, which would end every Ray of the machine.
"""

from __future__ import annotations

import contextlib
import copy
import json
import os
import subprocess
import sys
import time
import urllib.request
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import psutil
import yaml
from ray.autoscaler._private.fake_multi_node.node_provider import FakeMultiNodeProvider
from ray.autoscaler._private.util import prepare_config, validate_config
from ray.autoscaler.tags import TAG_RAY_NODE_KIND, TAG_RAY_USER_NODE_TYPE

from orchestrator.cluster.session import free_port

REPOSITORY = Path(__file__).resolve().parents[2]
BIN = Path(sys.executable).parent
HEAD_ID = "f" * 51 + "00000"
TOKEN = "0" * 64
CUT = {"ray stop"}
"""Commands of the file that are left out on one machine."""
PATIENCE = {"RAY_agent_register_timeout_ms": "120000", "RAY_raylet_start_wait_time_s": "180"}
"""A busy machine starts several nodes at once: slower than a cloud's machines start one each."""
NODE_FLAGS = "--disable-usage-stats --min-worker-port=0 --max-worker-port=0 --dashboard-agent-listen-port={agent}"
NODE_FLAGS += " --object-store-memory=100000000"


class OneMachineProvider(FakeMultiNodeProvider):
    """Starts each worker by the file's own commands, as a tree of processes that can be killed like a node."""

    def __init__(self, provider_config: dict[str, Any], cluster_name: str) -> None:
        super().__init__(provider_config, cluster_name)
        self._nodes[self._head_node_id]["tags"][TAG_RAY_USER_NODE_TYPE] = provider_config["head_type"]

    def non_terminated_nodes(self, tag_filters: dict[str, str]) -> list[str]:
        """A node whose processes have ended is gone, as a cloud reports a spot instance that was taken away."""
        with self.lock:
            for identity, node in list(self._nodes.items()):
                process = node.get("process")
                if process is not None and process.poll() is not None:
                    del self._nodes[identity]
        return super().non_terminated_nodes(tag_filters)

    def _create_node_with_resources_and_labels(
        self, node_config: Any, tags: dict[str, str], count: int, resources: dict[str, float], labels: Any
    ) -> None:
        with self.lock:
            identity = self._next_hex_node_id()
            kind = tags[TAG_RAY_USER_NODE_TYPE]
            own = Path(self.provider_config["folder"]) / "nodes" / identity
            own.mkdir(parents=True)
            environment = os.environ | _node_environment(identity, kind, dict(resources))
            environment |= {"RAY_HEAD_IP": self.provider_config["head_ip"]}
            *before, last = self.provider_config["worker_start"]
            script = "; ".join([*before, f"exec {last} --block"])
            with (own / "ray.log").open("w") as log:
                process = subprocess.Popen(
                    ["bash", "-c", script], env=environment, stdout=log, stderr=log, start_new_session=True
                )
            (own / "node.json").write_text(json.dumps({"pid": process.pid, "type": kind, "resources": resources}))
            self._nodes[identity] = {"tags": {TAG_RAY_NODE_KIND: "worker", **tags}, "process": process}

    def _terminate_node(self, node: dict[str, Any]) -> None:
        end_tree(node["process"].pid)
        node["process"].wait()


def _node_environment(identity: str, kind: str, resources: dict[str, float]) -> dict[str, str]:
    """Settings of `ray up` and the autoscaler for a node."""
    return {
        "RAY_OVERRIDE_NODE_ID_FOR_TESTING": identity,
        "RAY_CLOUD_INSTANCE_ID": identity,
        "RAY_NODE_TYPE_NAME": kind,
        "RAY_OVERRIDE_RESOURCES": json.dumps(resources),
        "RAY_enable_autoscaler_v2": "1",  # as `ray up` of this Ray does
    }


def end_tree(pid: int, *, kill: bool = False) -> None:
    """End a process and all that it has started; with `kill` at once, as a machine that is taken away."""
    try:
        root = psutil.Process(pid)
        tree = [root, *root.children(recursive=True)]
    except psutil.NoSuchProcess:
        return
    for process in tree if kill else tree[:1]:
        with contextlib.suppress(psutil.NoSuchProcess):
            process.kill() if kill else process.terminate()
    for remaining in psutil.wait_procs(tree, timeout=60)[1]:  # MLflow's keeper copies the database before it ends
        with contextlib.suppress(psutil.NoSuchProcess):
            remaining.kill()
    psutil.wait_procs(tree, timeout=10)


@dataclass
class OneMachine:
    """A running cluster in `folder` (short, for sockets). `idle_minutes` until a worker is ended."""

    folder: Path
    idle_minutes: float = 0.1
    config: dict[str, Any] = field(default_factory=lambda: yaml.safe_load((REPOSITORY / "cluster.yaml").read_text()))
    started: list[subprocess.Popen[bytes]] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.gcs, self.dashboard, self.mlflow = free_port(), free_port(), free_port()
        self.shared = self.folder / "shared"

    # ---- from the file ----------------------------------------------------------------------------------------

    def commands(self, key: str) -> list[str]:
        """Commands of the file, with the ports and folders of this machine instead of its own."""
        places = {
            ":6379": f":{self.gcs}",
            "--port=6379": f"--port={self.gcs}",
            "/mnt/headfold": str(self.shared),
            "/home/ray/mlflow": str(self.folder / "mlflow"),
        }
        result = [command for command in self.config[key] if command not in CUT]
        for old, new in places.items():
            result = [command.replace(old, new) for command in result]
        flags = NODE_FLAGS.format(agent=0 if key.startswith("worker") else free_port())
        return [f"{c} {flags}" if c.startswith("ray start") else c for c in result]

    @property
    def environment(self) -> dict[str, str]:
        """Environment of the head's container; `--env` of the file with this machine's folders."""
        options = self.config["docker"]["run_options"] + self.config["docker"]["head_run_options"]
        own = dict(o.removeprefix("--env ").split("=", 1) for o in options if o.startswith("--env "))
        for key, value in own.items():
            for old, new in (("/mnt/headfold", self.shared), ("/home/ray/mlflow", self.folder / "mlflow")):
                own[key] = own[key].replace(old, str(new))
            if value.startswith("s3://"):
                own[key] = str(self.shared / "mlflow" / "artifacts")
        own |= {"MLFLOW_TRACKING_URI": f"http://127.0.0.1:{self.mlflow}", "HEADFOLD_MLFLOW_PORT": str(self.mlflow)}
        inherited = {k: v for k, v in os.environ.items() if not k.startswith("RAY_")}
        return (
            inherited
            | own
            | {
                "HOME": str(self.folder),
                "PATH": f"{BIN}{os.pathsep}{os.environ['PATH']}",
                "PYTHONPATH": os.pathsep.join([str(REPOSITORY), str(REPOSITORY / "tests" / "repository")]),
                "RAY_TMPDIR": str(self.folder),
                "OMP_NUM_THREADS": "1",
                **PATIENCE,
            }
        )

    def bootstrap(self) -> dict[str, Any]:
        """Files that `ray up` leaves on the head for the autoscaler, with this machine as the provider."""
        config = prepare_config(copy.deepcopy(self.config))
        config["provider"] = {
            "type": "external",
            "module": "one_machine.OneMachineProvider",
            "gcs_address": f"127.0.0.1:{self.gcs}",
            "head_node_id": HEAD_ID,
            "head_type": config["head_node_type"],
            "head_ip": "127.0.0.1",
            "use_node_id_as_ip": True,
            "disable_node_updaters": True,
            "disable_launch_config_check": True,
            "launch_multiple": True,
            "folder": str(self.folder),
            "worker_start": self.commands("worker_start_ray_commands"),
        }
        config["idle_timeout_minutes"] = self.idle_minutes
        for key in ("docker", "auth"):
            config[key] = {}
        config["file_mounts"] = {}
        validate_config(config)
        return config

    # ---- running ----------------------------------------------------------------------------------------------

    def start(self) -> None:
        """Run the file's start commands of the head, and wait for the job server."""
        for own in (self.shared, self.folder / "mlflow"):
            own.mkdir(parents=True, exist_ok=True)
        for place in (p for p in self.config["file_mounts"] if p.startswith("/home/ray/.")):
            copy = self.folder / Path(place).relative_to("/home/ray")  # the token: nothing else is hidden
            copy.parent.mkdir(parents=True, exist_ok=True)
            copy.write_text(TOKEN)
        (self.folder / "ray_bootstrap_config.yaml").write_text(yaml.safe_dump(self.bootstrap()))
        head = self.config["head_node_type"]
        resources = self.config["available_node_types"][head]["resources"]
        environment = self.environment | _node_environment(HEAD_ID, head, resources)
        environment |= {"RAY_FAKE_CLUSTER": "1", "AUTOSCALER_UPDATE_INTERVAL_S": "1"}
        for number, command in enumerate(self.commands("head_start_ray_commands")):
            if command.startswith("ray start"):
                command += f" --block --node-ip-address=127.0.0.1 --dashboard-port={self.dashboard}"
                command += f" --ray-client-server-port={free_port()}"
            command = command.removesuffix("&").rstrip()  # run as a child, to be ended with the cluster
            with (self.folder / f"head-{number}.log").open("wb") as log:
                self.started.append(
                    subprocess.Popen(
                        ["bash", "-c", f"exec {command}"],
                        env=environment,
                        cwd=REPOSITORY,
                        stdout=log,
                        stderr=log,
                        start_new_session=True,
                    )
                )
        self._wait(f"http://127.0.0.1:{self.dashboard}/api/version", 90)

    def _wait(self, address: str, seconds: float) -> None:
        deadline = time.monotonic() + seconds
        while time.monotonic() < deadline:
            request = urllib.request.Request(address, headers={"Authorization": f"Bearer {TOKEN}"})
            with contextlib.suppress(OSError), urllib.request.urlopen(request, timeout=5):
                return
            time.sleep(0.3)
        raise TimeoutError(f"nothing answers at {address}: {self.logs()}")

    def wait_for_mlflow(self) -> None:
        self._wait(f"http://127.0.0.1:{self.mlflow}/health", 90)

    def logs(self) -> str:
        return "\n".join(f"{f.name}: {f.read_text()[-2000:]}" for f in sorted(self.folder.glob("head-*.log")))

    def nodes(self) -> dict[str, dict[str, Any]]:
        """The workers that were ever started, by id: pid, type, resources."""
        return {f.parent.name: json.loads(f.read_text()) for f in sorted(self.folder.glob("nodes/*/node.json"))}

    def kill(self, node: str) -> None:
        """Take away a node as the spot market does."""
        end_tree(self.nodes()[node]["pid"], kill=True)

    def stop(self) -> list[psutil.Process]:
        """End everything; the processes that had to be killed are returned."""
        for process in reversed(self.started):
            end_tree(process.pid)
        for node in self.nodes().values():
            end_tree(node["pid"])
        return self.left_over()

    def left_over(self) -> list[psutil.Process]:
        """Processes that belong to this cluster, by its folder in their command or environment."""
        result = []
        for process in psutil.process_iter():
            with contextlib.suppress(psutil.Error):
                own = str(self.folder) + "/" in " ".join(process.cmdline())
                if process.pid != os.getpid() and (own or process.environ().get("RAY_TMPDIR") == str(self.folder)):
                    result.append(process)
        for process in result:
            with contextlib.suppress(psutil.Error):
                process.kill()
        return result
