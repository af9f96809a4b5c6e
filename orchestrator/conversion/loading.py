"""Checkpoints and texts for the verbs: load, check before any weight is read, measure."""

from __future__ import annotations

import contextlib
import ctypes
import gc
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
from torch import nn
from transformers import PretrainedConfig, PreTrainedModel

from attention import families
from attention.geometry import HeadGeometry
from attention.io import checkpoint
from attention.io.dtype_names import SHORT, full_name
from attention.io.precision import DTYPES, DtypeError, own_dtype
from attention.io.quantised.plain_copy import plain_checkpoint
from attention.io.stock_files import GENERATION, TOKENIZER_FILES
from attention.io.tokenizers import TokenizerError, read_tokenizer
from attention.io.weights import check, check_finite, check_plain
from attention.messages import reason
from attention.modeling.modeling import check_fits, plan_of, plan_of_config
from attention.ratios import own_heads, ratio_of
from orchestrator.config.schema import ConfigError
from trainers.evaluation import measure_cache

AUTO = "auto"  # the dtype of the checkpoint
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
    if full_name(name) not in DTYPES:
        raise ConfigError(f"dtype must be {AUTO} or one of {sorted((*DTYPES, *SHORT))}, got {name!r}")
    return DTYPES[full_name(name)]


def written_dtype(path: str | Path, asked: str = AUTO) -> str:
    """Name of the dtype that what is made of a checkpoint is written in, and that bytes are counted in.

    `auto` is the checkpoint's own. Raises ConfigError for an unknown one, or if nothing says which the checkpoint's is.
    """
    if asked != AUTO:
        return str(dtype_of(asked)).removeprefix("torch.")
    try:
        return str(own_dtype(checkpoint.load_config(path), path)).removeprefix("torch.")
    except DtypeError as error:
        raise ConfigError(f"dtype: {error}") from None


def working_dtype(written: str, device: str = "cpu") -> str:
    """Name of the dtype that is computed in: float32 on the CPU; on a GPU that of what is written."""
    return "float32" if device_of(device).type == "cpu" else written


def device_of(name: str) -> torch.device:
    """`auto` takes a GPU if there is one. Raises ConfigError for a device that is not there."""
    if name == "auto":
        return torch.device("cuda" if torch.cuda.is_available() else "cpu")
    try:
        device = torch.device(name)
    except RuntimeError:
        device = None
    if device is None or device.type not in ("cpu", "cuda"):
        raise ConfigError(f"device must be auto, cpu or cuda, got {name!r}")
    if device.type == "cuda" and not torch.cuda.is_available():
        raise ConfigError(f"device {name!r}: this machine has no CUDA GPU that torch can use; choose cpu")
    if device.type == "cuda" and (device.index or 0) >= torch.cuda.device_count():
        raise ConfigError(f"device {name!r}: this machine has {torch.cuda.device_count()} GPUs, cuda:0 is the first")
    return device


def resolve_model(
    source: str | Path,
    *,
    dequantize: bool = False,
    weights: bool = True,
    cache: Path | None = None,
    key: str = "model",
) -> str:
    """What is opened for a model that a user names: itself, or the plain copy of a GGUF file or, with `dequantize`, of
    a quantised checkpoint (`attention.io.quantised.plain_copy`). To be called once, at the start of a verb.

    `weights` False: for what reads none; the copy then holds config and tokenizer alone. What is written is told on
    stderr. Raises ConfigError.
    """
    try:
        return plain_checkpoint(source, dequantize=dequantize, weights=weights, cache=cache, report=_to_stderr)
    except ValueError as error:
        raise ConfigError(f"{key}: {error}") from None


def _to_stderr(line: str) -> None:
    print(line, file=sys.stderr, flush=True)


def geometry_of(
    path: str, sequence_length: int | None = None, key: str = "model.path", *, weights: bool = True
) -> HeadGeometry:
    """Geometry of a checkpoint, from its config and the headers of its weights.

    Raises ConfigError if nothing is there, the family is not supported, the weights are not those of the config (unless
    `weights` are not needed), or `sequence_length` is longer than the model takes.
    """
    try:
        config = checkpoint.load_config(path)
        geometry = families.geometry_of(config)
        check_fits(plan_of_config(config), geometry)
        check_plain(path, config)
        if weights:
            check(path, config)
    except ValueError as error:
        raise ConfigError(f"{key}: {error}") from None
    if sequence_length is not None and sequence_length > geometry.max_positions:
        raise ConfigError(
            f"sequence_length: got {sequence_length}, but {path!r} takes at most {geometry.max_positions} positions"
        )
    return geometry


def local_folder(model: str) -> Path:
    """The folder of a checkpoint; a hub name is downloaded first. Raises ConfigError if that fails."""
    if Path(model).is_dir():
        return Path(model)
    from huggingface_hub import snapshot_download

    try:
        return Path(snapshot_download(model, allow_patterns=["*.safetensors", "*.json", *TOKENIZER_FILES, GENERATION]))
    except (OSError, ValueError) as error:
        raise ConfigError(f"model: {model!r} cannot be fetched: {reason(error)}") from None


def check_own_cache(config: PretrainedConfig, geometry: HeadGeometry, path: str, key: str) -> None:
    """Raise ConfigError for a checkpoint that was converted already: what its config says of KV heads is not what it
    caches."""
    kept = plan_of_config(config).kv_heads
    if kept != own_heads(geometry):
        raise ConfigError(
            f"{key}: {path!r} was converted already and keeps {kept} of {own_heads(geometry)} key and value heads; "
            "convert the original model to the smaller cache instead"
        )


def check_several_heads(geometry: HeadGeometry, path: str) -> None:
    """Raise ConfigError for a checkpoint with one KV head a layer."""
    if geometry.num_kv_heads == 1:
        raise ConfigError(
            f"model: {path!r} has 1 KV head a layer (multi-query attention), so there is nothing to share within a "
            "layer; recipes directshare and postshare share heads between layers, or choose a model with 2 or more"
        )


def check_same_words(one: HeadGeometry, model: HeadGeometry, key: str, path: str) -> None:
    """Raises ConfigError unless the logits of two checkpoints can be compared. `key`, `path`: of the first."""
    if one.vocab_size != model.vocab_size:
        raise ConfigError(
            f"{key}: {path!r} has {one.vocab_size} tokens in its vocabulary, the model {model.vocab_size}; their "
            "logits are compared, so they must be the same"
        )


def check_same_tokens(tokenizer: Any, path: str | Path, key: str, other: str) -> None:
    """Raises ConfigError if the checkpoint `path` has a tokenizer with another vocabulary: what is measured in the
    tokens of one says nothing about the other. `key`: of the checkpoint; `other`: whose `tokenizer` is, in a word."""
    try:
        words, mine = read_tokenizer(path).get_vocab(), tokenizer.get_vocab()
    except TokenizerError:
        return  # none of its own
    if words != mine:
        different = len(words.items() ^ mine.items())
        raise ConfigError(
            f"{key}: the tokenizer of {str(path)!r} is not that of the {other} ({different} entries of their "
            "vocabularies differ), and losses in different tokens cannot be compared; give a model with the same "
            "tokenizer, such as the one that the checkpoint was converted from, or measure each by itself"
        )


def load_model(path: str | Path, dtype: str = "float32", device: str = "cpu") -> PreTrainedModel:
    """A checkpoint in evaluation mode, without gradients. Raises WeightsError for parameters that are not finite."""
    model = checkpoint.load(path, dtype_of(dtype)).to(device_of(device))  # pyright: ignore[reportArgumentType]
    check_finite(path, dict(model.named_parameters()))
    return model.requires_grad_(False)


def load_working(path: str | Path, written: str, device: str = "cpu") -> PreTrainedModel:
    """A checkpoint to work on where what comes of it is written in the dtype `written` (see `working_dtype`)."""
    return load_model(path, working_dtype(written, device), device)


def load_tokenizer(path: str | Path) -> Any:
    """Raises ConfigError if the checkpoint has none."""
    try:
        return read_tokenizer(path)
    except TokenizerError as error:
        raise ConfigError(str(error)) from None


def parameters(module: nn.Module) -> int:
    return sum(p.numel() for p in module.parameters())


def cache_facts(model: PreTrainedModel, original: int) -> dict[str, Any]:
    """KV cost as planned, and as a cache really held it after a prefill, both in the dtype of the model.
    `original`: that model's heads (`attention.ratios.own_heads`)."""
    plan = plan_of(model)
    return {
        "kv_ratio": ratio_of(plan, original),
        "kv_bytes_per_token": plan.kv_bytes_per_token(model.dtype),
        "cache_bytes_measured": measure_cache(model, CACHE_TOKENS),
        "cache_tokens": CACHE_TOKENS,
        "parameters": parameters(model),
    }
