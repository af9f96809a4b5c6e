"""`headfold estimate`: what a conversion will take, from the checkpoint's config alone, before it is run."""

from __future__ import annotations

import math
import os
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch

from attention.progress import duration
from attention.ratios import own_heads
from orchestrator import checkpoints
from orchestrator.config.schema import ConfigError
from orchestrator.conversion import loading
from orchestrator.conversion.estimates.peaks import layerwise_stages, resident_peak
from orchestrator.conversion.estimates.sizes import READ, READING, SPARE, Conversion, Size
from orchestrator.conversion.estimates.work import START_SECONDS, available_bytes, matmul_rate, operations
from orchestrator.conversion.one_layer import check_layerwise
from orchestrator.conversion.request import ConversionRequest
from orchestrator.storage.paths import disk_free
from orchestrator.storage.records import percent, unmet
from search_spaces.recipes.recipe import Recipe


@dataclass(frozen=True)
class Estimate:
    """Bytes, floating-point operations, seconds.

    `kv_bytes_per_token`, `kv_bytes_per_token_original`: of the converted and of the original model, heads alone.
    `resident`, `layerwise`: peak memory of the process in either way, all it needs besides included; `stages`: what it
    comes to at each stage, by name; `available`: memory that is free for it, of the machine or, with `on_gpu`, of one
    GPU (0: not known); `elsewhere`: whether that is another machine than this one; `layerwise_possible`: whether there
    is the second way, else `why_not` says why.
    `disk`: of the result; `scratch`: of what lies beside it on the way. `flops` of the way layer by layer; `seconds` of
    it at the speed that a matrix product has here (`rate`, operations a second). `ceiling`: what is used in place of a
    ratio that cannot be met, in words.
    """

    kv_ratio: float
    kv_ratio_asked: float
    kv_bytes_per_token: int
    kv_bytes_per_token_original: int
    parameters: int
    resident: int
    layerwise: int
    stages: dict[str, int]
    layerwise_possible: bool
    why_not: str
    available: int
    disk: int
    scratch: int
    flops: float
    rate: float
    seconds: float
    ceiling: str = ""
    on_gpu: bool = False
    elsewhere: bool = False


@dataclass(frozen=True)
class Elsewhere:
    """Another machine than this one: the bytes of memory of each of its GPUs; None where they are not said."""

    gpu_bytes: int | None

    @classmethod
    def of(cls, device: str, gpus: int | None, gpu_memory: int | None) -> Elsewhere | None:
        """Return the machine that `--device`, `--gpus` and `--gpu-memory` (GiB) name; None where it is this one."""
        if device == "cpu" or gpus == 0:
            return None
        no_gpu_here = device.startswith("cuda") and not torch.cuda.is_available()
        if gpus is None and gpu_memory is None and not no_gpu_here:
            return None
        return cls(gpu_memory * 2**30 if gpu_memory else None)


def estimate(conversion: Conversion, *, base: int | None = None) -> Estimate:
    """Memory, disk and time of a conversion. `base`: bytes of the process before it starts (default: as it is now)."""
    size, g = Size.of(conversion.config), conversion.geometry
    base = loading.memory_now() if base is None else base
    width, written = conversion.working.itemsize, conversion.dtype.itemsize
    tokens = conversion.used_tokens + conversion.eval_tokens
    stages = {name: base + READ + held for name, held in layerwise_stages(conversion, size, width, tokens).items()}
    stages["texts"] = base + READING
    resident = base + READ + resident_peak(conversion, size, width)
    try:
        check_layerwise(conversion.recipe, conversion.config)
        why_not = ""
    except ValueError as error:
        why_not = str(error)
    flops = operations(conversion, size, tokens)
    rate = matmul_rate(conversion.working)
    projections = own_heads(g) * g.head_dim * g.hidden_size
    kept = size.total - projections + round(projections * conversion.kv_ratio)
    original = own_heads(g) * g.head_dim * written
    return Estimate(
        kv_ratio=conversion.kv_ratio,
        kv_ratio_asked=conversion.kv_ratio,
        kv_bytes_per_token=round(original * conversion.kv_ratio),
        kv_bytes_per_token_original=original,
        parameters=size.total,
        resident=resident,
        layerwise=max(stages.values()),
        stages=stages,
        layerwise_possible=not why_not,
        why_not=why_not,
        available=available_bytes(),
        disk=written * kept,
        scratch=4 * width * tokens * g.hidden_size + conversion.plan_files(width),
        flops=flops,
        rate=rate,
        seconds=START_SECONDS + flops / rate,
    )


def estimate_conversion(
    model: str | Path,
    recipe: str | Recipe,
    kv_ratio: float,
    **settings: Any,
) -> Estimate:
    """The estimate of `convert_checkpoint` with these arguments, from config.json alone. Raises as that does."""
    (result,) = estimate_conversions(model, recipe, [kv_ratio], **settings)
    return result


def estimate_conversions(
    model: str | Path,
    recipe: str | Recipe,
    kv_ratios: Sequence[float],
    *,
    elsewhere: Elsewhere | None = None,
    **settings: Any,
) -> list[Estimate]:
    """The estimate of each conversion that these ratios come to, those of several in falling order of their budgets.
    `elsewhere`: on a GPU of that machine, which need not be there.

    Raises as `convert_checkpoint` does.
    """
    if elsewhere is not None:
        settings |= {"device": "cpu"}  # whose checks pass anywhere
    asked = ConversionRequest.check(model, recipe, kv_ratios, config_only=True, **settings)
    working = asked.written if elsewhere is not None else asked.working
    if elsewhere is not None:
        there = {"available": elsewhere.gpu_bytes or 0, "on_gpu": True, "elsewhere": True}
    else:
        device = checkpoints.device_of(asked.device)
        there = {"available": available_bytes(device), "on_gpu": device.type == "cuda"}
    found = []
    for budget, requested in asked.distinct(kv_ratios, report=True).items():
        used = float(budget)
        result = estimate(Conversion(asked.config, asked.recipe, used, *asked.text_sizes, asked.written, working))
        words = asked.ceiling_note(requested, used)
        found.append(replace(result, kv_ratio_asked=float(requested), ceiling=words, **there))
    return found


def needs_layerwise(model: str | Path, recipe: str | Recipe, kv_ratio: float, **settings: Any) -> bool:
    """Whether a conversion does not fit into the memory that is available, but would layer by layer."""
    estimated = estimate_conversion(model, recipe, kv_ratio, **settings)
    if not estimated.available or estimated.resident <= SPARE * estimated.available:
        return False
    words = describe(estimated)
    about = f"about {words['in memory']}, {words['available now']} available; layer by layer: "
    print(f"this conversion would take {about}{words['layer by layer']}", file=sys.stderr)
    return estimated.layerwise_possible


def describe(estimated: Estimate) -> Mapping[str, str]:
    """The estimate in words, by what they are about."""
    giga = 2.0**30
    largest = max(estimated.stages, key=lambda name: estimated.stages[name])
    memory = "GPU memory" if estimated.on_gpu else "memory of the machine"
    room = f"{estimated.available / giga:.1f} GiB" if estimated.available else "unknown"
    return {
        "cache": f"{percent(estimated.kv_ratio)} of the checkpoint's{unmet(vars(estimated))}: "
        f"{estimated.kv_bytes_per_token:,} of {estimated.kv_bytes_per_token_original:,} KV bytes per token",
        "in memory": f"{estimated.resident / giga:.1f} GiB of {memory}",
        "layer by layer": f"{estimated.layerwise / giga:.1f} GiB of {memory}, most of it {STAGES[largest]}"
        if estimated.layerwise_possible
        else estimated.why_not,
        "of each GPU" if estimated.elsewhere else "available now": room,
        "disk": f"{estimated.disk / giga:.2f} GiB, and {estimated.scratch / giga:.2f} GiB on the way (layer by layer)",
        "work": f"{estimated.flops:.2g} operations; about {duration(estimated.seconds)} on this machine's "
        f"{os.cpu_count()} CPUs{'; how long on the GPU is not known here' if estimated.elsewhere else ''}",
    }


STAGES = {
    "texts": "while texts are read",
    "sensitivity": "while it is measured how much each layer's output matters",
    "embedding": "while tokens are embedded",
    "calibrate": "while statistics of a layer are collected",
    "plan": "while a layer is planned",
    "convert": "while a layer is converted",
    "refine": "while a layer is refined",
    "write": "while a layer is written",
    "head": "while losses are measured",
    "outside": "while embeddings and output head are written",
}
"""When the memory of a conversion layer by layer is highest, in words, by the names of `layerwise_stages`."""


def announce(
    model: str | Path,
    recipe: str | Recipe,
    kv_ratios: Sequence[float],
    out: str | Path | None,
    *,
    layerwise: bool | None,
    **settings: Any,
) -> None:
    """Say on stderr what a conversion will take, before it begins. Arguments as of `estimate_conversion`; `layerwise`:
    as asked for, None: wherever it does not fit in memory.

    Raises ConfigError where memory or disk do not suffice.
    """
    points = estimate_conversions(model, recipe, kv_ratios, **settings)
    for words in filter(None, (point.ceiling for point in points)):
        print(words, file=sys.stderr, flush=True)
    several = len(kv_ratios) > 1
    whole = max(point.resident for point in points)
    first, one = points[0], max(point.layerwise for point in points)
    turns = not several and out is not None and first.layerwise_possible and whole > SPARE * first.available
    by_layer = bool(layerwise or (layerwise is None and turns))
    needed = one if by_layer else whole
    disk = sum(point.disk for point in points) + by_layer * first.scratch if out is not None else 0
    about = duration(sum(point.seconds for point in points))
    print(f"estimate: about {about}, {_giga(needed)} of memory, {_giga(disk)} of disk", file=sys.stderr, flush=True)
    if first.available and needed > first.available:
        other = f"layer by layer it would be {_giga(one)}" if first.layerwise_possible else first.why_not
        raise ConfigError(
            f"memory: this conversion does not fit: it takes about {_giga(needed)}, and {_giga(first.available)} are "
            f"available; {other}; fewer calibration tokens or another machine would do"
        )
    free = math.inf if out is None else disk_free(Path(out))
    if 0 < free < disk:  # none at all is free where nothing can be written, which is told as that
        raise ConfigError(
            f"out: the result does not fit: it takes about {_giga(disk)}, and {_giga(free)} are free at {str(out)!r}; "
            "free some, or give another folder"
        )


def _giga(count: float) -> str:
    return f"{count / 2**30:.2f} GiB"
