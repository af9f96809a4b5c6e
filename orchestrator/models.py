"""Checkpoints and texts for the verbs: load, check before any weight is read, measure."""

from __future__ import annotations

import contextlib
import ctypes
import gc
import json
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from attention import checkpoint
from attention.geometry import HeadGeometry
from attention.modeling import plan_of
from orchestrator.config import ConfigError
from trainers.data import Split, load_sequences
from trainers.evaluation import Evaluation, Remembering, evaluate, measure_cache

if TYPE_CHECKING:
    from transformers import PreTrainedModel

DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}
CACHE_TOKENS = 64


class Phases(dict[str, float]):
    """Seconds of each named phase: `with phases("plan"): ...`."""

    @contextlib.contextmanager
    def __call__(self, name: str) -> Iterator[None]:
        started = time.perf_counter()
        try:
            yield
        finally:
            self[name] = self.get(name, 0.0) + time.perf_counter() - started


def kernel_field(file: str, name: str) -> int:
    """Bytes of a field that the kernel gives in kB, e.g. of /proc/meminfo; 0 on systems that have no such file."""
    try:
        lines = Path(file).read_text(encoding="utf-8").splitlines()
    except OSError:
        return 0
    return next((int(line.split()[1]) * 1024 for line in lines if line.startswith(f"{name}:")), 0)


def memory_now() -> int:
    """Resident memory of this process."""
    return kernel_field("/proc/self/status", "VmRSS")


def memory_peak() -> int:
    """The most that this process has had resident so far."""
    return kernel_field("/proc/self/status", "VmHWM")


def release_memory() -> None:
    """Free what only refers to itself, and hand freed memory back to the system where the C library can."""
    gc.collect()
    trim = getattr(ctypes.CDLL(None), "malloc_trim", None) if sys.platform == "linux" else None
    if trim is not None:
        trim(0)


def dtype_of(name: str) -> torch.dtype:
    if name not in DTYPES:
        raise ConfigError(f"dtype must be one of {sorted(DTYPES)}, got {name!r}")
    return DTYPES[name]


def device_of(name: str) -> torch.device:
    """`auto` takes a GPU if there is one. Raises ConfigError for a device that is not there."""
    if name == "auto":
        return torch.device("cuda" if torch.cuda.is_available() else "cpu")
    try:
        device = torch.device(name)
    except RuntimeError:
        raise ConfigError(f"device must be auto, cpu or cuda, got {name!r}") from None
    if device.type == "cuda" and not torch.cuda.is_available():
        raise ConfigError(f"device {name!r}: this machine has no CUDA GPU that torch can use; choose cpu")
    return device


def geometry_of(
    path: str, sequence_length: int | None = None, key: str = "model.path", *, weights: bool = True
) -> HeadGeometry:
    """Geometry of a checkpoint, from its config alone.

    Raises ConfigError if nothing is there, the family is not supported, a local folder has no safetensors (unless
    `weights` are not needed), or `sequence_length` is longer than the model takes.
    """
    try:
        geometry = HeadGeometry.from_config(checkpoint.load_config(path))
    except ValueError as error:
        raise ConfigError(f"{key}: {error}") from None
    folder = Path(path)
    if weights and folder.is_dir() and not any(folder.glob("*.safetensors")):
        raise ConfigError(f"{key}: {path!r} has no *.safetensors; save the weights as safetensors first")
    if sequence_length is not None and sequence_length > geometry.max_positions:
        raise ConfigError(
            f"sequence_length: got {sequence_length}, but {path!r} takes at most {geometry.max_positions} positions"
        )
    return geometry


def load_model(path: str | Path, dtype: str = "float32", device: str = "cpu") -> PreTrainedModel:
    """A checkpoint in evaluation mode, without gradients."""
    model = checkpoint.load(path, dtype_of(dtype)).to(device_of(device))  # pyright: ignore[reportArgumentType]
    return model.requires_grad_(False)


def record_of(path: str | Path) -> dict[str, Any]:
    """What was recorded beside the weights when a checkpoint was converted; empty for any other checkpoint."""
    file = Path(path) / checkpoint.PLAN_FILE
    return json.loads(file.read_text(encoding="utf-8")) if file.is_file() else {}


def load_tokenizer(path: str | Path) -> Any:
    """Raises ConfigError if the checkpoint has none."""
    from transformers import AutoTokenizer

    try:
        return AutoTokenizer.from_pretrained(str(path))
    except (OSError, ValueError, KeyError) as error:
        raise ConfigError(
            f"no tokenizer beside the checkpoint {str(path)!r}: {str(error).splitlines()[0]}; copy the tokenizer's "
            "files into its folder"
        ) from None


def texts(
    source: str, split: Split, tokenizer: Any, tokens: int, sequence_length: int, seed: int, **more: Any
) -> Tensor:
    """Token sequences `[N, T]` of one split. Raises DataError naming the source."""
    return load_sequences(
        source, tokenizer, split=split, tokens=tokens, sequence_length=sequence_length, seed=seed, **more
    )


def parameters(model: PreTrainedModel) -> int:
    return sum(p.numel() for p in model.parameters())


def cache_facts(model: PreTrainedModel) -> dict[str, Any]:
    """KV cost as planned, and as a cache really held it after a prefill, both in the dtype of the model."""
    plan = plan_of(model)
    return {
        "kv_ratio": plan.kv_ratio,
        "kv_bytes_per_token": plan.kv_bytes_per_token(model.dtype),
        "cache_bytes_measured": measure_cache(model, CACHE_TOKENS),
        "cache_tokens": CACHE_TOKENS,
        "parameters": parameters(model),
    }


def score(
    model: PreTrainedModel, sequences: Tensor, teacher: PreTrainedModel | Remembering | None = None
) -> Evaluation:
    """Held-out loss, and KL to the teacher if there is one."""
    return evaluate(model, sequences, teacher=teacher)
