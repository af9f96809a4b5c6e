"""One search under a seeded schedule of kills: the driver, workers, nodes, the MLflow server, the disk.

A separate Ray cluster runs through all of it: a head without CPUs, and a node that is killed and replaced. The driver
is a separate process, as `ray job submit` starts one, and is started again with `--resume` when it has ended.
"""

from __future__ import annotations

import contextlib
import copy
import json
import os
import random
import resource
import shutil
import signal
import subprocess
import sys
import tempfile
import time
import urllib.request
import uuid
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import psutil
import yaml
from json_output import last_json
from metadata_server import MetadataServer

from attention.io.file_lock import file_lock
from orchestrator.cluster.session import DASHBOARD, free_port
from orchestrator.storage.journal import read_events
from orchestrator.storage.manifest import STATE_FOLDER
from orchestrator.storage.mirror import working_folder

REPOSITORY = Path(__file__).resolve().parents[3]
MARK = "HEADFOLD_CHAOS"
"""A variable in the environment of every process of a run, by which its remaining processes are found."""
KINDS = ("driver", "worker", "node", "mlflow", "disk")
OF_RAY = ("_AutoscalingCoordinatorActor",)
"""Processes that Ray Train starts once per cluster and leaves there [2.60]."""
MORE_KINDS = (*KINDS, "terminate", "interrupt", "trial", "drain", "notice")
AT_AN_ADDRESS = ("refill", "stale", "overtaken")
"""Faults of the working folder of an address, and of the lock in it."""
WAIT = float(os.environ.get("HEADFOLD_CHAOS_PATIENCE", "1200"))
"""Seconds that any one thing may take on a machine that does other things too."""


LEFTOVERS = """
import json, sys, time
import ray
from ray._private.state import actors  # Ray's public list asks the dashboard, of another Ray where its address is set
from ray.util.placement_group import placement_group_table

address, *of_ray = sys.argv[1:]
ray.init(address=address, logging_level="ERROR", log_to_driver=False)
deadline = time.monotonic() + 60
while True:
    left = [g["placement_group_id"] for g in placement_group_table().values() if g["state"] != "REMOVED"]
    alive = [actor["ActorClassName"] for actor in actors(actor_state_name="ALIVE").values()]
    left += [name for name in alive if name not in of_ray]
    if not left or time.monotonic() > deadline:
        break
    time.sleep(0.2)
print(json.dumps(left))
"""


def wait_for(what: str, condition: Callable[[], Any], patience: float = WAIT) -> Any:
    deadline = time.monotonic() + patience
    while not (result := condition()):
        if time.monotonic() > deadline:
            raise TimeoutError(f"{what} did not happen within {patience:.0f} s")
        time.sleep(0.1)
    return result


class Nodes:
    """A head without CPUs and one node with one CPU, in a separate folder; or all on one, where none is killed.

    Nodes on one machine share the folder that Ray unpacks a job's files into, and take it from each other.
    """

    def __init__(self, mark: str, one: bool, preemptions: bool) -> None:
        from local_cluster import local_cluster

        self.folder = tempfile.mkdtemp(prefix="hf-ray-", dir="/tmp")  # short: paths of sockets are limited
        settings = self._settings(mark) | {"RAY_TRAIN_ENABLE_PREEMPTION_WATCHER": str(int(preemptions))}
        self._before = {key: os.environ.get(key) for key in (*settings, DASHBOARD)}
        os.environ.update(settings)
        os.environ.pop(DASHBOARD, None)  # that of other tests' Ray must not be used
        self.dashboard = free_port()
        head = {"num_cpus": int(one), "include_dashboard": True, "dashboard_host": "127.0.0.1", "temp_dir": self.folder}
        head |= {"dashboard_port": self.dashboard, "dashboard_agent_listen_port": free_port()}
        self.cluster: Any = local_cluster(head)
        # As `ray start` does: a job, which Ray gives no address, else takes any other Ray of the machine for its own
        Path(self.folder, "ray_current_cluster").write_text(self.cluster.address)
        self.metadata: MetadataServer | None = None
        self.node = None if one else self._new_node()

    def _new_node(self) -> Any:
        """A node with a separate metadata server, as a cloud's machine has one."""
        if self.metadata is not None:
            self.metadata.close()
        self.metadata = MetadataServer("EC2")
        return self.cluster.add_node(num_cpus=1, env_vars=self.metadata.environment)

    def _settings(self, mark: str) -> dict[str, str]:
        return {
            MARK: mark,
            "RAY_AUTH_MODE": "disabled",
            "RAY_worker_niceness": "0",  # otherwise other tests' processes come first, and the search starves
            "RAY_health_check_initial_delay_ms": "1000",
            "RAY_health_check_period_ms": "1000",
            "RAY_health_check_failure_threshold": "5",
            "RAY_TRAIN_PREEMPTION_POLL_INTERVAL_S": "0.5",
            "PATH": f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}",  # a job says `python`
            "PYTHONPATH": os.pathsep.join(filter(None, [str(REPOSITORY), os.environ.get("PYTHONPATH")])),
        }

    def replace_node(self) -> None:
        """Kill the node as a cloud takes a machine away, and bring another."""
        self.cluster.remove_node(self.node, allow_graceful=False)
        self.node = self._new_node()

    def announce_end(self, seconds: int = 10) -> None:
        """Have the node's metadata server announce its end, bring another, and take it away then."""
        assert self.metadata is not None
        self.metadata.announce(seconds)
        time.sleep(seconds / 2)  # it is polled every other second
        leaving, self.node = self.node, self._new_node()
        time.sleep(seconds / 2)
        self.cluster.remove_node(leaving, allow_graceful=False)

    def drain_node(self, seconds: int = 10) -> None:
        """Give notice to the node as a cloud does, bring another, and take the first away when its time is over."""
        ray = str(Path(sys.executable).with_name("ray"))
        command = [ray, "drain-node", "--address", self.cluster.address, "--node-id", self.node.node_id]
        command += ["--reason", "DRAIN_NODE_REASON_PREEMPTION", "--reason-message", "chaos"]
        subprocess.run([*command, "--deadline-remaining-seconds", str(seconds)], check=True, capture_output=True)
        leaving, self.node = self.node, self._new_node()
        time.sleep(seconds)
        self.cluster.remove_node(leaving, allow_graceful=False)

    def leftovers(self) -> list[str]:
        """Placement groups and actors that are alive, when nothing runs."""
        # In a separate process: this one may be connected to another Ray, that of other tests
        process = subprocess.run(
            [sys.executable, "-c", LEFTOVERS, self.cluster.address, *OF_RAY],
            capture_output=True,
            text=True,
            check=False,
            timeout=300,
        )
        assert process.returncode == 0, process.stderr
        return last_json(process.stdout)

    def close(self) -> None:
        """Idempotent."""
        if self.cluster is None:
            return
        self.cluster.shutdown()
        self.cluster = None
        if self.metadata is not None:
            self.metadata.close()
        for key, value in self._before.items():
            os.environ.pop(key, None)
            if value is not None:
                os.environ[key] = value
        shutil.rmtree(self.folder, ignore_errors=True)


class Server:
    """An MLflow server that can be killed and comes back at the same address."""

    def __init__(self, folder: Path, empty_store: Path, mark: str) -> None:
        self.folder, self.port, self.mark = folder, free_port(), mark
        self.process: subprocess.Popen[bytes] | None = None
        folder.mkdir(parents=True)
        shutil.copy(empty_store, folder / "server.db")
        self.begin()

    @property
    def address(self) -> str:
        return f"http://127.0.0.1:{self.port}"

    def start(self) -> None:
        self.begin()
        wait_for("the MLflow server", self._answers)

    def begin(self) -> None:
        """Start the process, unless it runs; it answers some seconds later."""
        if self.process is not None:
            return
        command = [sys.executable, "-m", "mlflow", "server", "--host", "127.0.0.1", "--port", str(self.port)]
        command += ["--workers", "1", "--backend-store-uri", f"sqlite:///{self.folder}/server.db"]
        self.process = subprocess.Popen(
            [*command, "--artifacts-destination", str(self.folder / "artifacts")],
            env=os.environ | {"MLFLOW_SERVER_ENABLE_JOB_EXECUTION": "false", MARK: self.mark},
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
            start_new_session=True,
        )

    def _answers(self) -> bool:
        assert self.process is None or self.process.poll() is None, "the server has ended; was its port taken?"
        with contextlib.suppress(OSError), urllib.request.urlopen(f"{self.address}/health", timeout=2):
            return True
        return False

    def kill(self) -> None:
        if self.process is not None:
            os.killpg(self.process.pid, signal.SIGKILL)
            self.process.wait()
            self.process = None


class Disk:
    """A storage that can be full: a small separate tmpfs, or, without the right to mount one, a limit on the size of
    the driver's files, which fails the journal in the same way."""

    def __init__(self, folder: Path, megabytes: int) -> None:
        self.folder, self.mounted = folder, False
        folder.mkdir(parents=True)
        if os.geteuid() == 0:
            size = f"size={megabytes}m"
            mounted = subprocess.run(["mount", "-t", "tmpfs", "-o", size, "tmpfs", str(folder)], check=False)
            self.mounted = mounted.returncode == 0

    def fill(self, driver: int, journal: Path) -> None:
        if not self.mounted:
            size = journal.stat().st_size if journal.exists() else 0
            resource.prlimit(driver, resource.RLIMIT_FSIZE, (size + 1, resource.RLIM_INFINITY))
            return
        with contextlib.suppress(OSError), (self.folder / "ballast").open("wb", buffering=0) as ballast:
            while ballast.write(bytes(1 << 20)):
                pass
        with contextlib.suppress(OSError), (self.folder / "ballast").open("ab", buffering=0) as ballast:
            while ballast.write(bytes(1)):
                pass

    def empty(self) -> None:
        (self.folder / "ballast").unlink(missing_ok=True)

    def close(self) -> None:
        if self.mounted:
            subprocess.run(["umount", "--lazy", str(self.folder)], check=True)


class Arena:
    """Cluster, MLflow server and storage of one run, and the driver on it."""

    def __init__(
        self,
        folder: Path,
        empty_store: Path,
        settings: Sequence[str],
        megabytes: int,
        address: str | None = None,
        **nodes: bool,
    ) -> None:
        self.name, self.experiment = "chaos", "headfold"
        self.mark = uuid.uuid4().hex
        self.disk, self.settings = Disk(folder / "storage", megabytes), list(settings)
        self.storage, self.scratch = folder / "storage", folder / "tmp"
        self.address, self.home = address, folder / "home"
        if address is not None:
            self.storage = working_folder(address, self.home)
        self.scratch.mkdir()
        self.outcome_file, self.log = folder / "outcome.json", folder / "driver.log"
        self.config, self.token = folder / "search.yaml", f"hunter2-{uuid.uuid4().hex}"
        self.driver: subprocess.Popen[bytes] | None = None
        self.starts = 0
        with contextlib.ExitStack() as created:
            created.callback(self.disk.close)
            self.server = Server(folder / "mlflow", empty_store, self.mark)
            created.callback(self.server.kill)
            self.nodes = Nodes(self.mark, **nodes)
            created.callback(self.nodes.close)
            self.server.start()
            created.pop_all()  # all of it stands: `close` ends it
        record = yaml.safe_load((REPOSITORY / "configs" / "demo.yaml").read_text())
        record["tracking"] = {"uri": self.server.address.replace("//", f"//user:{self.token}@")}
        self.config.write_text(yaml.safe_dump(record))

    @contextlib.contextmanager
    def beside(self, name: str, *changes: str) -> Iterator[Arena]:
        """Another search on the same cluster and server, with a separate experiment and temporary files."""
        other = copy.copy(self)
        other.name = other.experiment = name
        other.settings = [*self.settings, *changes, f"name={name}", f"tracking.experiment={name}"]
        other.outcome_file, other.log = self.log.with_name(f"{name}.json"), self.log.with_name(f"{name}.log")
        other.scratch, other.driver, other.starts = self.scratch.with_name(f"tmp-{name}"), None, 0
        other.scratch.mkdir()
        try:
            yield other
        finally:
            if other.running:
                other.kill_driver(signal.SIGKILL)

    @property
    def search(self) -> Path:
        return self.storage / self.name

    @property
    def journal(self) -> Path:
        return self.search / "journal.jsonl"

    @property
    def outcome(self) -> dict[str, Any]:
        return json.loads(self.outcome_file.read_text())

    def start(self) -> None:
        """The driver; from its second start on with --resume if there is a search to resume."""
        self.starts += 1
        begun = (self.search / "search.yaml").exists() or (self.address is not None and self.starts > 1)
        resume = ["--resume"] if begun else []
        with self.log.open("ab") as log:
            log.write(f"--- start {self.starts} {' '.join(resume)}\n".encode())
            self.driver = subprocess.Popen(
                [sys.executable, *self._command, *resume],
                cwd=REPOSITORY,
                env=os.environ | {"RAY_ADDRESS": self.nodes.cluster.address, **self._settings_of_driver},
                stdout=log,
                stderr=log,
                start_new_session=True,
            )

    def submit(self, identity: str, *changes: str) -> subprocess.Popen[str]:
        """The driver as a Ray job; returns the client, which streams its log."""
        address = f"http://127.0.0.1:{self.nodes.dashboard}"
        command = [str(Path(sys.executable).with_name("ray")), "job", "submit", "--address", address]
        command += ["--submission-id", identity, "--working-dir", str(REPOSITORY)]
        command += ["--runtime-env-json", json.dumps({"env_vars": self._settings_of_driver})]
        return subprocess.Popen(
            [*command, "--", "python", *self._command, *changes],
            cwd=REPOSITORY,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
        )

    @property
    def _command(self) -> list[str]:
        """The parent of the working folder, the repository or Ray's copy of it."""
        own = [f"storage={self.address or self.storage}", "--json", str(self.outcome_file)]
        return ["orchestrator/main.py", "search", str(self.config), *self.settings, *own]

    @property
    def _settings_of_driver(self) -> dict[str, str]:
        return {
            MARK: self.mark,
            "MLFLOW_HTTP_REQUEST_MAX_RETRIES": "0",
            "HF_HUB_OFFLINE": "1",
            "OMP_NUM_THREADS": "1",
            "TMPDIR": str(self.scratch),
            "HEADFOLD_HOME": str(self.home),
            "HEADFOLD_SYNC_SECONDS": "0.3",
        }

    @property
    def running(self) -> bool:
        return self.driver is not None and self.driver.poll() is None

    def kill_driver(self, *signals: int) -> None:
        """Signals with 3 seconds of grace after each but the last."""
        assert self.driver is not None
        for number in signals:
            with contextlib.suppress(ProcessLookupError):
                self.driver.send_signal(number)
            with contextlib.suppress(subprocess.TimeoutExpired):
                self.driver.wait(timeout=WAIT if number == signals[-1] else 3)

    def processes(self, *names: str) -> list[psutil.Process]:
        """Processes of this run whose title has one of `names`; all without."""
        result = []
        for process in psutil.process_iter():
            with contextlib.suppress(psutil.Error, OSError):
                own = f"{MARK}={self.mark}".encode() in Path(f"/proc/{process.pid}/environ").read_bytes()
                title = " ".join(process.cmdline())
                if own and process.status() != psutil.STATUS_ZOMBIE and (not names or any(n in title for n in names)):
                    result.append(process)
        return result

    def close(self) -> list[str]:
        """End everything; return the processes that remain."""
        if self.running:
            self.kill_driver(signal.SIGKILL)
        self.server.kill()
        self.nodes.close()

        def none_left() -> bool:
            return not self.processes()

        # A worker that waits for the head looks for it for 60 s (gcs_rpc_server_reconnect_timeout_s) before it ends
        with contextlib.suppress(TimeoutError):
            wait_for("the end of all processes", none_left, 180)
        remaining = [" ".join(p.cmdline()) for p in self.processes()]
        self.disk.close()
        return remaining


@contextlib.contextmanager
def arena(
    folder: Path,
    empty_store: Path,
    settings: Sequence[str],
    megabytes: int,
    *,
    one_node: bool = False,
    preemptions: bool = False,
    address: str | None = None,
) -> Iterator[Arena]:
    """`megabytes`: of the storage, if it is a separate disk; `preemptions`: whether Ray Train looks for notices;
    `address`: of the storage."""
    created = Arena(folder, empty_store, settings, megabytes, address, one=one_node, preemptions=preemptions)
    try:
        yield created
    finally:
        remaining = created.close()
        assert not remaining, f"left running: {remaining}"


def schedule(seed: int, kills: int) -> list[tuple[str, float]]:
    """Targets of the kills, each kind as often as the others, and the delays after events."""
    generator = random.Random(seed)
    kinds = KINDS if kills <= len(KINDS) else MORE_KINDS
    result = [kinds[index % len(kinds)] for index in range(kills)]
    generator.shuffle(result)
    return [(kind, 4 * generator.random()) for kind in result]


class Killer:
    """Runs a schedule over a search until it ends. `done`: kills by kind; `told`: the events, in words."""

    def __init__(self, place: Arena) -> None:
        self.place, self.done, self.told = place, Counter[str](), list[str]()

    def run(self, plan: Sequence[tuple[str, float]]) -> None:
        place = self.place
        place.start()
        begun = place.search / "search.yaml"  # killed before it is there, a search has not begun and another one begins
        wait_for("the search", lambda: begun.exists() or not place.running)
        for kind, delay in plan:
            self._something_happens()
            time.sleep(delay)
            if not place.running and place.driver is not None and place.driver.returncode == 0:
                raise AssertionError(f"the search ended before the kill of {kind}; {self.told}")
            getattr(self, f"_{kind}")()
            self.done[kind] += 1
            self.told.append(f"{kind} at {self._progress()}")
            self._go_on()
        place.server.start()
        for _ in range(3):  # a driver that a kill has cost its trial's last try may end with an error once
            assert place.driver is not None
            place.driver.wait(timeout=WAIT)
            if place.driver.returncode == 0:
                return
            place.start()
        raise AssertionError(f"the search does not end: {place.log.read_text()[-6000:]}")

    def _progress(self) -> tuple[int, int]:
        promoted = self.place.search / "promotion.json"
        return len(read_events(self.place.journal)), promoted.stat().st_mtime_ns if promoted.exists() else 0

    def _something_happens(self) -> None:
        """Wait for one more event of the journal or step of the promotion, so that every kill hits another place."""
        before = self._progress()
        wait_for("progress", lambda: self._progress() != before or not self.place.running)
        if not self.place.running:
            self._go_on()

    def _go_on(self) -> None:
        place = self.place
        if place.driver is not None and place.driver.poll() not in (None, 0):
            place.start()

    # ---- the kinds ---------------------------------------------------------------------------------------------

    def _driver(self) -> None:
        self.place.kill_driver(signal.SIGKILL)

    def _terminate(self) -> None:
        """End the driver as `ray job stop` does."""
        self.place.kill_driver(signal.SIGTERM, signal.SIGKILL)

    def _interrupt(self) -> None:
        self.place.kill_driver(signal.SIGINT)

    def _worker(self) -> None:
        self._kill_one("ray::RayTrainWorker")

    def _trial(self) -> None:
        self._kill_one("ray::ImplicitFunc", "ray::_train")

    def _kill_one(self, *names: str) -> None:
        with contextlib.suppress(TimeoutError):
            result = wait_for("a process to kill", lambda: self.place.processes(*names) or not self.place.running, 120)
            if result is not True:
                result[0].kill()

    def _refill(self) -> None:
        """The head is lost with its disk; another one has the address alone."""
        self.place.kill_driver(signal.SIGKILL)
        self._lose_folder()

    def _lose_folder(self) -> None:
        def gone() -> bool:
            shutil.rmtree(self.place.storage, ignore_errors=True)  # trials end a moment after their driver
            return not self.place.storage.exists()

        wait_for("the end of the working folder", gone)

    def _stale(self) -> None:
        """The head is replaced by one with a new disk, then comes back with its old one."""
        place, kept = self.place, self.place.storage.with_name("stale")
        self._interrupt()
        place.storage.rename(kept)
        behind = len(read_events(kept / place.name / "journal.jsonl"))
        place.start()
        wait_for("what the other has not", lambda: len(read_events(place.journal)) > behind or not place.running)
        self._interrupt()
        assert len(read_events(place.journal)) > behind
        self._lose_folder()
        kept.rename(place.storage)

    def _overtaken(self) -> None:
        """The driver stands still, another takes its search over, and it wakes up."""
        place, first = self.place, self.place.driver
        assert first is not None
        lock = place.search / "driver.lock"
        wait_for("the lock", lambda: lock.exists() and lock.stat().st_size > 0)
        self._stop_between_pushes(first)
        lock.unlink()  # as on a shared file system that locks on one machine only
        place.start()
        second = place.driver
        assert second is not None
        wait_for("the takeover", lambda: lock.exists() and lock.stat().st_size > 0)
        first.send_signal(signal.SIGCONT)
        first.wait(timeout=WAIT)
        assert first.returncode == 2, f"what was taken over stops with an error: {first.returncode}"
        assert f"was taken over by process {second.pid} on" in place.log.read_text()

    def _stop_between_pushes(self, driver: subprocess.Popen[str]) -> None:
        """What reads or writes the working folder waits for one that was stopped in the middle of a push."""
        for _ in range(600):
            driver.send_signal(signal.SIGSTOP)
            time.sleep(0.1)
            with file_lock(self.place.storage / STATE_FOLDER / "lock", wait=False) as free:
                if free:
                    return
            driver.send_signal(signal.SIGCONT)
            time.sleep(0.1)
        raise TimeoutError("the driver pushes all the time")

    def _node(self) -> None:
        self.place.nodes.replace_node()

    def _drain(self) -> None:
        self.place.nodes.drain_node()

    def _notice(self) -> None:
        self.place.nodes.announce_end()

    def _mlflow(self) -> None:
        """The server is away until the next kill; a second kill finds it there again."""
        if self.place.server.process is None:
            self.place.server.start()
        self.place.server.kill()

    def _disk(self) -> None:
        """Full until the driver has given up, which it must do in an orderly way."""
        place = self.place
        assert place.driver is not None
        place.disk.fill(place.driver.pid, place.journal)
        place.driver.wait(timeout=WAIT)
        place.disk.empty()
        place.server.start()
