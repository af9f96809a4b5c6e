"""The device that is measured: a CUDA GPU, and for tests the CPU or the emulated device of the tests."""

from __future__ import annotations

import importlib
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from unittest import mock

import torch

from attention.base.memory import memory_peak
from orchestrator import checkpoints
from trainers.jobs.curve import peak_flops

NAMES = ("cuda", "cpu", "fgpu")
HELPERS = Path(__file__).resolve().parents[2] / "tests" / "helpers"


@dataclass(frozen=True)
class Device:
    """A device by its name. Only "cuda" is measured at full size; the others are there to see that all parts run."""

    name: str
    torch_device: torch.device

    @property
    def small(self) -> bool:
        return self.name != "cuda"

    @property
    def dtype(self) -> torch.dtype:
        return torch.float32 if self.small else torch.bfloat16

    @property
    def of_processes(self) -> str:
        """The device of DeepSpeed and engines, which do not know the emulated device."""
        return "cuda" if self.name == "cuda" else "cpu"

    @property
    def clock(self) -> str:
        """The kind of clock for `benchmarks.report.medians`."""
        return self.of_processes

    def pick(self, small: Any, full: Any) -> Any:
        return small if self.small else full

    def seconds(self, work: Callable[[], object], rounds: int = 3) -> float:
        """The least seconds of a call among `rounds`, after one that does not count."""
        times = []
        for _ in range(rounds + 1):
            self.wait()
            started = time.perf_counter()
            work()
            self.wait()
            times.append(time.perf_counter() - started)
        return min(times[1:])

    def wait(self) -> None:
        if self.name == "cuda":
            torch.cuda.synchronize()

    def forget_peak(self) -> None:
        if self.name == "cuda":
            torch.cuda.reset_peak_memory_stats()

    @property
    def peak_bytes(self) -> int:
        """Peak memory of the device; of the process, where they have the same."""
        return torch.cuda.max_memory_allocated() if self.name == "cuda" else memory_peak()

    @property
    def peak_flops(self) -> float | None:
        """Operations per second of dense bfloat16 products; None where they are not known."""
        return peak_flops() if self.name == "cuda" else None


@contextmanager
def opened(name: str) -> Iterator[Device]:
    """The device for the time of the body."""
    if name != "fgpu":
        yield Device(name, torch.device(name))
        return
    sys.path.append(str(HELPERS))
    emulated = importlib.import_module("emulated_device")
    with emulated.emulated_device() as device, mock.patch.object(checkpoints, "device_of", lambda name: device):
        yield Device(name, device)


def card(name: str) -> dict[str, str]:
    """Return the description of the device, in words that make sense elsewhere: the card, its driver, versions."""
    facts = {"device": {"cpu": "CPU, small sizes", "fgpu": "the emulated device, small sizes"}.get(name, "")}
    if name == "cuda":
        properties = torch.cuda.get_device_properties(0)
        facts = {
            "device": properties.name,
            "memory": f"{properties.total_memory / 2**30:.0f} GiB",
            "driver": _smi("driver_version"),
            "power limit": f"{_smi('power.limit')} W",
            "CUDA of torch": str(torch.version.cuda),
        }
    return facts


def _smi(field: str) -> str:
    command = ["nvidia-smi", f"--query-gpu={field}", "--format=csv,noheader,nounits", "--id=0"]
    try:
        return subprocess.run(command, capture_output=True, text=True, check=True, timeout=30).stdout.strip()
    except (OSError, subprocess.SubprocessError):
        return "unknown"
