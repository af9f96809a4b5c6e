"""Each red line of `headfold doctor`, and the line that is just not red."""

from __future__ import annotations

from typing import Any

import pytest

from orchestrator.doctor import judgement
from orchestrator.doctor.calls import ClusterNode, NoAnswerError
from orchestrator.doctor.findings import Finding
from orchestrator.doctor.judgement import ConfigFacts
from orchestrator.doctor.workers import settings_of_step
from trainers.settings import TrainSettings

GB = 10**9
H100 = {"name": "NVIDIA H100", "driver": "580.1", "memory_mib": 81_559.0, "used_mib": 4.0}


def facts(**changes: Any) -> Any:
    """Facts of one node with plenty of room and no GPU."""
    disks = {
        "scratch": {"folder": "/tmp", "free": 50 * GB, "total": 100 * GB},
        "hub cache": {"folder": "/cache", "free": 50 * GB, "total": 100 * GB},
    }
    return {"versions": {"torch": "2.13.0", "ray": "2.60.0"}, "gpus": [], "disks": disks} | changes


def node(name: str, gpus: int = 0) -> ClusterNode:
    return ClusterNode(name * 4, name, {"CPU": 8.0, "GPU": float(gpus)})


def config(**changes: Any) -> ConfigFacts:
    settled = ConfigFacts(
        weights_bytes=14 * GB, checkpoint_bytes=94 * GB, checkpoint_minutes=30.0, shortage=None, head_dim=128
    )
    return settled._replace(**changes)


def worst(findings: list[Finding]) -> str:
    return max((one.status for one in findings), key=["skipped", "ok", "warning", "failed"].index)


@pytest.mark.parametrize(
    ("counted", "shown", "device", "status"),
    [
        (1, [H100], "cuda", "ok"),
        (8, [], "cuda", "failed"),  # numbers that Ray counts, and no card
        (8, [], "cpu", "ok"),  # a rehearsal
        (0, [], None, "ok"),
        (2, [], None, "failed"),
        (2, [H100], None, "failed"),
        (0, [H100], None, "warning"),
        (1, [H100 | {"used_mib": 40_000.0}], "cuda", "warning"),
    ],
)
def test_gpus_that_ray_counts_are_there(counted: int, shown: Any, device: str | None, status: str) -> None:
    result = judgement.judge_devices([node("a", counted)], {"a": facts(gpus=shown)}, device)
    assert worst(result) == status
    assert all(one.remedy for one in result if one.status != "ok")


def test_different_drivers_are_reported() -> None:
    two = {"a": facts(gpus=[H100]), "b": facts(gpus=[H100 | {"driver": "570.9"}])}
    result = judgement.judge_devices([node("a", 1), node("b", 1)], two, "cuda")
    assert worst(result) == "warning" and "570.9: b" in result[-1].result


def test_a_separate_version_is_a_red_line_with_the_node() -> None:
    other = {"torch": "2.12.0", "ray": "2.60.0"}
    result = judgement.judge_versions({"a": facts(), "b": facts(), "c": facts(versions=other)})
    assert [one.status for one in result] == ["failed"]
    assert result[0].result == "torch differs: 2.13.0 on a, b; 2.12.0 on c"
    assert worst(judgement.judge_versions({"a": facts(), "b": facts()})) == "ok"


@pytest.mark.parametrize(
    ("offset", "error", "status"),
    [(0.01, 0.02, "ok"), (2.0, 1.8, "ok"), (-2.0, 0.1, "warning"), (90.0, 0.1, "failed"), (-6.0, 0.5, "failed")],
)
def test_clocks(offset: float, error: float, status: str) -> None:
    result = judgement.judge_clocks({"a": (0.0, 0.0), "b": (offset, error)})
    assert worst(result) == status
    assert status == "ok" or result[0].result.startswith("b: ")


def test_full_disks() -> None:
    full = facts()
    full["disks"]["scratch"]["free"] = 4 * GB
    assert worst(judgement.judge_disks({"a": full}, None, None)) == "failed"
    assert worst(judgement.judge_disks({"a": facts()}, 9 * GB, config())) == "ok"
    large = judgement.judge_disks({"a": facts()}, 9 * GB, config(weights_bytes=60 * GB))
    assert worst(large) == "failed" and "HF_HOME" in large[0].remedy
    assert worst(judgement.judge_disks({"a": facts()}, 9 * GB, config(shortage="too little"))) == "failed"


def test_a_node_with_a_separate_folder() -> None:
    seen = {"a": ["driver", "1"], "b": ["2"]}
    result = judgement.judge_visibility("/mnt/headfold", seen, ["a"])
    assert worst(result) == "failed" and "on b is another folder" in result[0].result
    assert worst(judgement.judge_visibility("/mnt", {"a": ["driver"]}, ["a"])) == "ok"
    assert worst(judgement.judge_visibility("/mnt", {"a": ["driver"]}, [])) == "failed", "what it writes is not seen"


@pytest.mark.parametrize(("rate", "status"), [(1000e6, "ok"), (200e6, "warning"), (50e6, "failed")])
def test_the_time_of_a_checkpoint(rate: float, status: str) -> None:
    """94 GB every half an hour, written by two nodes."""
    each: Any = {"written": int(rate / 2), "write_seconds": 1.0, "read_seconds": 0.5}
    result = judgement.judge_rates({"a": each, "b": each}, config())
    assert worst(result) == status
    assert result[0].numbers["checkpoint_seconds"] == pytest.approx(94e9 / rate)


def test_slow_storage_without_a_configuration_is_a_warning() -> None:
    each: Any = {"written": 10**6, "write_seconds": 1.0, "read_seconds": 0.5}
    assert worst(judgement.judge_rates({"a": each}, None)) == "warning"


@pytest.mark.parametrize(
    ("device", "kernel", "status"),
    [
        ("NVIDIA H100", "flash", "ok"),
        ("NVIDIA H100", "cuDNN", "ok"),
        ("NVIDIA V100", "memory-efficient", "warning"),
        ("NVIDIA V100", "math", "failed"),
        ("CPU", "math", "ok"),
    ],
)
def test_kernels_of_attention(device: str, kernel: str, status: str) -> None:
    measured: Any = {"a": {"device": device, "kernel": kernel, "milliseconds": 1.0}}
    assert worst(judgement.judge_attention(measured, "bfloat16")) == status


@pytest.mark.parametrize(
    ("backend", "hosts", "seconds", "status"),
    [("nccl", 1, 0.002, "ok"), ("nccl", 1, 0.2, "warning"), ("nccl", 2, 0.2, "ok"), ("gloo", 1, 5.0, "ok")],
)
def test_bandwidth(backend: str, hosts: int, seconds: float, status: str) -> None:
    measured: Any = {"workers": 8, "hosts": hosts, "backend": backend, "bytes": 2**29, "seconds": seconds}
    result = judgement.judge_reduce(measured | {"version": ""})
    assert worst(result) == status
    assert result[0].numbers["bytes_per_second"] == pytest.approx(1.75 * 2**29 / seconds)


def test_a_node_that_does_not_answer_is_a_red_line() -> None:
    result = judgement.silent("nodes", {"a": facts(), "b": NoAnswerError("no answer within 3 s"), "c": OSError("gone")})
    assert [one.result for one in result] == ["b: no answer within 3 s", "c: OSError: gone"]
    assert all(one.status == "failed" and one.remedy for one in result)


@pytest.mark.parametrize(
    "given",
    [{"compile": True, "zero_stage": 1}, {"document_mask": True}, {"assistant_only_loss": True}, {"tuning": "lora"}],
)
def test_the_step_of_a_check_suits_every_training(given: dict[str, Any]) -> None:
    """ZeRO 3 without what it does not have, on a model without a tokenizer."""
    settings = TrainSettings(**given)
    step = settings_of_step(settings, settings.shape._replace(workers=2))
    assert (step.zero_stage, step.batch_size, step.tuning) == (3, 2, "full")
    assert not (step.compile or step.document_mask or step.assistant_only_loss)
