"""cluster.yaml against Ray's schema, against the AWS API's own description, and against the pins of this project; the
same cluster on Google Cloud (deploy/cluster-gcp.yaml) against Ray's schema and cluster.yaml.

Ray's check finds unknown keys, wrong types, an unknown provider and a missing head type. It looks at nothing inside
`node_config`, at no region and at no negative count, so those are checked here, by botocore's model of RunInstances.
"""

from __future__ import annotations

import copy
import re
import subprocess
import tomllib
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import botocore.session
import pytest
import yaml
from botocore.validate import ParamValidator
from packaging.requirements import Requirement
from ray.autoscaler._private.node_provider_availability_tracker import NodeAvailabilitySummary
from ray.autoscaler._private.resource_demand_scheduler import _resource_based_utilization_scorer, get_nodes_for
from ray.autoscaler._private.util import prepare_config, validate_config

REPOSITORY = Path(__file__).resolve().parents[2]
TEXTS = {name: (REPOSITORY / name).read_text() for name in ("cluster.yaml", "deploy/cluster-gcp.yaml")}
CONFIGS: dict[str, dict[str, Any]] = {name: yaml.safe_load(text) for name, text in TEXTS.items()}
CONFIG, GCP = CONFIGS.values()
both = pytest.mark.parametrize("file", TEXTS)
COMMANDS = [
    "initialization_commands",
    "setup_commands",
    "head_setup_commands",
    "worker_setup_commands",
    "head_start_ray_commands",
    "worker_start_ray_commands",
]
SECRET = re.compile(r"AKIA[0-9A-Z]{16}|(?i:secret|password|aws_session_token)\w*\s*[:=]\s*\S+|-----BEGIN")


def _run_instances() -> Any:
    return botocore.session.get_session().get_service_model("ec2").operation_model("RunInstances").input_shape


def ray_problems(config: dict[str, Any]) -> list[str]:
    try:
        validate_config(prepare_config(copy.deepcopy(config)))
    except Exception as error:
        return [f"Ray: {type(error).__name__}: {error}"]
    return []


def node_problems(config: dict[str, Any]) -> list[str]:
    shape, result = _run_instances(), []
    for name, node in config["available_node_types"].items():
        fields = node["node_config"] | {"MinCount": 1, "MaxCount": 1}
        report = ParamValidator().validate(fields, shape)
        if report.has_errors():
            result.append(f"{name}: {report.generate_report()}")
        if fields.get("InstanceType") not in shape.members["InstanceType"].enum:
            result.append(f"{name}: no instance type {fields.get('InstanceType')!r}")
        market = fields.get("InstanceMarketOptions", {}).get("MarketType", "spot")
        if market not in ("spot", "capacity-block"):
            result.append(f"{name}: no market {market!r}")
        if node.get("min_workers", 0) < 0 or node.get("max_workers", 0) < node.get("min_workers", 0):
            result.append(f"{name}: workers {node.get('min_workers')} to {node.get('max_workers')}")
    return result


def place_problems(config: dict[str, Any]) -> list[str]:
    region = config["provider"].get("region")
    if region not in botocore.session.get_session().get_available_regions("ec2"):
        return [f"no region {region!r}"]
    zones = config["provider"]["availability_zone"].split(",")
    result = [f"zone {zone} is not in {region}" for zone in zones if zone[:-1] != region]
    mounts = re.findall(r"fs-\w+\.efs\.([\w-]+)\.amazonaws\.com", str(config["initialization_commands"]))
    return result + [f"file system in {place}, not in {region}" for place in mounts if place != region]


def shell_problems(config: dict[str, Any]) -> list[str]:
    result = []
    for key in COMMANDS:
        for command in config.get(key, []):
            check = subprocess.run(["bash", "-n", "-c", command], capture_output=True, text=True)
            if check.returncode:
                result.append(f"{key}: {check.stderr}")
            if "--host" in command and not re.search(r"--host[= ]127\.0\.0\.1\b", command):
                result.append(f"{key}: a server that listens beyond the loopback address: {command}")
    return result


def problems(config: dict[str, Any]) -> list[str]:
    return ray_problems(config) or (node_problems(config) + place_problems(config) + shell_problems(config))


def test_is_valid() -> None:
    assert problems(CONFIG) == []


def _in(*path: str, value: Any) -> Callable[[dict[str, Any]], None]:
    def change(config: dict[str, Any]) -> None:
        for key in path[:-1]:
            config = config[key]
        config[path[-1]] = value

    return change


def _without(*path: str) -> Callable[[dict[str, Any]], None]:
    def change(config: dict[str, Any]) -> None:
        for key in path[:-1]:
            config = config[key]
        del config[path[-1]]

    return change


NODE = ("available_node_types", "gpu_a10g")
MISTAKES = {
    "unknown key": _in("max_worker", value=3),
    "unknown key of a node type": _in(*NODE, "resource", value={"GPU": 4}),
    "wrong type": _in("idle_timeout_minutes", value="ten"),
    "unknown provider": _in("provider", "type", value="awss"),
    "no such head type": _in("head_node_type", value="boss"),
    "more at least than at most": _in(*NODE, "min_workers", value=9),
    "negative count": _in(*NODE, "max_workers", value=-1),
    "unknown AWS field": _in(*NODE, "node_config", "InstanceTypo", value="g5.12xlarge"),
    "AWS field of a wrong type": _in(*NODE, "node_config", "BlockDeviceMappings", value={"DeviceName": "/dev/sda1"}),
    "no such instance type": _in(*NODE, "node_config", "InstanceType", value="g5.13xlarge"),
    "no instance type": _without(*NODE, "node_config", "InstanceType"),
    "unknown market": _in(*NODE, "node_config", "InstanceMarketOptions", value={"MarketType": "spott"}),
    "no region": _without("provider", "region"),
    "no such region": _in("provider", "region", value="us-west-9"),
    "zones of another region": _in("provider", "availability_zone", value="eu-west-1a"),
    "shell error": _in("setup_commands", value=["pip install 'headfold[eval]"]),
    "server open to the world": _in("head_start_ray_commands", value=["mlflow server --host 0.0.0.0"]),
}


@pytest.mark.parametrize("mistake", MISTAKES)
def test_mistake_is_found(mistake: str) -> None:
    config = copy.deepcopy(CONFIG)
    MISTAKES[mistake](config)
    assert problems(config)


VARIANTS = re.findall(r"```yml\n(.*?)```", (REPOSITORY / "docs" / "clusters" / "aws.md").read_text(), re.DOTALL)


@pytest.mark.parametrize("variant", VARIANTS, ids=range(len(VARIANTS)))
def test_variants_of_the_runbook_are_valid(variant: str) -> None:
    changed = copy.deepcopy(CONFIG) | yaml.safe_load(variant)
    config = {key: value for key, value in changed.items() if value is not None}
    assert ray_problems(config) == []
    if config["provider"]["type"] == "aws":
        assert node_problems(config) == []


@both
def test_head_stays_and_workers_come_from_zero(file: str) -> None:
    config = CONFIGS[file]
    head = config["available_node_types"][config["head_node_type"]]
    workers = [node for node in config["available_node_types"].values() if node is not head]
    assert not is_spot(head["node_config"])
    assert head["resources"] == {"CPU": 0}, "no task beside the driver and MLflow"
    for node in workers:
        assert node["min_workers"] == 0
        # Who loses a node without GPUs loses the controllers of all its trials
        assert is_spot(node["node_config"]) == ("GPU" in node["resources"])
    assert sum(node["max_workers"] for node in workers) == config["max_workers"]


@both
@pytest.mark.parametrize(("amount", "count", "nodes"), [(1.0, 8, 1), (1.0, 56, 2), (0.05, 20, 1)])
def test_what_needs_no_gpu_starts_no_gpu_node(file: str, amount: float, count: int, nodes: int) -> None:
    """Tasks that tokenise, and controllers of trials, by Ray's own choice of nodes."""
    types = CONFIGS[file]["available_node_types"]
    demand = [{"CPU": amount}] * count
    scorer = partial(_resource_based_utilization_scorer, node_availability_summary=NodeAvailabilitySummary({}))
    started, remaining = get_nodes_for(types, {}, "head", 8, demand, lambda node, needs, name: scorer(node, needs))
    assert (dict(started), remaining) == ({"cpu": nodes}, [])


@both
def test_the_hub_is_read_by_a_token_of_each_node_into_a_cache_of_all(file: str) -> None:
    config = CONFIGS[file]
    options = config["docker"]["run_options"]
    there = dict(option.removeprefix("--env ").split("=", 1) for option in options if option.startswith("--env"))
    (shared,) = [option.split(":")[-1] for option in options if option.startswith("--volume")]
    assert Path(there["HF_HOME"]).is_relative_to(shared)
    token = there["HF_TOKEN_PATH"]  # else it would be looked for in HF_HOME, which every node writes to
    assert config["file_mounts"][token] == "~/.cache/huggingface/token"
    assert not Path(token).is_relative_to(shared)
    assert not re.search(r"HF_TOKEN\b|hf_[A-Za-z0-9]{20}", TEXTS[file])


def is_spot(node: dict[str, Any]) -> bool:
    market, scheduling = node.get("InstanceMarketOptions", {}), node.get("scheduling", {})
    return market.get("MarketType") == "spot" or scheduling.get("provisioningModel") == "SPOT"


def test_google_is_like_amazon_but_for_its_machines() -> None:
    assert (ray_problems(GCP), shell_problems(GCP)) == ([], [])
    types = [config["available_node_types"] for config in (CONFIG, GCP)]
    aws, gcp = ({name.replace("l4", "a10g"): node["resources"] for name, node in nodes.items()} for nodes in types)
    assert str(gcp).replace("L4", "A10G") == str(aws)
    same = CONFIG.keys() - {
        "provider",
        "docker",
        "available_node_types",
        "initialization_commands",
        "head_setup_commands",
    }
    assert {key: GCP[key] for key in same} == {key: CONFIG[key] for key in same}
    assert str(GCP["docker"]).replace("gs://", "s3://") == str(CONFIG["docker"])
    zone, region = GCP["provider"]["availability_zone"], GCP["provider"]["region"]
    disks = [node["node_config"]["disks"][0]["initializeParams"] for node in types[1].values()]
    assert zone[:-2] == region
    assert {disk["diskType"] for disk in disks} == {f"zones/{zone}/diskTypes/pd-balanced"}
    assert [disk["diskSizeGb"] for disk in disks] == [200, 100, 300, 500]


@both
def test_holds_no_secret(file: str) -> None:
    assert not SECRET.search(TEXTS[file])
    assert SECRET.search("aws_secret_access_key: abc") and SECRET.search("AKIA" + "A" * 16)


def _requirement(name: str) -> Requirement:
    project = tomllib.loads((REPOSITORY / "pyproject.toml").read_text())["project"]
    return next(r for r in map(Requirement, project["dependencies"]) if r.name == name)


@both
def test_versions_are_those_of_the_project(file: str) -> None:
    images = [CONFIGS[file]["docker"]["head_image"], CONFIGS[file]["docker"]["worker_image"]]
    rays = {re.fullmatch(r"rayproject/ray:([\d.]+)-py\d+-[cg]pu", image)[1] for image in images}  # type: ignore[index]
    assert len(rays) == 1 and rays.pop() in _requirement("ray").specifier
    torches = re.findall(r"torch==([\d.]+)", str(CONFIGS[file]["setup_commands"]))
    makefile = re.search(r"^TORCH \?= torch==(\S+)$", (REPOSITORY / "Makefile").read_text(), re.MULTILINE)
    assert makefile and torches == [makefile[1]] and torches[0] in _requirement("torch").specifier
