"""`headfold estimate`: what a conversion will take, from the checkpoint's config alone, before it is run."""

from __future__ import annotations

import math
import os
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

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


def estimate(conversion: Conversion, *, base: int | None = None, rate: float | None = None) -> Estimate:
    """Memory, disk and time of a conversion. `base`: bytes of the process before it starts (default: as it is now);
    `rate`: operations a second here (default: measured)."""
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
    rate = rate or matmul_rate(conversion.working)
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


def estimate_conversions(request: ConversionRequest, *, elsewhere: Elsewhere | None = None) -> list[Estimate]:
    """The estimate of each conversion that a request comes to, in falling order of their budgets; no weights are read.

    `elsewhere`: on a GPU of that machine, which need not be there.
    """
    working = request.written if elsewhere is not None else request.working
    if elsewhere is not None:
        there = {"available": elsewhere.gpu_bytes or 0, "on_gpu": True, "elsewhere": True}
    else:
        device = checkpoints.device_of(request.device)
        there = {"available": available_bytes(device), "on_gpu": device.type == "cuda"}
    found, rate = [], matmul_rate(working)
    for budget, requested in request.distinct(report=True).items():
        used = float(budget)
        conversion = Conversion(request.config, request.recipe, used, *request.text_sizes, request.written, working)
        words = request.ceiling_note(requested, used)
        result = estimate(conversion, rate=rate)
        found.append(replace(result, kv_ratio_asked=float(requested), ceiling=words, **there))
    return found


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


@dataclass(frozen=True)
class RunEstimate:
    """What a run of `convert` will take, and how it is done.

    Attributes:
        points: The estimate of each KV ratio.
        layerwise: Whether it is done layer by layer.
        turned: Whether that was looked at because it does not fit in memory.
        disk: Bytes of what is written, and of what lies beside it on the way.
        folder: Where it is written.
    """

    points: tuple[Estimate, ...]
    layerwise: bool
    turned: bool
    disk: int
    folder: Path | None

    @classmethod
    def of(
        cls, points: Sequence[Estimate], folder: str | Path | None, *, several: bool, layerwise: bool | None
    ) -> RunEstimate:
        """Decide how a run is done: as `layerwise` says, or, where that is None, in memory if it fits.

        `several`: whether ratios are converted from one calibration, which is done in memory alone.
        """
        first, turned = points[0], False
        if layerwise is None and not several and folder is not None and first.available:
            turned = first.resident > SPARE * first.available
        by_layer = bool(layerwise) or (turned and first.layerwise_possible)
        disk = 0
        if folder is not None:
            disk = sum(point.disk for point in points) + by_layer * first.scratch
        return cls(tuple(points), by_layer, turned, disk, None if folder is None else Path(folder))

    @property
    def memory(self) -> int:
        """Bytes of memory at the largest stage."""
        return max(point.layerwise if self.layerwise else point.resident for point in self.points)

    def announce(self) -> None:
        """Say on stderr what it will take. Raises ConfigError where memory or disk do not suffice."""
        first = self.points[0]
        for words in filter(None, (point.ceiling for point in self.points)):
            print(words, file=sys.stderr, flush=True)
        about = duration(sum(point.seconds for point in self.points))
        taken = f"{_giga(self.memory)} of memory, {_giga(self.disk)} of disk"
        print(f"estimate: about {about}, {taken}", file=sys.stderr, flush=True)
        if first.available and self.memory > first.available:
            by_layer = max(point.layerwise for point in self.points)
            other = f"layer by layer it would be {_giga(by_layer)}" if first.layerwise_possible else first.why_not
            raise ConfigError(
                f"memory: this conversion does not fit: it takes about {_giga(self.memory)}, and "
                f"{_giga(first.available)} are available; {other}; fewer calibration tokens or another machine would do"
            )
        free = math.inf if self.folder is None else disk_free(self.folder)
        if 0 < free < self.disk:  # none at all is free where nothing can be written, which is told as that
            raise ConfigError(
                f"out: the result does not fit: it takes about {_giga(self.disk)}, and {_giga(free)} are free at "
                f"{str(self.folder)!r}; free some, or give another folder"
            )

    def explain(self) -> None:
        """Say on stderr why it is done layer by layer, or that it cannot be."""
        if not self.turned:
            return
        words = describe(self.points[0])
        about = f"about {words['in memory']}, {words['available now']} available; layer by layer: "
        print(f"this conversion would take {about}{words['layer by layer']}", file=sys.stderr)


def _giga(count: float) -> str:
    return f"{count / 2**30:.2f} GiB"
