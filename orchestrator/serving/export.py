"""`headfold export`: a checkpoint in a format that engines load, and the check that one of them does."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import asdict
from pathlib import Path
from typing import Any

import torch
from transformers import PreTrainedModel

from attention.base.messages import one_of
from attention.checkpoint import Checkpoint
from attention.io import checkpoint
from attention.io.dtype_names import full_name
from attention.io.export import export
from attention.io.precision import DTYPES, round_weights
from attention.io.stock_form import format_of
from attention.io.targets import Target, best_target, target
from orchestrator import checkpoints
from orchestrator.config.schema import ConfigError
from orchestrator.serving.check import MEMORY, CheckError, check_export
from orchestrator.serving.engines import engine as engine_named

AUTO = "auto"


def export_checkpoint(
    source: checkpoints.CheckpointSource,
    target_name: str,
    out: str | Path,
    *,
    dtype: str = checkpoints.AUTO,
    allow_larger_cache: bool = False,
    overwrite: bool = False,
    check: bool = False,
    engine: str | None = None,
    python: str | None = None,
    memory: int = MEMORY,
) -> dict[str, Any]:
    """Write a checkpoint for a target, its tokenizer with it.

    `auto` is the best target; `other_targets` of the record says why the others are not. With `check` the engine (the
    target's first, unless named) loads the result in a process of its own, of the interpreter `python`, and nothing is
    written unless it computes the same in the cache that was promised; `memory`: bytes of cache whose capacity in
    tokens is told. Raises ConfigError or ValueError as in `export`, EngineError before any work if the engine is not
    installed, CheckError if it shows something else.
    """
    opened = checkpoints.open_checkpoint(source, "checkpoint")
    others: dict[str, str] = {}
    if target_name != AUTO:
        _check_dtype(target(target_name, more=[AUTO]), dtype)
    else:
        written = checkpoints.written_dtype(opened, dtype)
        target_name, others = best_target(opened.config, opened.plan, written)
    chosen = target(target_name)
    written = dtype if dtype in chosen.dtypes else checkpoints.written_dtype(opened, dtype)
    if not check and (engine or python):
        raise ConfigError(
            "engine, engine_python: are of a check; add --check (in Python: check=True), or leave them out"
        )
    asked = _check(chosen, opened, written, engine, python, memory) if check else None
    allowed = {"allow_larger_cache": allow_larger_cache, "overwrite": overwrite}
    made = export(opened, chosen.name, out, opened.path, dtype=written, check=asked, **allowed)
    return asdict(made) | _format(out, chosen, made.cache_dtype) | {"other_targets": others}


def _check_dtype(chosen: Target, dtype: str) -> None:
    """Raise ConfigError for a dtype that a target does not take."""
    if full_name(dtype) in (AUTO, *chosen.dtypes):
        return
    more = ""
    if chosen.name == "gguf":
        more = (
            "; llama.cpp itself makes its other types from such a file: llama-quantize model.gguf "
            f"model-{dtype}.gguf {dtype}"
        )
    raise ConfigError(f"{one_of(f'dtype for target {chosen.name}', [AUTO, *chosen.dtypes], dtype)}{more}")


def _format(out: str | Path, chosen: Target, dtype: str) -> dict[str, Any]:
    """What the folder is to other software."""
    if (Path(out) / "config.json").is_file() and chosen.name in ("gqa", "phi"):
        return format_of(out, dtype)
    engines = " and ".join(chosen.engines)
    return {"format": chosen.name, "loads_in": list(chosen.engines), "format_note": f"{engines} loads it"}


def _check(
    chosen: Target, source: Checkpoint, dtype: str, engine: str | None, python: str | None, memory: int
) -> Callable[[Path, PreTrainedModel], Mapping[str, Any]]:
    """What `attention.io.export.export` calls on the finished folder. Raises EngineError if the engine is not there."""
    one = engine_named(engine or chosen.engines[0])
    if one.name not in chosen.engines:
        raise ConfigError(f"engine: target {chosen.name} is read by {', '.join(chosen.engines)}, got {one.name}")
    interpreter = one.find(python)

    def check(folder: Path, back: PreTrainedModel) -> Mapping[str, Any]:
        model = back
        if dtype in DTYPES:  # weights of fewer bits are compared as they were written
            model = checkpoint.load(source.path, torch.float32, config=source.config)
            round_weights(model, DTYPES[dtype])
        tokenizer = source.tokenizer if any(Path(source.path).glob("tokenizer*")) else None
        held = chosen.held(source.config, source.plan)
        found = check_export(
            one, interpreter, folder, model, tokenizer, held, dtype, memory=memory, own_code=any(folder.glob("*.py"))
        )
        if found.reasons:
            raise CheckError(
                f"{found.version} does not do what was promised, so nothing was written: {'; '.join(found.reasons)}"
            )
        return found.to_dict()

    return check
