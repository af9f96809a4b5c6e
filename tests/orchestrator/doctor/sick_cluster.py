"""A cluster of two nodes on one machine, examined well, as a job, with a sick node, and with GPUs that are not there.

`python sick_cluster.py FOLDER` prints exit codes and findings as one JSON object. On the sick node every process has a
different clock, and another version of numpy.
"""

from __future__ import annotations

import json
import os
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

REPOSITORY = Path(__file__).resolve().parents[3]
OFFSET = 90.0
CLOCK = f"import time\n_real = time.time\ntime.time = lambda: _real() + {OFFSET}\n"
GPUS = ["--config", "configs/demo.yaml", "train.gpus_per_worker=1", "train.num_workers=2"]


def examined(folder: Path, name: str, *words: str) -> dict[str, Any]:
    from orchestrator import main

    file, code = folder / f"{name}.json", 0
    arguments = ["doctor", "--probe-mib", "4", "--seconds", "240", "--json", str(file), *words]
    try:
        main.run(arguments)
    except SystemExit as ended:
        code = ended.code or 0
    return {"code": code, **json.loads(file.read_text())}


def as_a_job(dashboard: int, folder: Path) -> dict[str, Any]:
    from ray.job_submission import JobStatus, JobSubmissionClient

    client = JobSubmissionClient(f"http://127.0.0.1:{dashboard}")
    file = folder / "job.json"
    words = f"doctor --only nodes --only versions --storage {folder}/runs --json {file}"
    environment = {"HF_HUB_OFFLINE": "1", "PYTHONPATH": str(REPOSITORY)}
    deadline = time.monotonic() + 300
    while True:
        try:
            identity = client.submit_job(
                entrypoint=f"{sys.executable} orchestrator/main.py {words}",
                runtime_env={"working_dir": str(REPOSITORY), "env_vars": environment},
            )
            break
        except RuntimeError as error:  # on a busy machine the head's agent takes a while to register
            if "No available agent" not in str(error) or time.monotonic() > deadline:
                raise
            time.sleep(1)
    while not client.get_job_status(identity).is_terminal() and time.monotonic() < deadline:
        time.sleep(0.5)
    ended = client.get_job_status(identity) == JobStatus.SUCCEEDED
    return {"ended": ended, "log": client.get_job_logs(identity), **(json.loads(file.read_text()) if ended else {})}


def sick_path(folder: Path) -> str:
    """A folder of Python's path by which a node is sick."""
    path = folder / "sick"
    (path / "numpy-0.0.1.dist-info").mkdir(parents=True)
    (path / "numpy-0.0.1.dist-info" / "METADATA").write_text("Metadata-Version: 2.1\nName: numpy\nVersion: 0.0.1\n")
    (path / "sitecustomize.py").write_text(CLOCK)
    return os.pathsep.join([str(path), str(REPOSITORY)])


def main(folder: Path) -> dict[str, Any]:
    import ray
    from local_cluster import local_cluster

    from orchestrator.cluster.session import DASHBOARD, free_port

    dashboard = free_port()
    os.environ[DASHBOARD] = f"http://127.0.0.1:{dashboard}"
    with tempfile.TemporaryDirectory(prefix="hf-ray-", dir="/tmp") as short:  # paths of sockets are limited
        head = {"num_cpus": 1, "temp_dir": short}
        head |= {"include_dashboard": True, "dashboard_host": "127.0.0.1", "dashboard_port": dashboard}
        cluster: Any = local_cluster(head)
        try:
            cluster.add_node(num_cpus=1)
            ray.init(address=cluster.address, logging_level="ERROR", log_to_driver=False)
            storage = f"{folder}/runs"
            result = {"well": examined(folder, "well", "--storage", storage)}
            cluster.add_node(num_cpus=2, num_gpus=2)
            result["gpus"] = examined(folder, "gpus", *GPUS, f"storage={storage}")
            result["left"] = sorted(path.name for path in folder.rglob("*") if "doctor" in path.name)
            result["job"] = as_a_job(dashboard, folder)
            cluster.add_node(num_cpus=1, env_vars={"PYTHONPATH": sick_path(folder)})
            some = [word for name in ("nodes", "versions", "clocks", "disk") for word in ("--only", name)]
            result["sick"] = examined(folder, "sick", *some, "--storage", storage)
            return result
        finally:
            ray.shutdown()
            cluster.shutdown()


if __name__ == "__main__":
    sys.path[:0] = [str(REPOSITORY), str(REPOSITORY / "tests" / "helpers")]
    answer = main(Path(sys.argv[1]))
    print(json.dumps(answer))
