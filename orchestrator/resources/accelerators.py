"""Memory and speed of accelerators, by the names that Ray gives their types."""

from __future__ import annotations

import re

from trainers.jobs.utilization import peak_flops

GIGA = 10**9
# Gigabytes of the smallest card of a type, from NVIDIA's data sheets. Ray derives the type from the
# card's name (`ray.util.accelerators` has constants for some) and does not distinguish sizes of one
# type.
GIGABYTES = {
    "K80": 12,  # for each of its two chips, which are separate devices
    "P4": 8,
    "P100": 16,
    "V100": 16,
    "T4": 16,
    "A10": 24,
    "A10G": 24,
    "A40": 48,
    "A100": 40,
    "L4": 24,
    "L40": 48,
    "L40S": 48,
    "H20": 96,
    "H100": 80,
    "H200": 141,
    "GH200": 96,
    "B200": 180,
}
LARGER = {"V100": "V100-32G", "A100": "A100-80G", "GH200": "GH200-144G"}
"""Types of two sizes, and a name for the larger, which nodes can be given as a resource
`accelerator_type:NAME`.
"""
CONVERSION_RATE = 12e12
"""Operations per second of a conversion on an H200, as `orchestrator.resources.time` counts them.

A layer of Llama-3-8B's width came to 17e12 and one of gpt-oss-20b's to 7e12 (docs/gpu.md). Launches
of small products limit it, so that a card with a higher peak is estimated to be no faster.
"""
TRAINING_UTILIZATION = 0.29
"""Share of the peak of bfloat16 products that a whole training step reached there."""
_MEASURED_ON = "H200"
_OWN = re.compile(r"-(\d+)GB?$")


def memory_of(accelerator_type: str) -> int | None:
    """Return the bytes of one accelerator; None where its type is not known.

    They are what the name ends in (`A100-80G`), else the table's. A gigabyte is 10^9 bytes here.
    Cards have up to 7% more, which driver, CUDA and NCCL take for themselves.
    """
    if stated := _OWN.search(accelerator_type):
        return int(stated[1]) * GIGA
    gigabytes = GIGABYTES.get(accelerator_type)
    return None if gigabytes is None else gigabytes * GIGA


def most_memory_of(accelerator_type: str | None) -> int:
    """Return the bytes that one accelerator may have at most, driver and CUDA included.

    For what is sized by them; of an unknown type those of an H100.
    """
    memory = memory_of(accelerator_type) if accelerator_type else None
    return round(1.07 * (memory or GIGABYTES["H100"] * GIGA))


def memory_in_words(accelerator_type: str) -> str:
    """Return the memory of a type in words, and what to do if there are larger cards of it."""
    memory = memory_of(accelerator_type)
    if memory is None:
        return f"the memory of {accelerator_type!r} is not known"
    larger = LARGER.get(accelerator_type)
    rest = (
        f" (where yours have more, give their nodes the resource accelerator_type:{larger} and "
        "name that type here)"
    )
    return f"{accelerator_type} has {memory // GIGA} GB{rest if larger else ''}"


def conversion_rate(accelerator_type: str) -> float | None:
    """Return the estimated operations per second of a conversion on one accelerator.

    None where its peak is not known.
    """
    peak = peak_flops(accelerator_type)
    if peak is None:
        return None
    fastest = peak_flops(_MEASURED_ON)
    assert fastest is not None
    return CONVERSION_RATE * min(1.0, peak / fastest)


def training_operations(accelerator_type: str) -> float | None:
    """Return the estimated operations per second of a training step on one accelerator.

    None where its peak is not known.
    """
    peak = peak_flops(accelerator_type)
    return None if peak is None else TRAINING_UTILIZATION * peak
