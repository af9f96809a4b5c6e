"""Verbs of one checkpoint, without a cluster: convert, export."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from orchestrator.cli import publishing, runner
from orchestrator.config import options


def export(
    checkpoint: Annotated[Path, typer.Argument(help="Folder of a checkpoint, converted or not; or a GGUF file.")],
    target: Annotated[
        str,
        typer.Option(help="What to export to: auto, gqa, vllm, gguf (llama.cpp), transformers, phi (for GPT-NeoX)."),
    ],
    out: Annotated[Path, typer.Option(help="Folder for the exported checkpoint.")],
    allow_larger_cache: Annotated[
        bool, typer.Option("--allow-larger-cache", help="Export even if the stock form takes more KV cache.")
    ] = False,
    dtype: Annotated[
        str, typer.Option(help="auto (the checkpoint's own), float32, bfloat16 or float16; for gguf also q8_0.")
    ] = "auto",
    check: Annotated[
        bool, typer.Option("--check", help="Load the export in the engine itself; write it only if all is as promised.")
    ] = False,
    engine: Annotated[
        str | None, typer.Option(help="Of --check: llama.cpp, vLLM or transformers (by default the target's own).")
    ] = None,
    engine_python: Annotated[
        str | None, typer.Option(help="Of --check: the Python of the environment that has the engine.")
    ] = None,
    check_memory: Annotated[
        int, typer.Option(min=1, help="Of --check: GiB of cache whose capacity in tokens is told.")
    ] = 1,
    push: publishing.Push = None,
    dry_run: publishing.DryRun = True,
    overwrite: options.Overwrite = False,
    json: options.JsonFile = None,
    dequantize: options.Dequantize = False,
) -> None:
    """Write a checkpoint in a format that engines load. Tells whether it is exact, and KV bytes before and after."""
    from attention.ratios import percent
    from orchestrator.checkpoints import resolve_model
    from orchestrator.serving.export import export_checkpoint
    from orchestrator.serving.tables import print_check
    from orchestrator.storage.outputs import check_results

    check_results(json, folder=out)
    checkpoint = Path(resolve_model(checkpoint, dequantize=dequantize, key="checkpoint"))
    allowed = {"allow_larger_cache": allow_larger_cache, "overwrite": overwrite}
    asked = {"check": check, "engine": engine, "python": engine_python, "memory": check_memory * 2**30}
    record = export_checkpoint(checkpoint, target, out, dtype=dtype, **allowed, **asked)
    original = record["kv_bytes_per_token_original"]
    print(
        f"{record['model_type']} in {out}: {'exact' if record['exact'] else 'not exact'}, largest logit difference "
        f"{record['max_logit_difference']:.2g}; KV bytes per token {record['kv_bytes_per_token_before']} before, "
        f"{record['kv_bytes_per_token_after']} after"
        + ("" if original is None else f" ({percent(record['kv_bytes_per_token_after'] / original)} of the original's)")
    )
    print(record["format_note"])
    for note in record["notes"]:
        print(f"note: {note}")
    for name, why in record["other_targets"].items():
        print(f"not {name}: {why}")
    if record["check"]:
        print_check(record["check"])
    record |= publishing.publish(checkpoint, out, record["target"], push, dry_run)
    runner.finish(record, json)
