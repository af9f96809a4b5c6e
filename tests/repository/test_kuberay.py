"""The manifests for KubeRay, as far as they can be checked without a Kubernetes: what Ray's own code reads from them,
that they are the cluster of cluster.yaml, and that what they start can be started."""

from __future__ import annotations

import re
import shlex
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest
import yaml
from own_config_job import checked_config
from ray.autoscaler._private.kuberay.node_provider import KubernetesHttpApiClient
from typer.testing import CliRunner

from orchestrator import pipeline
from orchestrator.cluster import ray_internals
from orchestrator.cluster.capacity import Nodes, concurrency
from orchestrator.cluster.placement import Demand
from orchestrator.config.schema import read_search_config
from orchestrator.main import app
from orchestrator.tracking.mlflow_server import ServerSettings

REPOSITORY = Path(__file__).resolve().parents[2]
TEXT = (REPOSITORY / "deploy" / "raycluster.yaml").read_text()
CLAIM, CLUSTER = yaml.safe_load_all(TEXT)
JOB = yaml.safe_load((REPOSITORY / "deploy" / "rayjob.yaml").read_text())
AWS = yaml.safe_load((REPOSITORY / "cluster.yaml").read_text())
HEAD, GROUPS = CLUSTER["spec"]["headGroupSpec"], CLUSTER["spec"]["workerGroupSpecs"]
PODS = [group["template"]["spec"] for group in (HEAD, *GROUPS)]
LLAMA = "configs/llama2-7b.yaml"


@pytest.fixture
def config(monkeypatch: pytest.MonkeyPatch) -> dict[str, Any]:
    """The autoscaler's configuration from the head's container, with a Kubernetes that has only the cluster."""
    for name, value in (("NODE_TYPE_NAME", "headgroup"), ("CLUSTER_NAME", "headfold"), ("CLUSTER_NAMESPACE", "ours")):
        monkeypatch.setenv(f"RAY_{name}", value)
    monkeypatch.setenv("RAY_enable_autoscaler_v2", "true")
    known = {"rayclusters/headfold": CLUSTER | {"metadata": {"name": "headfold", "namespace": "ours"}}}
    monkeypatch.setattr(KubernetesHttpApiClient, "__init__", lambda self, namespace: None)
    monkeypatch.setattr(KubernetesHttpApiClient, "get", lambda self, path: known[path])
    result = ray_internals._read_config("no such address")
    assert result is not None
    return result


def test_rays_autoscaler_reads_the_nodes_of_cluster_yaml(config: dict[str, Any]) -> None:
    types = {name.replace("group", "").replace("-", "_"): node for name, node in config["available_node_types"].items()}
    assert types.keys() == AWS["available_node_types"].keys()
    for name, node in types.items():
        expected = AWS["available_node_types"][name]
        assert node["resources"].pop("memory") >= 24 * 2**30
        assert node["resources"] == expected["resources"]
        assert all(node[key] == expected.get(key, 0) for key in ("min_workers", "max_workers"))
    assert all(config[key] == AWS[key] for key in ("max_workers", "idle_timeout_minutes"))


def test_a_search_has_room_before_any_gpu_is_there(config: dict[str, Any], monkeypatch: pytest.MonkeyPatch) -> None:
    class Context:
        gcs_address = ""

    monkeypatch.setattr(ray_internals, "autoscaling_config", lambda address: config)
    monkeypatch.setattr(ray_internals.ray, "get_runtime_context", Context)
    nodes = [Nodes(1, {}), *(Nodes(*kind) for kind in ray_internals.node_types().values())]
    assert concurrency(nodes, Demand.of(read_search_config(REPOSITORY / LLAMA))) == 2


def test_only_the_head_of_a_cluster_that_scales_asks_kubernetes(
    config: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("RAY_NODE_TYPE_NAME", "gpu-a100")
    assert ray_internals._read_config("no such address") is None
    monkeypatch.setenv("RAY_NODE_TYPE_NAME", "headgroup")
    monkeypatch.delenv("RAY_enable_autoscaler_v2")
    assert ray_internals._read_config("no such address") is None


def test_pods_fill_the_machines_of_cluster_yaml() -> None:
    for pod, node in zip(PODS, AWS["available_node_types"].values(), strict=True):
        limits, report = pod["containers"][0]["resources"]["limits"], node["resources"]
        assert pod["nodeSelector"] == {"node.kubernetes.io/instance-type": node["node_config"]["InstanceType"]}
        cpus = report["CPU"] or 8  # those of the head are for no task
        assert int(limits["cpu"]) == cpus
        assert int(limits.get("nvidia.com/gpu", 0)) == report.get("GPU", 0)
        requests = [container["resources"]["requests"]["cpu"] for container in pod["containers"]]
        # A node reserves some of its CPUs: a pod that requests all of them never starts
        assert sum(float(cpu.replace("500m", "0.5")) for cpu in requests) <= cpus - 1


def test_images_and_versions_are_those_of_the_project() -> None:
    version = re.search(r"headfold:([\d.]+) ", (REPOSITORY / "deploy" / "Containerfile").read_text())
    images = [container["image"] for pod in PODS for container in pod["containers"]]
    assert version and images == [
        f"registry.example.com/headfold:{version[1]}{kind}" for kind in ("-cpu", "-cpu", "-cpu", "", "")
    ]
    assert f":{CLUSTER['spec']['rayVersion']}-" in AWS["docker"]["worker_image"]


def test_everybody_mounts_the_shared_volume() -> None:
    assert CLAIM["spec"]["accessModes"] == ["ReadWriteMany"]
    for pod in PODS:
        assert pod["volumes"][0]["persistentVolumeClaim"]["claimName"] == CLAIM["metadata"]["name"]
        for container in pod["containers"]:
            assert container["volumeMounts"][0] == {"name": pod["volumes"][0]["name"], "mountPath": "/mnt/headfold"}


def test_everybody_reads_the_hub_into_the_shared_volume() -> None:
    for pod in PODS:
        own = {entry["name"]: entry for entry in pod["containers"][0]["env"]}
        assert own["HF_HOME"]["value"] == "/mnt/headfold/hf"
        assert own["HF_TOKEN"]["valueFrom"]["secretKeyRef"]["optional"], "for gated checkpoints alone"


def test_mlflow_on_the_head_is_that_of_cluster_yaml(monkeypatch: pytest.MonkeyPatch) -> None:
    ray_head, mlflow = PODS[0]["containers"]
    assert any(" ".join(mlflow["command"]) in command for command in AWS["head_start_ray_commands"])
    options = AWS["docker"]["head_run_options"]
    there = dict(option.removeprefix("--env ").split("=", 1) for option in options if option.startswith("--env"))
    here = {entry["name"]: entry.get("value") for entry in [*ray_head["env"], *mlflow["env"]]}
    own = "HEADFOLD_MLFLOW_ARTIFACTS"  # a folder here, a bucket there
    assert {name: here[name] for name in there if name != own} == {k: v for k, v in there.items() if k != own}
    for entry in mlflow["env"]:
        monkeypatch.setenv(entry["name"], entry["value"])
    settings, mounted = ServerSettings.of_environment(), [mount["mountPath"] for mount in mlflow["volumeMounts"]]
    assert str(settings.database.parent) in mounted and settings.artifacts.startswith("/mnt/headfold/")


def test_holds_no_secret_and_opens_nothing() -> None:
    assert CLUSTER["spec"]["authOptions"] == {"mode": "token"}
    assert (HEAD["serviceType"], HEAD["enableIngress"]) == ("ClusterIP", False)
    assert not re.search(r"kind: (Secret|Service|Ingress)|host(Network|Port)|NodePort|LoadBalancer", TEXT)
    entries = [entry for pod in PODS for container in pod["containers"] for entry in container["env"]]
    assert not [entry for entry in entries if re.search("TOKEN|KEY|PASS", entry["name"]) and "value" in entry]


def test_the_entrypoint_starts_a_search(monkeypatch: pytest.MonkeyPatch) -> None:
    """Run it, with the files of this checkout instead of the image's, up to the first step of the search."""
    assert JOB["spec"]["clusterSelector"] == {"ray.io/cluster": CLUSTER["metadata"]["name"]}
    assert yaml.safe_load(JOB["spec"]["runtimeEnvYAML"]) == {"env_vars": {"RAY_JOB_STOP_WAIT_TIME_S": "60"}}
    program, *words = shlex.split(JOB["spec"]["entrypoint"].replace("/home/ray/headfold", str(REPOSITORY)))
    started: list[Any] = []

    class Outcome:
        exit_code = 0

        def to_dict(self) -> dict[str, Any]:
            return {}

    monkeypatch.setattr(pipeline, "search", lambda config, resume, **_: started.append(config) or Outcome())
    done = CliRunner().invoke(app, words)
    assert (program, done.exit_code) == ("headfold", 0), done.output
    assert started == [read_search_config(REPOSITORY / LLAMA, ["storage=/mnt/headfold/runs"])]


def test_a_worker_s_pod_that_is_ended_drains_its_node_in_the_time_it_has() -> None:
    pods = [group["template"]["spec"] for group in GROUPS]
    training = [pod for pod in pods if "nvidia.com/gpu" in pod["containers"][0]["resources"]["limits"]]
    assert len(training) == 2
    for pod in training:
        for container in pod["containers"]:
            python, dash_m, module, option, seconds = container["lifecycle"]["preStop"]["exec"]["command"]
            assert (python, dash_m, option) == ("python", "-m", "--seconds")
            assert find_spec(module) is not None
            assert 0 < float(seconds) < pod["terminationGracePeriodSeconds"]


def test_a_configuration_of_ones_own_is_mounted_where_its_job_reads_it(tmp_path: Path) -> None:
    images = {container["image"] for pod in PODS for container in pod["containers"]}
    checked_config((REPOSITORY / "deploy" / "rayjob-own-config.yaml").read_text(), images, tmp_path)


def test_the_task_of_skypilot_starts_a_search_of_this_checkout() -> None:
    task = yaml.safe_load((REPOSITORY / "deploy" / "skypilot.yaml").read_text())
    assert task["run"].splitlines()[-1].split()[:2] == ["headfold", "search"]
    assert "uv venv --python 3.12 " in task["setup"], "SkyPilot's images have Python 3.10"
    assert set(re.findall(r"\$(\w+)", task["run"])) == task["envs"].keys()
    read_search_config(REPOSITORY / task["envs"]["CONFIG"], [f"storage={task['envs']['STORAGE']}"])
