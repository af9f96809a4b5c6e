"""Resources of an operation, summed up, and the estimate of a conversion."""

from __future__ import annotations

import math
import os
from collections.abc import Mapping
from dataclasses import dataclass, replace

import torch

from attention.base.memory import memory_now
from attention.base.text import gib
from attention.base.timing import duration
from attention.calibration.sizes import FREE_SHARE, most_exact
from attention.ratios import bytes_of_ratio, own_heads, percent
from attention.tensor_parallel import RankCache
from orchestrator.resources.accelerators import conversion_rate, memory_of
from orchestrator.resources.memory import (
    all_statistics,
    available_bytes,
    layerwise_stages,
    resident_peak,
)
from orchestrator.resources.processes import search_phase_bytes
from orchestrator.resources.size import READ, READING, SPARE, Conversion, Size
from orchestrator.resources.time import START_SECONDS, common_operations, matmul_rate, operations
from orchestrator.storage.records import unmet


@dataclass(frozen=True)
class Estimate:
    """Peak memory, bytes that stay on disk, and seconds.

    `scratch`: temporary bytes on disk.

    `a + b` is a followed by b: the larger peak of the two, and the sum of what stays and of the
    time.
    """

    memory: int = 0
    disk: int = 0
    seconds: float = 0.0
    scratch: int = 0

    def __add__(self, other: Estimate) -> Estimate:
        return Estimate(
            memory=max(self.memory, other.memory),
            disk=self.disk + other.disk,
            seconds=self.seconds + other.seconds,
            scratch=max(self.scratch, other.scratch),
        )

    def larger(self, other: Estimate) -> Estimate:
        """Return what either of two takes at most."""
        return Estimate(
            memory=max(self.memory, other.memory),
            disk=max(self.disk, other.disk),
            seconds=max(self.seconds, other.seconds),
            scratch=max(self.scratch, other.scratch),
        )

    def describe(self) -> str:
        """Return all three in one line."""
        disk = gib(self.disk + self.scratch)
        return f"about {duration(self.seconds)}, {gib(self.memory)} of memory, {disk} of disk"


@dataclass(frozen=True)
class Machine:
    """The device and the machine of an operation.

    Attributes:
        memory: Bytes that it may take there, of the machine or of one GPU; 0 where that is not
            known.
        on_gpu: Whether the memory is that of a GPU.
        elsewhere: Whether this is another machine than the one of this process.
        gpu: The name of that GPU; empty on a CPU, and where it is not known.
    """

    memory: int
    on_gpu: bool = False
    elsewhere: bool = False
    gpu: str = ""

    @classmethod
    def here(cls, device: torch.device) -> Machine:
        on_gpu = device.type == "cuda"
        name = torch.cuda.get_device_name(device) if on_gpu else ""
        return cls(available_bytes(device), on_gpu=on_gpu, gpu=name)

    @classmethod
    def named(
        cls, device: str, gpus: int | None, gpu_memory: int | None, gpu: str | None = None
    ) -> Machine | None:
        """Return the machine of `--device`, `--gpus`, `--gpu-memory` (GiB) and `--gpu`.

        None stands for this machine.
        """
        if device == "cpu" or gpus == 0:
            return None
        no_gpu_here = device.startswith("cuda") and not torch.cuda.is_available()
        if gpus is None and gpu_memory is None and gpu is None and not no_gpu_here:
            return None
        memory = gpu_memory * 2**30 if gpu_memory else memory_of(gpu or "") or 0
        return cls(memory, on_gpu=True, elsewhere=True, gpu=gpu or "")

    @property
    def rate(self) -> float | None:
        """Operations per second of a conversion on that GPU; None where they are not known."""
        return conversion_rate(self.gpu) if self.gpu else None


@dataclass(frozen=True)
class ConversionEstimate:
    """The resources of a conversion: bytes, floating-point operations, seconds.

    Attributes:
        kv_bytes_per_token: Of the converted model, heads alone.
        kv_bytes_per_token_original: Of the original model.
        resident: Peak memory of the process in memory, with libraries and buffers; on a GPU that
            of the GPU.
        layerwise: The same layer by layer.
        stages: Peak memory of each stage of the way layer by layer.
        layerwise_possible: Whether there is that way.
        why_not: Why there is not.
        available: Memory that is free, of the machine or of one GPU; 0 where that is not known.
        disk: Bytes of the result.
        scratch: Additional bytes on disk until the end.
        flops: Operations of the way layer by layer.
        rate: Operations per second: of the GPU `gpu`, or else of a matrix product here.
        seconds: Of the way layer by layer, at that rate.
        shared_flops: Of what is done once for all KV ratios, in memory alone: the short fits that
            recipes are compared by, DHA's search phase.
        common_seconds: Of `seconds`, those that further KV ratios in memory share with the first.
        ceiling: The ratio that is used instead of one that cannot be met, in words.
        on_gpu: Whether `available` is the memory of a GPU.
        host: With a GPU, peak memory of its machine: the statistics of all layers are there.
        host_available: Memory of that machine that is free; 0 where that is not known.
        elsewhere: Whether it is that of another machine.
        gpu: The GPU that `rate` is of; empty if it is that of this machine's CPUs.
        tensor_parallel: What each GPU of a tensor-parallel engine will hold, where requested.
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
    shared_flops: float = 0.0
    common_seconds: float = 0.0
    ceiling: str = ""
    on_gpu: bool = False
    host: int = 0
    host_available: int = 0
    elsewhere: bool = False
    gpu: str = ""
    tensor_parallel: RankCache | None = None

    @classmethod
    def of(
        cls,
        conversion: Conversion,
        machine: Machine,
        *,
        why_not: str = "",
        requested_ratio: float | None = None,
        ceiling: str = "",
        base: int | None = None,
    ) -> ConversionEstimate:
        """Estimate memory, disk and time of a conversion.

        Args:
            why_not: Why it cannot run layer by layer; empty if it can.
            requested_ratio: The KV ratio that the user has named, where that is another one.
            ceiling: Why that ratio is not used, in words.
            base: Bytes of the process before it starts (default: as it is now).
        """
        size, g = Size.of(conversion.config), conversion.geometry
        host_memory = machine.memory
        if machine.on_gpu:
            host_memory = 0 if machine.elsewhere else available_bytes()
        limit = FREE_SHARE * (host_memory or math.inf)
        sampled = conversion.sampled_tokens
        mixed = most_exact(g, sampled, limit, conversion.sequence_length, in_memory=True)
        in_memory = replace(conversion, mixed=mixed)
        base = memory_now() if base is None else base
        width, written = conversion.working.itemsize, conversion.dtype.itemsize
        tokens = conversion.used_tokens + conversion.eval_tokens
        gpu_memory = machine.memory if machine.on_gpu else 0
        stages = {
            name: base + READ + bytes_in_stage
            for name, bytes_in_stage in layerwise_stages(
                conversion, size, width, tokens, gpu_memory
            ).items()
        }
        stages["texts"] = base + READING
        flops = operations(conversion, size, tokens)
        rate = machine.rate or matmul_rate(conversion.working)
        projections = own_heads(g) * g.head_dim * g.hidden_size
        parameters_left = size.total - projections + round(projections * conversion.kv_ratio)
        parameters_left += g.num_layers * conversion.added
        return cls(
            kv_ratio=conversion.kv_ratio,
            kv_ratio_asked=conversion.kv_ratio if requested_ratio is None else requested_ratio,
            kv_bytes_per_token=bytes_of_ratio(conversion.kv_ratio, g, written),
            kv_bytes_per_token_original=bytes_of_ratio(1.0, g, written),
            parameters=size.total,
            resident=base
            + READ
            + resident_peak(
                in_memory,
                size,
                width,
                gpu_memory,
                search_phase_bytes(conversion),
                on_gpu=machine.on_gpu,
            ),
            layerwise=max(stages.values()),
            stages=stages,
            layerwise_possible=not why_not,
            why_not=why_not,
            available=machine.memory,
            disk=written * parameters_left,
            scratch=4 * width * tokens * g.hidden_size + conversion.plan_files(width),
            flops=flops,
            rate=rate,
            seconds=START_SECONDS + flops / rate,
            common_seconds=START_SECONDS + common_operations(conversion, size, tokens) / rate,
            ceiling=ceiling,
            on_gpu=machine.on_gpu,
            host=base + READ + all_statistics(in_memory) if machine.on_gpu else 0,
            host_available=host_memory if machine.on_gpu else 0,
            elsewhere=machine.elsewhere,
            gpu=machine.gpu if machine.rate else "",
        )

    @property
    def in_memory(self) -> Estimate:
        return Estimate(self.resident, self.disk, self.seconds + self.shared_flops / self.rate)

    @property
    def layer_by_layer(self) -> Estimate:
        return Estimate(self.layerwise, self.disk, self.seconds, self.scratch)

    @property
    def too_large(self) -> bool:
        """Whether it certainly does not fit into memory as a whole."""
        pairs = [(self.resident, self.available), (self.host, self.host_available)]
        return any(0 < available < needed / SPARE for needed, available in pairs)

    @property
    def memory(self) -> str:
        """The memory that it takes and that there is, in words."""
        kind = f"GPU memory and {gib(self.host)} of the machine's" if self.on_gpu else "memory"
        layerwise = f", or {gib(self.layerwise)} layer by layer" if self.layerwise_possible else ""
        there = gib(self.available) if self.available else "an unknown amount"
        where = "on each GPU" if self.elsewhere else "available"
        return f"{gib(self.resident)} of {kind}{layerwise}; {there} {where}"

    @property
    def memory_parts(self) -> Mapping[str, str]:
        """The memory of each stage of the way layer by layer, in words."""
        if not self.layerwise_possible:
            return {"memory, layer by layer": self.why_not}
        stages = sorted(self.stages.items(), key=lambda stage: -stage[1])
        return {
            f"memory, layer by layer, {name}": f"{gib(most)} {_STAGES[name]}"
            for name, most in stages
        }

    def describe(self, *, verbose: bool = False) -> Mapping[str, str]:
        """Return the estimate in words, by what they are about.

        Args:
            verbose: Whether to list the parts of the memory.
        """
        giga = 2.0**30
        kv_bytes = (
            f"{self.kv_bytes_per_token:,} of {self.kv_bytes_per_token_original:,} KV bytes per "
            "token"
        )
        about = f"about {duration(self.in_memory.seconds)}"
        if self.gpu:
            time = f"{about} on one {self.gpu}, by what was measured on an H200 (docs/gpu.md)"
        else:
            time = f"{about} on this machine's {os.cpu_count()} CPUs"
            if self.on_gpu:
                time += "; for the time on a GPU name its type with --gpu, e.g. --gpu H100"
        ranks = self.tensor_parallel
        return {
            "cache": f"{percent(self.kv_ratio)} of the original{unmet(vars(self))}: {kv_bytes}",
            **({"tensor parallelism": ranks.note} if ranks else {}),
            "memory": self.memory,
            **(self.memory_parts if verbose else {}),
            "disk": (
                f"{self.disk / giga:.2f} GiB, and {self.scratch / giga:.2f} GiB temporary (layer "
                "by layer)"
            ),
            "work": f"{self.flops + self.shared_flops:.2g} operations; {time}",
        }


_STAGES = {
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
"""When the memory of a conversion layer by layer is highest, in words, by the names of
`layerwise_stages`.
"""
