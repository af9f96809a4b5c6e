"""A RayJob with a configuration in a ConfigMap, as `deploy/rayjob-own-config.yaml` has them."""

from __future__ import annotations

import shlex
from pathlib import Path

import yaml

from orchestrator.cluster.capacity import Nodes, concurrency
from orchestrator.cluster.placement import Demand
from orchestrator.config.schema import SearchConfig, read_search_config


def checked_config(manifests: str, images: set[str], place: Path) -> SearchConfig:
    """The configuration that the job reads, after checks that it is mounted there and has room on the job's nodes."""
    files, job = yaml.safe_load_all(manifests)
    assert (files["apiVersion"], files["kind"]) == ("v1", "ConfigMap")
    assert (job["apiVersion"], job["kind"]) == ("ray.io/v1", "RayJob")
    spec = job["spec"]
    assert "clusterSelector" not in spec and spec["shutdownAfterJobFinishes"], "which Kueue needs"
    assert job["metadata"]["labels"] == {"kueue.x-k8s.io/queue-name": "headfold"}
    program, verb, path = shlex.split(spec["entrypoint"])
    assert (program, verb) == ("headfold", "search")
    [worker] = spec["rayClusterSpec"]["workerGroupSpecs"]
    pods = [group["template"]["spec"] for group in (spec["rayClusterSpec"]["headGroupSpec"], worker)]
    for pod in pods:
        mounts = {mount["name"]: mount["mountPath"] for mount in pod["containers"][0]["volumeMounts"]}
        maps = {volume["name"]: volume["configMap"]["name"] for volume in pod["volumes"] if "configMap" in volume}
        [(volume, config_map)] = maps.items()
        assert config_map == files["metadata"]["name"]
        assert path.rpartition("/")[0] == mounts[volume]
        assert pod["containers"][0]["image"] in images
    own = place / "of-the-job.yaml"
    own.write_text(files["data"][path.rpartition("/")[2]])
    config = read_search_config(own)
    there = Nodes(1, {"CPU": 48.0, "GPU": float(pods[1]["containers"][0]["resources"]["limits"]["nvidia.com/gpu"])})
    assert concurrency([Nodes(1, {"CPU": 4.0}), there], Demand.of(config)) == 1
    return config
