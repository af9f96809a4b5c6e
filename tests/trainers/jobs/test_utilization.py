"""Numerator and denominator of a training's GPU utilization."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch.utils.flop_counter import FlopCounterMode

from trainers.jobs.utilization import PEAKS, TokenWork, peak_flops

NAMES = {
    "NVIDIA A100-SXM4-40GB": "A100",
    "NVIDIA A100 80GB PCIe": "A100",
    "NVIDIA H100 80GB HBM3": "H100",
    "NVIDIA H100 PCIe": "H100 PCIE",
    "NVIDIA H100 NVL": "H100 NVL",
    "NVIDIA H200": "H200",
    "NVIDIA H200 NVL": "H200 NVL",
    "NVIDIA B200": "B200",
    "NVIDIA A10G": "A10G",
    "NVIDIA A10": "A10",
    "NVIDIA L4": "L4",
    "NVIDIA L40": "L40",
    "NVIDIA L40S": "L40S",
    "Tesla V100-SXM2-16GB": "V100 SXM2",
    "Tesla V100-PCIE-16GB": "V100 PCIE",
    "Tesla T4": "T4",
}


def test_every_card_that_clouds_rent_has_its_own_peak() -> None:
    assert {name: peak_flops(name) for name in NAMES} == {
        name: pytest.approx(PEAKS[key] * 1e12) for name, key in NAMES.items()
    }
    h100, pcie, nvl = (PEAKS[key] for key in ("H100", "H100 PCIE", "H100 NVL"))
    assert pcie < nvl < h100 and PEAKS["L4"] < PEAKS["L40"] < PEAKS["L40S"]
    for unknown in ("NVIDIA GeForce RTX 4090", "NVIDIA A100-SXM4-40GB MIG 3g.20gb", "NVIDIA A1000"):
        assert peak_flops(unknown) is None


@pytest.mark.parametrize("family", ["llama", "qwen2"])
def test_the_work_of_a_token_is_that_of_torch(family: str, tiny_model: Any) -> None:
    """Torch counts the eager way, which computes whole squares of attention, and neither norms nor biases."""
    model = tiny_model(family)
    model.set_attn_implementation("eager")
    length = 16
    with FlopCounterMode(display=False) as counter:
        model(input_ids=torch.zeros(1, length, dtype=torch.long)).logits.sum().backward()
    work = TokenWork.of(model, length)
    square = TokenWork.of(model, 2 * length)  # attention is half of a square in ours
    assert square.model == pytest.approx(counter.get_total_flops() / length, rel=0.02)
    assert work.hardware == work.model
    distilled = TokenWork.of(model, length, recomputed=True, teacher=model)
    assert distilled.model == work.model
    assert distilled.hardware == pytest.approx(5 / 3 * work.model)  # 2 + 2 + 4 and 2 of the teacher, of 6
    for parameter in model.parameters():
        parameter.requires_grad_(False)
    frozen = TokenWork.of(model, length)
    assert frozen.model < work.model
