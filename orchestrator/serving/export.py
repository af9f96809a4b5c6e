"""Exports: a checkpoint in a format that engines load, and the check that one of them does."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any, NotRequired, TypedDict

import torch
from transformers import PreTrainedModel

from attention.base.messages import one_of
from attention.base.text import gib
from attention.cache_formats import (
    VLLM,
    CacheFormatError,
    FormatRecord,
    format_record,
)
from attention.checkpoint import Checkpoint
from attention.io import checkpoint
from attention.io.dtype_names import full_name
from attention.io.export import ExportReport, cache_dtype, export
from attention.io.precision import DTYPES, round_weights
from attention.io.safetensors_files import weight_files
from attention.io.stock_files import TOKENIZER_FILES
from attention.io.stock_form import format_of
from attention.io.targets import EngineSupport, Target, best_target, target
from attention.plan import number_bytes
from attention.tensor_parallel import RankCache, RankLayoutError
from orchestrator import checkpoints
from orchestrator.config.options import ExportOptions
from orchestrator.config.parsing import read_cache_format
from orchestrator.config.schema import ConfigError
from orchestrator.serving.check import CheckError, check_export
from orchestrator.serving.engines import engine as engine_named
from orchestrator.storage.paths import disk_free


class EngineExportRecord(TypedDict):
    """The result of an export, and the software that loads it.

    Bytes are those of a token's KV cache in `cache_dtype`.
    """

    target: str
    folder: str
    model_type: str
    exact: bool
    notes: tuple[str, ...]
    dtype: str
    cache_dtype: str
    engines: tuple[str, ...]
    kv_heads: tuple[int, ...]
    """KV heads of each layer as the engines store them."""
    kv_bytes_per_token_before: int
    kv_bytes_per_token_after: int
    kv_bytes_per_token_original: int | None
    max_logit_difference: float
    max_logit: float
    check: Mapping[str, Any]
    """Results of an engine that loaded it (`orchestrator.serving.check.CheckResult`); empty without
    a check."""
    zero_query_heads: int
    extra_attention: float
    format: str
    loads_in: Sequence[str]
    format_note: str
    padding: NotRequired[Mapping[str, Any]]
    engine_cache: NotRequired[FormatRecord]
    """With `--cache-format`: size of the engine's cache in that format."""
    tensor_parallel: NotRequired[Mapping[str, Any]]
    """With `--tensor-parallel`: cache of each GPU (`attention.tensor_parallel.RankCache`)."""
    other_targets: dict[str, str]
    """For target auto: the reasons against the other targets."""


def export_checkpoint(
    options: ExportOptions, finish: Callable[[Path, RankCache | None], object] | None = None
) -> EngineExportRecord:
    """Write a checkpoint for a target, its tokenizer with it.

    With `options.check` the engine (the target's first, unless named) loads the result in a
    separate process, and nothing is written unless it computes the same in the promised cache.

    Args:
        options: Of the export.
        finish: Called with the folder, not yet in place, to add files; and with the cache of each
            GPU, None without `options.tensor_parallel`.

    Raises:
        ConfigError: For what is wrong with checkpoint or options. Likewise ValueError, as
            `attention.io.export.export`.
        EngineError: If the engine is not installed, before any work.
        CheckError: If the engine shows something else.
    """
    opened = checkpoints.open_checkpoint(options.checkpoint, "checkpoint")
    others: dict[str, str] = {}
    name = options.target
    if name != checkpoints.AUTO:
        _check_dtype(target(name, more=[checkpoints.AUTO]), options.dtype)
    else:
        name, others = best_target(
            opened.config, opened.plan, checkpoints.written_dtype(opened, options.dtype)
        )
    chosen = target(name)
    dtype = options.dtype
    if dtype not in chosen.dtypes:
        dtype = checkpoints.written_dtype(opened, dtype)
    cache = _engine_cache(options.cache_format, chosen, opened)
    ranks = _rank_cache(options.tensor_parallel, chosen, opened, dtype)
    _check_disk(opened, chosen, dtype, Path(options.out))
    report = export(
        opened,
        chosen.name,
        options.out,
        opened.path,
        dtype=dtype,
        check=_check(options, chosen, opened, dtype),
        allow_larger_cache=options.allow_larger_cache,
        overwrite=options.overwrite,
        finish=None if finish is None else lambda fresh: finish(fresh, ranks),
    )
    record = EngineExportRecord(
        **asdict(report), **_format(options.out, report), other_targets=others
    )
    if cache is not None:
        record["engine_cache"] = cache
    if ranks is not None:
        record["tensor_parallel"] = ranks.record()
    return record


def _check_disk(opened: Checkpoint, chosen: Target, dtype: str, out: Path) -> None:
    """Raise ConfigError where the weights of the checkpoint in this dtype have no room."""
    stored = sum(file.stat().st_size for file in weight_files(opened.folder))
    written = number_bytes(dtype) if dtype in DTYPES else 1  # q8_0
    needed = stored * written / number_bytes(opened.stored_dtype)
    if chosen.name == "gguf":  # whose tensors are collected in another file before
        needed *= 2
    free = disk_free(out)
    if free < needed:
        raise ConfigError(
            f"out: the export takes about {gib(needed)}, and {gib(free)} are free at {str(out)!r}; "
            "free some, or give another folder (for a temporary one set TMPDIR)"
        )


def _rank_cache(
    ranks: int | None, chosen: Target, opened: Checkpoint, dtype: str
) -> RankCache | None:
    """Return what each GPU of a tensor-parallel engine holds; None without `ranks`.

    Raises:
        ConfigError: For a target that no such engine reads, and for heads that cannot be divided.
    """
    if ranks is None:
        return None
    engines = chosen.engines_of(opened.config, opened.plan)
    if VLLM not in engines:
        raise ConfigError(
            f"tensor_parallel: target {chosen.name} is loaded by {', '.join(engines)}, "
            "which divides no KV heads among GPUs; choose target vllm or gqa, or leave it out"
        )
    support = chosen.support_for(opened.config, opened.plan)
    original = None
    if shape := checkpoint.original_shape(opened.folder, support.head_dim):
        heads, head_dim = shape
        each, rest = divmod(heads, 2 * opened.plan.num_layers)
        if rest == 0:
            original = EngineSupport.of(
                [each] * opened.plan.num_layers, head_dim, other_layers=support.other_layers
            )
    try:
        return support.rank_cache(ranks, cache_dtype(dtype), original, opened.plan.num_heads)
    except RankLayoutError as error:
        raise ConfigError(f"tensor_parallel: {error}") from None


def _engine_cache(text: str | None, chosen: Target, opened: Checkpoint) -> FormatRecord | None:
    """Return what a cache format takes in the engines of a target; None without one.

    Raises:
        ConfigError: For a format that none of them holds for this model.
    """
    if text is None:
        return None
    pair = read_cache_format(text)
    engines = chosen.engines_of(opened.config, opened.plan)
    if not set(pair.engines) & set(engines):
        raise ConfigError(
            f"cache_format: {pair.name} is supported by {', '.join(pair.engines)}, and target "
            f"{chosen.name} is read by {', '.join(engines)}"
        )
    support = chosen.support_for(opened.config, opened.plan)
    try:
        record = format_record(pair, opened.plan)
        held_bytes = support.bytes_in(pair)
    except CacheFormatError as error:
        raise ConfigError(f"cache_format: {error}") from None
    share = held_bytes / replace(support, others=0).bytes_per_token("float16")
    return {**record, "kv_bytes_per_token": held_bytes, "share": share}


def _check_dtype(chosen: Target, dtype: str) -> None:
    """Raise ConfigError for a dtype that a target does not take."""
    if full_name(dtype) in (checkpoints.AUTO, *chosen.dtypes):
        return
    hint = ""
    if chosen.name == "gguf":
        hint = (
            "; llama.cpp itself makes its other types from such a file: llama-quantize model.gguf "
            f"model-{dtype}.gguf {dtype}"
        )
    dtypes = [checkpoints.AUTO, *chosen.dtypes]
    raise ConfigError(f"{one_of(f'dtype for target {chosen.name}', dtypes, dtype)}{hint}")


def _format(out: str | Path, report: ExportReport) -> dict[str, Any]:
    """Return what the folder is to other software."""
    if (Path(out) / "config.json").is_file() and report.target in ("gqa", "phi"):
        return format_of(out, report.cache_dtype)
    return {
        "format": report.target,
        "loads_in": list(report.engines),
        "format_note": f"{' and '.join(report.engines)} loads it",
    }


def _check(
    options: ExportOptions, chosen: Target, source: Checkpoint, dtype: str
) -> Callable[[Path, PreTrainedModel], Mapping[str, Any]] | None:
    """Return what `attention.io.export.export` calls on the finished folder; None without a check.

    Raises EngineError if the engine is not there.
    """
    if not options.check:
        memory_given = options.check_memory != ExportOptions.check_memory
        if options.engine or options.engine_python or memory_given:
            raise ConfigError(
                "engine, engine_python, check_memory: are of a check; add --check (in Python: "
                "check=True), or leave them out"
            )
        return None
    engines = chosen.engines_of(source.config, source.plan)
    engine = engine_named(options.engine or engines[0])
    if engine.name not in engines:
        raise ConfigError(
            f"engine: target {chosen.name} is read by {', '.join(engines)}, got {engine.name}"
        )
    interpreter = engine.find(options.engine_python)

    def check(folder: Path, back: PreTrainedModel) -> Mapping[str, Any]:
        model = back
        if dtype in DTYPES:  # weights of fewer bits are compared as they were written
            model = checkpoint.load(source.path, torch.float32, config=source.config)
            round_weights(model, DTYPES[dtype])
        files = (file for pattern in TOKENIZER_FILES for file in source.folder.glob(pattern))
        tokenizer = source.tokenizer if any(files) else None
        result = check_export(
            engine,
            interpreter,
            folder,
            model,
            tokenizer,
            chosen.support_for(source.config, source.plan),
            dtype,
            memory=options.check_memory * 2**30,
            own_code=any(folder.glob("*.py")),
        )
        if result.reasons:
            raise CheckError(
                f"{result.version} does not do what was promised, so nothing was written: "
                f"{'; '.join(result.reasons)}"
            )
        return result.to_dict()

    return check
