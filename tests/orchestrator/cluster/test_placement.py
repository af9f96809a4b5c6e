"""Placement of processes on a cluster of two kinds of nodes, and that a training waits for a node that is late. The
GPUs of the nodes are fake: numbers that Ray counts, without devices."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from json_output import last_json

from attention.plan import AttentionPlan, LayerPlan
from orchestrator.cluster.placement import task_options, worker_options
from orchestrator.config.schema import ConfigError, SearchConfig, parse_config
from trainers.settings import TrainSettings

REPOSITORY = Path(__file__).resolve().parents[3]
SCRIPT = Path(__file__).with_name("two_kinds.py")
PLAN = AttentionPlan((LayerPlan((0, 0, 1, 1), (0, 0, 1, 1)),) * 2, head_dim=8)
START_SECONDS, LATE_SECONDS = 2, 12


def config(**sections: dict[str, Any]) -> SearchConfig:
    return parse_config({"name": "a", "model": {"path": "none"}, "search": {"kv_ratios": [0.5]}, **sections})


def test_tasks_ask_for_what_the_configuration_says() -> None:
    resources = {"trial_cpus": 8, "trial_gpus": 1, "accelerator_type": "A100"}
    train = {"gpus_per_worker": 2, "cpus_per_worker": 4}
    both = config(resources=resources, train=train)
    assert task_options(both) == {"num_cpus": 8, "num_gpus": 1, "accelerator_type": "A100"}
    assert worker_options(both) == {"num_cpus": 4, "num_gpus": 2, "accelerator_type": "A100"}
    pools = config(resources=resources | {"trial_accelerator_type": "A10G"}, train=train)
    assert task_options(pools)["accelerator_type"] == "A10G"
    assert worker_options(pools)["accelerator_type"] == "A100"
    assert task_options(config()) == {"num_cpus": 0.05, "num_gpus": 0}


@pytest.mark.parametrize(
    ("sections", "message"),
    [
        ({"train": {"gpus_per_worker": 0.5, "num_workers": 2}}, ["whole number", "0.5", "NCCL", "num_workers=1"]),
        ({"train": {"gpus_per_worker": 1.5}}, ["whole number", "1.5"]),
        ({"resources": {"trial_gpus": 2.5}}, ["trial_gpus", "whole number", "2.5"]),
        ({"resources": {"trial_accelerator_type": "A10G"}}, ["trial_accelerator_type", "'A10G'", "trial_gpus=1"]),
        (
            {"resources": {"placement_strategy": "STRICT_SPREAD"}},
            ["placement_strategy", "STRICT_SPREAD", "STRICT_PACK"],
        ),
    ],
)
def test_what_can_never_be_placed_is_refused(sections: dict[str, Any], message: list[str]) -> None:
    with pytest.raises(ConfigError) as caught:
        config(**sections)
    for word in message:
        assert word in str(caught.value)


def test_one_worker_may_share_a_gpu() -> None:
    assert config(train={"gpus_per_worker": 0.5}).train.shape[:3] == (1, 1.0, 0.5)


@pytest.fixture(scope="module")
def happened(tiny_job: Any, tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    """The report of `two_kinds.py`: Ray Train may wait START_SECONDS for nodes at a time; the node comes LATE_SECONDS
    after the training has requested it."""
    folder = tmp_path_factory.mktemp("late")
    sequences = torch.randint(0, 64, (20, 16), generator=torch.Generator().manual_seed(0))
    settings = TrainSettings(cpus_per_worker=0.4, num_workers=2)
    late = {"milestones": (2,), "max_failures": 0, "accelerator_type": "A100"}
    job = tiny_job(folder, PLAN, sequences, sequences[:4], settings, **late)
    (folder / "job.json").write_text(job.to_json())
    environment = os.environ | {
        "PYTHONPATH": f"{REPOSITORY}:{REPOSITORY / 'tests' / 'helpers'}",
        "RAY_TRAIN_WORKER_GROUP_START_TIMEOUT_S": str(START_SECONDS),
        "RAY_TRAIN_ENABLE_PREEMPTION_WATCHER": "0",
        "LATE_SECONDS": str(LATE_SECONDS),
    }
    environment.pop("RAY_ADDRESS", None)
    command = [sys.executable, str(SCRIPT), str(folder / "job.json"), str(folder)]
    process = subprocess.run(command, env=environment, capture_output=True, text=True, check=False, timeout=600)
    assert process.returncode == 0, process.stderr[-4000:]
    return last_json(process.stdout)


@pytest.mark.extended
def test_every_process_lands_on_the_requested_kind_of_node(happened: dict[str, Any]) -> None:
    assert happened["planned_on"] == "A10G"
    assert happened["trained_on"] == ["A100", "A100"]
    assert happened["workers_lie_on"] == ["A100"] * 8
    assert happened["room"] == 1
    assert happened["on_head"] == [True, False]


@pytest.mark.extended
def test_what_no_node_has_is_refused_with_what_there_is(happened: dict[str, Any]) -> None:
    assert "resources.accelerator_type: no node has 'A100'" in happened["refused"]
    assert "4 GPU (A10G)" in happened["refused"]


@pytest.mark.extended
def test_a_training_waits_for_a_node_that_is_late_and_says_so(happened: dict[str, Any]) -> None:
    """Ray Train gave up on its groups several times by then: that is no failure of the job."""
    eight = "8 worker(s) of 1 GPU (A100) and 0.1 CPU each, the cluster has room for 0 of 8"
    assert happened["waits_for"].startswith(eight)
    assert "2 worker(s) of 0.4 CPU (A100) each, the cluster has room for 0 of 2" in happened["trial_waits_for"]
    assert "nodes must be added by hand" in happened["trial_waits_for"]
    assert happened["waits_no_more"] is True
    assert happened["waited"] is True and happened["step"] == 2


@pytest.mark.extended
def test_the_task_of_a_trial_that_is_killed_ends_with_it(happened: dict[str, Any]) -> None:
    assert happened["orphan"] is False
