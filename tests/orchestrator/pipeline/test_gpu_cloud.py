"""configs/llama2-7b.yaml to its end on the node types of cluster.yaml, with a small model, on CPUs (`gpu_cloud.py`)."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from json_output import last_json

SCRIPT = Path(__file__).with_name("gpu_cloud.py")
REPOSITORY = SCRIPT.parents[3]
LITTLE = [
    "name=gpus",
    "model.path=examples/stdlib-llama",
    "train.device=cpu",
    "data.sequence_length=64",
    *(f"data.{split}={{source: stdlib, tokens: {tokens}}}"
      for split, tokens in (("train", 16_384), ("eval", 2048), ("calibration", 2048))),
    "train.batch_size=4",
    "train.micro_batch_size=1",
    "train.cpus_per_worker=1",
    "search.recipes=[gqa, headfold_gqa]",
    "search.kv_ratios=[0.25]",
    "search.learning_rates=[3e-4]",
    "search.num_samples=0",
    "rungs.steps=[0,2]",
    "resources.trial_accelerator_type=A10G",
    "resources.trial_cpus=1",
]  # fmt: skip
SHORT = ["train.num_workers=1", "search.recipes=[gqa]", "promotion.enabled=false"]
WHOLE = [
    "train.num_workers=2",
    "promotion.train={num_workers: 4}",
    "promotion.steps=4",
    "promotion.evaluations=2",
]
pytestmark = [pytest.mark.slow, pytest.mark.extended, pytest.mark.timeout(2400)]


@pytest.mark.parametrize(
    ("settings", "losses"),
    [
        pytest.param(SHORT, {}, id="short"),
        pytest.param(WHOLE, {"node": 1, "drain": 3}, id="nodes_go"),
    ],
)
def test_a_search_for_gpus_runs_to_its_end_from_a_head_alone(
    settings: list[str], losses: dict[str, int], tmp_path: Path
) -> None:
    command = [sys.executable, str(SCRIPT), str(tmp_path), json.dumps(losses), *LITTLE, *settings]
    ended = subprocess.run(command, cwd=REPOSITORY, capture_output=True, text=True, check=False)
    assert ended.returncode == 0, ended.stderr[-4000:]
    report: dict[str, Any] = last_json(ended.stdout)
    assert report["code"] == 0, report["log"][-6000:]
    assert report["at_first"] == ["head"]
    assert (report["misplaced"], report["trained_on"]) == ([], ["A100"])
    assert "workers share 32 sequences" in report["log"]
    assert report["gpus"] == 4 * 4 + 2 * 8  # as in cluster.yaml, however many of its nodes are up
    assert report["nodes"]["A10G"] >= 1 + ("node" in losses)
    assert report["nodes"]["A100"] >= 1 + ("drain" in losses)
    assert {"killed": "node", "drained": "drain"}.keys() & report.keys() == ({"killed", "drained"} if losses else set())
    outcome = json.loads((tmp_path / "outcome.json").read_text())
    assert {trial["status"] for trial in outcome["trials"]} == {"done"}
    if losses:
        (promoted,) = outcome["promotion"]["candidates"].values()
        assert (promoted["status"], promoted["steps"]) == ("promoted", 6)


def test_an_autoscaler_whose_process_has_ended_is_named_as_the_cause(tmp_path: Path) -> None:
    command = [sys.executable, str(SCRIPT), str(tmp_path), json.dumps({"monitor": 0}), *LITTLE, *SHORT]
    ended = subprocess.run(command, cwd=REPOSITORY, capture_output=True, text=True, check=False)
    assert ended.returncode == 0, ended.stderr[-4000:]
    report: dict[str, Any] = last_json(ended.stdout)
    assert report["code"] == 2, report["log"][-6000:]
    message = report["log"].splitlines()[-1]
    assert "headfold: the cluster's autoscaler is not running: its process on the head node" in message
    assert "/logs/monitor.log; restart it with `ray up --restart-only`" in message
    assert "On the nodes that are there: resources.accelerator_type: no node has 'A100'" in message
