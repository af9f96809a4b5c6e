"""Training from random weights, and of a checkpoint."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any

import typer

from orchestrator.cli import runner
from orchestrator.cli.usage import TRAINING_PACKAGES, check_packages
from orchestrator.config import options
from orchestrator.tasks.task import advise_text

Steps = Annotated[int, typer.Option(min=1, help="Optimiser steps.")]
LearningRate = Annotated[float, typer.Option(help="Peak of the schedule: warm-up, then a cosine.")]
TrainData = Annotated[
    str | None,
    typer.Option(
        "--train-data",
        "--data",
        help="Text to train on, and to measure on a part of it that is held out: local text, jsonl or parquet files, a "
        "hub name, stdlib, or builtin (the default: prose and code of this Python).",
    ),
]
EvalEvery = Annotated[
    int | None, typer.Option(min=1, help="Steps between measurements and checkpoints (default: a tenth).")
]


def _say(line: str) -> None:
    print(line, flush=True)


def train(
    architecture: Annotated[str, typer.Option(help="Folder or hub name whose architecture and tokenizer to take.")],
    steps: Steps,
    learning_rate: LearningRate,
    out: Annotated[Path, typer.Option(help="Folder for the trained checkpoint; what it comes from: OUT.training.")],
    recipe: Annotated[str, typer.Option(help="transformer, or dcformer: dynamically composed heads.")] = "transformer",
    overrides: Annotated[
        list[str] | None,
        typer.Option("--set", metavar="KEY=VALUE", help="e.g. composition.rank=4, train.batch_size=32; repeatable."),
    ] = None,
    train_data: TrainData = None,
    train_tokens: Annotated[
        int | None, typer.Option(min=2, help="Tokens of training text (default: what the steps take, 4M at most).")
    ] = None,
    eval_every: EvalEvery = None,
    overwrite: options.Overwrite = False,
    dry_run: options.DryRun = False,
    json: options.JsonFile = None,
    eval_data: options.EvalData = None,
    text_field: options.TextField = "text",
    eval_tokens: options.EvalTokens = None,
    sequence_length: Annotated[int, typer.Option(min=2, help="Tokens per sequence.")] = 256,
    seed: options.Seed = 0,
    device: options.Device = "auto",
) -> None:
    """Train a model from random weights. With Ray Train and DeepSpeed; run again, it goes on where it was stopped."""
    from orchestrator.config.schema import TrainSection, check_train_options
    from orchestrator.storage.outputs import check_results

    # before the imports below: a mistake is told in a second
    check_train_options(TrainSection, {"recipe": recipe}, overrides or [], learning_rate, seed)
    check_results(json, folder=out)
    check_packages("train", *TRAINING_PACKAGES)
    from orchestrator.checkpoints import resolve_model
    from orchestrator.training.scratch import check, train_from_scratch

    architecture = resolve_model(architecture, weights=False, key="architecture")
    settings: dict[str, Any] = {
        "recipe": recipe,
        "steps": steps,
        "learning_rate": learning_rate,
        "overrides": overrides or [],
        "train_data": train_data,
        "train_tokens": train_tokens,
        "eval_every": eval_every,
        "eval_data": eval_data,
        "text_field": text_field,
        "eval_tokens": eval_tokens,
        "sequence_length": sequence_length,
        "seed": seed,
        "device": device,
    }
    advise_text(train_data, eval_data)
    if dry_run:
        runner.rehearsed(check(architecture, out, **settings).rehearse(overwrite))
        return
    record = train_from_scratch(architecture, out, progress=_say, overwrite=overwrite, **settings)
    print(f"held-out loss {record['loss']:.3f} nats per token after {record['tokens']} tokens")
    if answers := record.get("answers"):
        right = f"{answers['accuracy']:.1%} right, perplexity {answers['perplexity']:.2f}"
        print(f"answers to {answers['count']} examples: {right}")
    print(f"checkpoint: {record['out']}")
    runner.finish(record, json)


def finetune(
    model: Annotated[str, typer.Option(help="Folder, GGUF file or hub name of the checkpoint, converted or not.")],
    steps: Steps,
    learning_rate: LearningRate,
    out: Annotated[Path, typer.Option(help="Folder for the best measured step; what it comes from: OUT.training.")],
    train_data: TrainData = None,
    eval_data: options.EvalData = None,
    text_field: options.TextField = "text",
    tuning: Annotated[
        str,
        typer.Option(help="full: all weights; lora: adapters, merged at the end; kv: projections of keys and values."),
    ] = "full",
    original: Annotated[
        str | None, typer.Option(help="Model to learn from too (distillation by KL), e.g. that before conversion.")
    ] = None,
    overrides: Annotated[
        list[str] | None,
        typer.Option("--set", metavar="KEY=VALUE", help="e.g. train.batch_size=32, train.num_workers=8; repeatable."),
    ] = None,
    train_tokens: Annotated[
        int | None, typer.Option(min=2, help="Tokens of training text (default: what the steps take, 100M at most).")
    ] = None,
    eval_every: EvalEvery = None,
    overwrite: options.Overwrite = False,
    dry_run: options.DryRun = False,
    json: options.JsonFile = None,
    eval_tokens: options.EvalTokens = None,
    sequence_length: options.SequenceLength = None,
    seed: options.Seed = 0,
    dtype: options.Dtype = "auto",
    device: options.Device = "auto",
    dequantize: options.Dequantize = False,
) -> None:
    """Continue training a checkpoint on your text. With Ray Train and DeepSpeed; run again, it goes on."""
    from orchestrator.config.schema import FineTuneSection, check_train_options
    from orchestrator.storage.outputs import check_results

    # before the imports below: a mistake is told in a second
    check_train_options(FineTuneSection, {}, overrides or [], learning_rate, seed)
    check_results(json, folder=out)
    check_packages("finetune", *TRAINING_PACKAGES)
    from orchestrator.checkpoints import resolve_model
    from orchestrator.training.finetune import check, finetune_checkpoint

    opening: dict[str, Any] = {"dequantize": dequantize, "weights": not dry_run}
    model = resolve_model(model, **opening)
    original = original and resolve_model(original, key="original", **opening)
    settings: dict[str, Any] = {
        "tuning": tuning,
        "original": original,
        "steps": steps,
        "learning_rate": learning_rate,
        "overrides": overrides or [],
        "train_data": train_data,
        "train_tokens": train_tokens,
        "eval_every": eval_every,
        "eval_data": eval_data,
        "text_field": text_field,
        "eval_tokens": eval_tokens,
        "sequence_length": sequence_length,
        "seed": seed,
        "dtype": dtype,
        "device": device,
    }
    advise_text(train_data, eval_data)
    if dry_run:
        runner.rehearsed(check(model, out, **settings).rehearse(overwrite))
        return
    record = finetune_checkpoint(model, out, progress=_say, overwrite=overwrite, **settings)
    change = f"{record['loss_before']:.3f} before, {record['loss']:.3f} at step {record['best_step']}, which is kept"
    print(f"held-out loss in nats per token: {change}")
    if not record["better"]:
        print("warning: no measured step is better than the model was; try a lower --learning-rate or more text")
    print(f"checkpoint: {record['out']}")
    runner.finish(record, json)
