"""The verb `evaluate`: what a checkpoint is worth, beside the original and a baseline."""

from __future__ import annotations

from typing import Annotated, Any

import typer

from orchestrator.cli import runner
from orchestrator.config import options
from orchestrator.tasks.task import advise_text


def evaluate(
    checkpoint: Annotated[str, typer.Argument(help="Folder of a checkpoint, a GGUF file, or hub name.")],
    original: Annotated[str | None, typer.Option(help="The original checkpoint to compare with.")] = None,
    baseline: Annotated[
        str | None, typer.Option(help="One more checkpoint to compare with, e.g. of recipe gqa.")
    ] = None,
    tasks: Annotated[
        str | None,
        typer.Option(
            help="Tasks of lm-evaluation-harness: demo (comes along), folders of task files, or its own names; "
            "with commas between them."
        ),
    ] = None,
    prompts: Annotated[
        str | None,
        typer.Option(
            help="Text to continue greedily, side by side: a file (one prompt a line, or .jsonl), or a prompt."
        ),
    ] = None,
    context_lengths: Annotated[
        str | None,
        typer.Option(
            help="Loss by position and recall of a hidden line at these context lengths: max, or 256,512. With "
            "--engine: those of the speed (by default max)."
        ),
    ] = None,
    engine: Annotated[
        str | None,
        typer.Option(
            help="Measure speed and the sequences that fit in llama.cpp, vLLM or transformers, and nothing else; "
            "checkpoints are exported for it, or are exports."
        ),
    ] = None,
    engine_python: Annotated[
        str | None, typer.Option(help="Of --engine: the Python of the environment that has the engine.")
    ] = None,
    cache_memory: Annotated[
        int, typer.Option(min=1, help="Of --engine: GiB of cache in which sequences are to fit.")
    ] = 1,
    trust_remote_code: Annotated[
        bool, typer.Option("--trust-remote-code", help="Of --engine: run the Python files in an export given.")
    ] = False,
    speed_tokens: Annotated[int, typer.Option(min=0, help="Tokens to decode for the speed; 0 skips it.")] = 32,
    dry_run: options.DryRun = False,
    json: options.JsonFile = None,
    data: Annotated[
        str | None,
        typer.Option(help="Text whose held-out part is measured on, as convert does; the same kinds of source."),
    ] = None,
    eval_data: options.EvalData = None,
    text_field: options.TextField = "text",
    eval_tokens: options.EvalTokens = None,
    sequence_length: options.SequenceLength = None,
    seed: options.Seed = 0,
    device: options.Device = "auto",
    dtype: options.Dtype = "auto",
    dequantize: options.Dequantize = False,
) -> None:
    """Measure a checkpoint beside its original. Held-out loss, KL, KV bytes planned and allocated, speed; where asked,
    tasks, generated text and long contexts."""
    from orchestrator.checkpoints import resolve_model
    from orchestrator.config.schema import ConfigError
    from orchestrator.evaluation.evaluate import evaluate_checkpoint, rehearse_evaluation
    from orchestrator.evaluation.extras import Extras
    from orchestrator.evaluation.generations import read_prompts
    from orchestrator.reporting.evaluation_tables import print_extras, print_worth
    from orchestrator.serving.speed import engine_speed
    from orchestrator.serving.tables import print_speed
    from orchestrator.storage.outputs import check_results

    check_results(json)
    if engine is not None:
        flags = {"dry_run": dry_run or None, "dequantize": dequantize or None}
        _refuse_with_engine(tasks=tasks, prompts=prompts, baseline=baseline, **flags)
        record = engine_speed(
            checkpoint,
            original,
            engine=engine,
            python=engine_python,
            lengths=context_lengths or "max",
            tokens=speed_tokens,
            memory=cache_memory * 2**30,
            dtype=dtype,
            seed=seed,
            trust_remote_code=trust_remote_code,
        )
        print_speed(record)
        runner.finish(record, json)
        return
    if engine_python is not None:
        raise ConfigError("engine_python: is of a measurement in an engine; add --engine, or leave it out")
    opening: dict[str, Any] = {"dequantize": dequantize, "weights": not dry_run}
    checkpoint = resolve_model(checkpoint, key="checkpoint", **opening)
    original = original and resolve_model(original, key="original", **opening)
    baseline = baseline and resolve_model(baseline, key="baseline", **opening)
    settings: dict[str, Any] = {
        "baseline": baseline,
        "extras": Extras(named(tasks), read_prompts(prompts), context_lengths),
        "data": data,
        "eval_data": eval_data,
        "text_field": text_field,
        "eval_tokens": eval_tokens,
        "sequence_length": sequence_length,
        "seed": seed,
        "device": device,
        "dtype": dtype,
    }
    advise_text(data, eval_data)
    if dry_run:
        runner.rehearsed(rehearse_evaluation(checkpoint, original, **settings))
        return
    record = evaluate_checkpoint(checkpoint, original, speed_tokens=speed_tokens, **settings)
    print_worth(record)
    print_extras(record)
    runner.finish(record, json)


def _refuse_with_engine(**others: Any) -> None:
    """Raises ConfigError for what is not measured in an engine."""
    from orchestrator.config.schema import ConfigError

    if asked := [f"--{name.replace('_', '-')}" for name, value in others.items() if value is not None]:
        raise ConfigError(
            f"engine: the speed in an engine is measured alone; leave out {', '.join(asked)}, or run evaluate again "
            "without --engine"
        )


def named(tasks: str | None) -> tuple[str, ...]:
    """Names with commas between them."""
    return () if tasks is None else tuple(name.strip() for name in tasks.split(","))
