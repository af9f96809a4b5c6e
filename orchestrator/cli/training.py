"""Training from random weights."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any

import typer

from orchestrator.cli import options


def train(
    architecture: Annotated[str, typer.Option(help="Folder or hub name whose architecture and tokenizer to take.")],
    steps: Annotated[int, typer.Option(min=1, help="Optimiser steps.")],
    learning_rate: Annotated[float, typer.Option(help="Peak of the schedule: warm-up, then a cosine.")],
    out: Annotated[Path, typer.Option(help="Folder for the trained checkpoint; what it comes from: OUT.training.")],
    recipe: Annotated[str, typer.Option(help="transformer, or dcformer: dynamically composed heads.")] = "transformer",
    overrides: Annotated[
        list[str] | None,
        typer.Option("--set", metavar="KEY=VALUE", help="e.g. composition.rank=4, train.batch_size=32; repeatable."),
    ] = None,
    train_data: Annotated[str, typer.Option(help="Text to train on; the same kinds of source.")] = "stdlib",
    train_tokens: Annotated[
        int | None, typer.Option(min=2, help="Tokens of training text (default: what the steps take, 4M at most).")
    ] = None,
    eval_every: Annotated[
        int | None, typer.Option(min=1, help="Steps between measurements and checkpoints (default: a tenth).")
    ] = None,
    overwrite: options.Overwrite = False,
    dry_run: options.DryRun = False,
    json: options.JsonFile = None,
    eval_data: options.EvalData = "stdlib",
    eval_tokens: options.EvalTokens = 16_384,
    sequence_length: options.SequenceLength = 256,
    seed: options.Seed = 0,
    device: options.Device = "auto",
) -> None:
    """Train from random weights, with Ray Train and DeepSpeed; run again, it goes on where it was stopped."""
    from orchestrator.storage.outputs import check_results
    from orchestrator.train import rehearse, train_from_scratch

    check_results(json, folder=out)
    settings: dict[str, Any] = {
        "overwrite": overwrite,
        "recipe": recipe,
        "steps": steps,
        "learning_rate": learning_rate,
        "overrides": overrides or [],
        "train_data": train_data,
        "train_tokens": train_tokens,
        "eval_every": eval_every,
        "eval_data": eval_data,
        "eval_tokens": eval_tokens,
        "sequence_length": sequence_length,
        "seed": seed,
        "device": device,
    }
    if dry_run:
        options.rehearsed(rehearse(architecture, out, **settings))
        return
    record = train_from_scratch(architecture, out, progress=lambda line: print(line, flush=True), **settings)
    print(f"held-out loss {record['loss']:.3f} nats a token after {record['tokens']} tokens")
    if answers := record.get("answers"):
        right = f"{answers['accuracy']:.1%} right, perplexity {answers['perplexity']:.2f}"
        print(f"answers to {answers['count']} examples: {right}")
    print(f"checkpoint: {record['out']}")
    options.finish(record, json)
