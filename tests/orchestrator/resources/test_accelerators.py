"""How much memory a type of accelerator has."""

from __future__ import annotations

import pytest
from ray.util import accelerators as ray_names

from orchestrator.resources.accelerators import GIGA, memory_in_words, memory_of


@pytest.mark.parametrize(
    ("name", "gigabytes"),
    [("A10G", 24), ("A100", 40), ("A100-40G", 40), ("A100-80G", 80), ("V100-32GB", 32), ("H200", 141), ("T4", 16)],
)
def test_a_name_says_its_memory(name: str, gigabytes: int) -> None:
    assert memory_of(name) == gigabytes * GIGA
    assert f"{gigabytes} GB" in memory_in_words(name)


def test_what_is_not_known_is_reported() -> None:
    assert memory_of("TPU-V4") is None
    assert "not known" in memory_in_words("TPU-V4")
    assert "accelerator_type:A100-80G" in memory_in_words("A100")  # a larger card of the same name


@pytest.mark.parametrize(
    "name", ["TESLA_K80", "TESLA_P4", "TESLA_T4", "TESLA_V100", "TESLA_A10G", "L4", "A100", "H100"]
)
def test_names_are_those_that_ray_gives(name: str) -> None:
    assert memory_of(getattr(ray_names, f"NVIDIA_{name}")) is not None
