"""Checkpoints that a user names: opened and checked before any weight is read.

Errors name the option by which the user gave the checkpoint.
"""

from __future__ import annotations

import re
import sys
from pathlib import Path
from typing import Any, TypedDict

import torch
import yaml
from torch import nn
from transformers import PreTrainedModel

from attention.checkpoint import Checkpoint
from attention.io.dtype_names import SHORT_DTYPES, full_name
from attention.io.precision import DTYPES, DtypeError
from attention.io.quantised.plain_copy import plain_checkpoint
from attention.io.sources import check_source, source_name
from attention.io.tokenizers import TokenizerError
from attention.modeling.model_classes import plan_of
from attention.ratios import ratio_of
from orchestrator.config.schema import ConfigError
from trainers.evaluation import measure_cache

AUTO = "auto"  # the dtype of the checkpoint
CACHE_TOKENS = 64
BASE_FIELDS = ("base", "base_id", "license")

CheckpointSource = str | Path | Checkpoint
"""A checkpoint, or the folder or hub name by which a user names it."""


def open_checkpoint(
    source: CheckpointSource,
    key: str = "model",
    *,
    sequence_length: int | None = None,
    weights: bool = True,
) -> Checkpoint:
    """Open a checkpoint and check what its config and the headers of its weights say.

    Args:
        source: A checkpoint that is open is checked, and returned as it is.
        key: The option or key by which the user has named it.
        sequence_length: Tokens of a sequence that it is to take.
        weights: Whether there must be weights.

    Raises:
        TypeError: If `source` is no name of a checkpoint.
        ConfigError: If nothing is there, the family is not supported, the weights are not those of
            the config, or `sequence_length` is longer than the model takes.
    """
    try:
        checkpoint = Checkpoint.open(source, key)
        checkpoint.check(weights=weights)
    except ValueError as error:
        raise ConfigError(f"{key}: {error}") from None
    most = checkpoint.geometry.max_positions
    if sequence_length is not None and sequence_length > most:
        takes = f"{checkpoint.path!r} takes at most {most} positions"
        raise ConfigError(f"sequence_length: got {sequence_length}, but {takes}")
    return checkpoint


def resolve_model(
    source: str | Path,
    *,
    dequantize: bool = False,
    weights: bool = True,
    cache: Path | None = None,
    key: str = "model",
) -> str:
    """Return the path to open for a model that a user names.

    It is the model itself, or the plain copy of a GGUF file or, with `dequantize`, of a quantised
    checkpoint (`attention.io.quantised.plain_copy`). To be called once, at the start of a verb. A
    line on stderr names what is written.

    Args:
        source: The folder, file or hub name.
        dequantize: Whether a quantised checkpoint is copied.
        weights: Whether weights will be read; a copy else holds config and tokenizer alone.
        cache: The folder of the copies; by default that of the user.
        key: The option by which the user has named the model.

    Raises:
        ConfigError: For what cannot be copied.
    """
    try:
        return plain_checkpoint(
            source,
            dequantize=dequantize,
            weights=weights,
            cache=cache,
            report=_to_stderr,
        )
    except ValueError as error:
        raise ConfigError(f"{key}: {error}") from None


def open_model(
    source: CheckpointSource,
    key: str,
    *,
    dequantize: bool = False,
    weights: bool = True,
) -> Checkpoint:
    """Open a model that a user names, or what takes its place (`resolve_model`).

    Weights are not looked at yet.

    Raises:
        TypeError: If `source` is no name of a checkpoint.
        ConfigError: If nothing is there, or its family is not supported. `key` is the option that
            names it.
    """
    check_named(source, key)
    if isinstance(source, Checkpoint):
        return source
    path = resolve_model(source, dequantize=dequantize, weights=weights, key=key)
    return open_checkpoint(path, key, weights=False)


def check_named(source: object, key: str) -> None:
    """Raise TypeError for what is neither a checkpoint nor the name of one, e.g. a loaded model."""
    if not isinstance(source, Checkpoint):
        check_source(source, key)


def _to_stderr(line: str) -> None:
    print(line, file=sys.stderr, flush=True)


# ---- dtypes and devices -------------------------------------------------------------------------


def dtype_of(name: str) -> torch.dtype:
    """Return a dtype by its full or short name. Raises ConfigError for an unknown one."""
    if full_name(name) not in DTYPES:
        names = sorted((*DTYPES, *SHORT_DTYPES))
        raise ConfigError(f"dtype must be {AUTO} or one of {names}, got {name!r}")
    return DTYPES[full_name(name)]


def written_dtype(source: CheckpointSource, requested: str = AUTO) -> str:
    """Return the name of the dtype in which results are written and bytes are counted.

    `auto` is the checkpoint's own.

    Raises:
        ConfigError: For an unknown dtype, or if nothing says which the checkpoint's is.
    """
    if requested != AUTO:
        return str(dtype_of(requested)).removeprefix("torch.")
    try:
        return str(Checkpoint.open(source).stored_dtype).removeprefix("torch.")
    except DtypeError as error:
        raise ConfigError(f"dtype: {error}") from None


def working_dtype(written: str, device: str = "cpu") -> str:
    """Return the name of the dtype to compute in: float32 on the CPU, on a GPU `written`."""
    return "float32" if device_of(device).type == "cpu" else written


def device_of(name: str) -> torch.device:
    """Return a device by its name; `auto` is a GPU if there is one.

    Raises:
        ConfigError: For a device that is not there.
    """
    if name == "auto":
        return torch.device("cuda" if torch.cuda.is_available() else "cpu")
    try:
        device = torch.device(name)
    except RuntimeError:
        device = None
    if device is None or device.type not in ("cpu", "cuda"):
        raise ConfigError(f"device must be auto, cpu or cuda, got {name!r}")
    count = torch.cuda.device_count() if torch.cuda.is_available() else 0
    if device.type == "cuda" and not count:
        reason = "this machine has no CUDA GPU that torch can use; choose cpu"
    elif device.type == "cuda" and (device.index or 0) >= count:
        reason = f"this machine has {count} GPUs, cuda:0 is the first"
    else:
        return device
    raise ConfigError(f"device {name!r}: {reason}")


# ---- models and tokenizers ----------------------------------------------------------------------


def load_model(
    source: CheckpointSource,
    dtype: str = "float32",
    device: str = "cpu",
) -> PreTrainedModel:
    """Load a checkpoint in evaluation mode, without gradients.

    Raises:
        WeightsError: For parameters that are not finite.
    """
    return Checkpoint.open(source).load(dtype_of(dtype), device_of(device))


def load_working(source: CheckpointSource, written: str, device: str = "cpu") -> PreTrainedModel:
    """Load a checkpoint in the dtype to compute in where `written` is the dtype of the result."""
    return load_model(source, working_dtype(written, device), device)


def load_tokenizer(source: CheckpointSource) -> Any:
    """Return the tokenizer of a checkpoint. Raises ConfigError if it has none."""
    try:
        return Checkpoint.open(source).tokenizer
    except TokenizerError as error:
        raise ConfigError(str(error)) from None


def parameters(module: nn.Module) -> int:
    """Return the number of parameters of a module, which ZeRO 3 may have split over workers."""
    return sum(getattr(p, "ds_numel", p.numel()) for p in module.parameters())


class CacheFacts(TypedDict):
    """The KV cost of a model: `cache_bytes_measured` is of a cache of `cache_tokens` tokens."""

    kv_ratio: float
    kv_bytes_per_token: int
    cache_bytes_measured: int
    cache_tokens: int
    parameters: int


def cache_facts(model: PreTrainedModel, original_heads: float) -> CacheFacts:
    """Return the KV cost of a model as planned, and in bytes of a cache after a prefill.

    Args:
        model: The model.
        original_heads: Key plus value heads of the original (`attention.ratios.own_heads`).
    """
    plan = plan_of(model)
    return {
        "kv_ratio": ratio_of(plan, original_heads),
        "kv_bytes_per_token": plan.kv_bytes_per_token(model.dtype),
        "cache_bytes_measured": measure_cache(model, CACHE_TOKENS),
        "cache_tokens": CACHE_TOKENS,
        "parameters": parameters(model),
    }


# ---- checks -------------------------------------------------------------------------------------


def check_own_cache(checkpoint: Checkpoint, key: str) -> None:
    """Raise ConfigError for a checkpoint that was converted already.

    The KV heads in its config are then not those that it caches.
    """
    cached = checkpoint.plan.kv_heads
    if cached != checkpoint.own_heads:
        raise ConfigError(
            f"{key}: {checkpoint.path!r} was converted already and keeps {cached} of "
            f"{checkpoint.own_heads} key and value heads; convert the original model to the "
            "smaller cache instead"
        )


def check_several_heads(checkpoint: Checkpoint) -> None:
    """Raise ConfigError for a checkpoint with one KV head a layer."""
    if checkpoint.geometry.num_kv_heads == 1:
        raise ConfigError(
            f"model: {checkpoint.path!r} has 1 KV head per layer (multi-query attention), so there "
            "is nothing to share within a layer; recipes directshare and postshare share heads "
            "between layers, or choose a model with 2 or more"
        )


def check_same_vocabulary(one: Checkpoint, model: Checkpoint, key: str) -> None:
    """Raise ConfigError unless the logits of two checkpoints can be compared.

    `key` is the option that names the first.
    """
    size = one.geometry.vocab_size
    other_size = model.geometry.vocab_size
    if size != other_size:
        raise ConfigError(
            f"{key}: {one.path!r} has {size} tokens in its vocabulary, the model {other_size}; "
            "their logits are compared, so they must be the same"
        )


def check_same_tokens(tokenizer: Any, source: CheckpointSource, key: str, other: str) -> None:
    """Raise ConfigError if a checkpoint has a tokenizer with another vocabulary.

    Measurements in the tokens of one cannot be compared with those of the other.

    Args:
        tokenizer: The one to compare with.
        source: The checkpoint; one without a tokenizer passes.
        key: The option that names it.
        other: Whose `tokenizer` is, in a word.
    """
    checkpoint = Checkpoint.open(source)
    try:
        vocabulary = checkpoint.tokenizer.get_vocab()
    except TokenizerError:
        return
    different = len(vocabulary.items() ^ tokenizer.get_vocab().items())
    if different:
        raise ConfigError(
            f"{key}: the tokenizer of {checkpoint.path!r} is not that of the {other} ({different} "
            "entries of their vocabularies differ), and losses in different tokens cannot be "
            "compared; give a model with the same tokenizer, such as the one that the checkpoint "
            "was converted from, or measure each by itself"
        )


# ---- names --------------------------------------------------------------------------------------


def base_of(model: str | Path) -> dict[str, str | None]:
    """Return what a model is called, and nothing of its path on this machine.

    Returns:
        `base`, its name; `base_id`, its name on the hub if it is there; `license`, as its own card
        has it.
    """
    text = source_name(model)
    folder = Path(text)
    cached = re.search(r"models--([\w.-]+?)--([\w.-]+)", text)
    base_id = f"{cached[1]}/{cached[2]}" if cached else None
    if base_id is None and not folder.is_dir() and re.fullmatch(r"[\w.-]+/[\w.-]+", text):
        base_id = text
    return {
        "base": base_id or folder.resolve().name,
        "base_id": base_id,
        "license": _licence_of(folder / "README.md"),
    }


def _licence_of(card: Path) -> str | None:
    """Return `license` in the metadata of a card; None where there is none."""
    try:
        front = re.match(r"---\n(.*?)\n---", card.read_text(encoding="utf-8"), re.DOTALL)
        licence = yaml.safe_load(front[1]).get("license") if front else None
    except (OSError, ValueError, AttributeError, yaml.YAMLError):
        return None
    return licence if isinstance(licence, str) else None
