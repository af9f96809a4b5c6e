"""`ray up --no-config-cache cluster.yaml` up to the first shell on the head, against a fake of AWS (moto).

The fake takes the calls of boto3 in this process and keeps roles, keys, groups and instances in memory. It knows the
instance types' sizes; it has no machines, no quotas and no prices.
"""

from __future__ import annotations

import copy
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import yaml

pytestmark = pytest.mark.extended

REPOSITORY = Path(__file__).resolve().parents[2]


@pytest.fixture(scope="module")
def up(tmp_path_factory: pytest.TempPathFactory) -> Iterator[SimpleNamespace]:
    """The file bootstrapped in an empty account, and one instance of each node type."""
    moto = pytest.importorskip("moto")
    from ray.autoscaler import tags
    from ray.autoscaler._private import commands
    from ray.autoscaler._private.aws import config as aws
    from ray.autoscaler._private.aws.node_provider import AWSNodeProvider
    from ray.autoscaler._private.util import prepare_config

    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("HOME", str(tmp_path_factory.mktemp("home")))  # for the key pair
        for name in ("AWS_ACCESS_KEY_ID", "AWS_SECRET_ACCESS_KEY"):
            patch.setenv(name, "of-the-fake")
        patch.delenv("AWS_PROFILE", raising=False)
        patch.setattr(aws.time, "sleep", lambda seconds: None)  # it waits for roles to spread over a real AWS
        with moto.mock_aws(config={"iam": {"load_aws_managed_policies": True}}):
            given = yaml.safe_load((REPOSITORY / "cluster.yaml").read_text())
            created = commands._bootstrap_config(prepare_config(copy.deepcopy(given)), no_config_cache=True)
            provider = AWSNodeProvider(created["provider"], created["cluster_name"])
            instances: dict[str, Any] = {}
            for name, node in created["available_node_types"].items():
                head = name == created["head_node_type"]
                labels = {
                    tags.TAG_RAY_NODE_KIND: "head" if head else "worker",
                    tags.TAG_RAY_USER_NODE_TYPE: name,
                    tags.TAG_RAY_NODE_NAME: name,
                    tags.TAG_RAY_NODE_STATUS: "uninitialized",
                }
                config = node["node_config"] | (created.get("head_node") or {} if head else {})
                (instances[name],) = provider.create_node(config, labels, 1).values()
            yield SimpleNamespace(given=given, made=created, provider=provider, instances=instances)


def test_every_node_type_can_be_launched_as_it_is_written(up: SimpleNamespace) -> None:
    for name, instance in up.instances.items():
        expected = up.given["available_node_types"][name]["node_config"]
        assert instance.instance_type == expected["InstanceType"]
        assert instance.image_id == expected["ImageId"]
        assert instance.instance_lifecycle == ("spot" if "InstanceMarketOptions" in expected else None)
        (disk,) = instance.volumes.all()
        assert disk.size == expected["BlockDeviceMappings"][0]["Ebs"]["VolumeSize"]
    assert len({i.placement["AvailabilityZone"][:-1] for i in up.instances.values()}) == 1


def test_resources_are_those_of_the_machines(up: SimpleNamespace) -> None:
    """Counted by Ray's provider from the instance types' own description, where the file says nothing.

    But for the head, which offers no CPU to tasks.
    """
    bare = copy.deepcopy(up.given)
    for node in bare["available_node_types"].values():
        del node["resources"]
    counted = up.provider.fillout_available_node_types_resources(bare)["available_node_types"]
    for name, node in up.given["available_node_types"].items():
        result = {key: value for key, value in counted[name]["resources"].items() if key != "memory"}
        expected = {"CPU": 0} if name == up.given["head_node_type"] else result
        assert node["resources"] == expected, name


def test_only_ssh_is_open_to_the_world(up: SimpleNamespace) -> None:
    """MLflow, dashboard and job port are reached through it."""
    ec2 = up.provider.ec2
    groups = {g["GroupId"] for i in up.instances.values() for g in i.security_groups}
    rules = [rule for group in groups for rule in ec2.SecurityGroup(group).ip_permissions]
    world = [rule for rule in rules if rule["IpRanges"]]
    assert [(rule["FromPort"], rule["ToPort"]) for rule in world] == [(22, 22)]
    assert any(rule["UserIdGroupPairs"] and rule["IpProtocol"] == "-1" for rule in rules)  # nodes among themselves


def test_the_head_may_start_nodes_and_reach_the_bucket(up: SimpleNamespace) -> None:
    profile = up.instances["head"].iam_instance_profile["Arn"]
    assert profile.endswith("ray-autoscaler-v1")
    assert all(i.iam_instance_profile is None for name, i in up.instances.items() if name != "head")
