"""What several verbs take: their options, spelt once."""

from __future__ import annotations

import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Annotated, Any

import typer

JsonFile = Annotated[Path | None, typer.Option("--json", help="Write the result to this file as one JSON object.")]
Overwrite = Annotated[
    bool, typer.Option("--overwrite", help="Replace the folder of --out if Headfold wrote all of it, and nothing else.")
]
ConfigFile = Annotated[Path, typer.Argument(help="YAML file, e.g. configs/demo.yaml.")]
ConfigOverrides = Annotated[
    list[str] | None, typer.Argument(metavar="[KEY=VALUE]...", help="e.g. search.num_samples=4")
]
KVRatios = Annotated[
    str | None,
    typer.Option(
        help="Share of the checkpoint's own KV cache to keep at most, e.g. 0.5 or 50%; or several, e.g. 0.5,0.25."
    ),
]
KVHeads = Annotated[
    str | None,
    typer.Option(help="In its place: at most how many KV heads per layer, on average; e.g. 4,2."),
]
KVBytes = Annotated[
    str | None,
    typer.Option(help="In its place: at most how many KV bytes per token, e.g. 24KiB or 24576; or a share, e.g. 0.5."),
]
Strict = Annotated[
    bool,
    typer.Option("--strict", help="Refuse what cannot be met exactly, instead of the largest plan at or below it."),
]
Overrides = Annotated[
    list[str] | None,
    typer.Option("--set", metavar="KEY=VALUE", help="Other choices of the recipe, e.g. refinement=heal; repeatable."),
]

Recipe = Annotated[
    str,
    typer.Option(help="Named recipe, see `headfold recipes`; auto: the best one for the model and --for."),
]
Engine = Annotated[
    str | None,
    typer.Option("--for", help="Engine that is to load the result: vllm, llama.cpp or transformers."),
]

CalibrationData = Annotated[
    str | None,
    typer.Option(
        "--data",
        "--calibration-data",
        help="Text to calibrate on, and to measure on a part of it that is held out: local text, jsonl or parquet "
        "files, a hub name, stdlib, or builtin (the default: prose and code of this Python).",
    ),
]
EvalData = Annotated[
    str | None,
    typer.Option(help="Another text to measure on, whole, less documents of --data; the same kinds of source."),
]
TextField = Annotated[
    str, typer.Option(help="Field of a record that holds its text; conversations in messages are found without.")
]
CalibrationTokens = Annotated[
    int | None, typer.Option(min=2, help="Tokens to calibrate on (default: 16384, or what the text has).")
]
EvalTokens = Annotated[
    int | None, typer.Option(min=2, help="Tokens to measure the loss on (default: 16384, or what the text has).")
]
SequenceLength = Annotated[
    int | None,
    typer.Option(min=2, help="Tokens per sequence (default: 2048, or what the model takes; less for little text)."),
]
Seed = Annotated[int, typer.Option(min=0, max=2**32 - 1, help="Of plans and of which text is taken.")]
Dtype = Annotated[
    str, typer.Option(help="Of what is written: auto (the checkpoint's own), float32, bfloat16 (bf16) or float16.")
]
Dequantize = Annotated[
    bool,
    typer.Option(
        "--dequantize",
        help="Read quantised weights (FP8, compressed-tensors, MXFP4) as plain numbers; a GGUF file needs no option.",
    ),
]
Device = Annotated[str, typer.Option(help="auto, cpu or cuda.")]
DryRun = Annotated[
    bool, typer.Option("--dry-run", help="Check everything and say what it will take; nothing is written or started.")
]


def advise_text(*sources: str | None) -> None:
    """Say on stderr what text is taken where none was named."""
    if not any(sources):
        print(
            "text: none was named, so the built-in one is taken (Python's help topics and standard library); give text "
            "like that of your users with --data",
            file=sys.stderr,
            flush=True,
        )


def tell(words: Mapping[str, str]) -> None:
    """Print what a verb would do or take, a line for each thing that it is about."""
    for name, value in words.items():
        print(f"{name}: {value}")


def rehearsed(words: Mapping[str, str]) -> None:
    """What a dry run says in the end."""
    tell(words)
    print("dry run: all checks passed, nothing was written")


def recipe_settings(overrides: list[str] | None) -> dict[str, Any]:
    """`axis=part` and `axis.knob=value` as `search_spaces.recipes.catalogue.recipe` takes them."""
    from orchestrator.config.parsing import read_override

    return dict(read_override(override, "refinement=heal") for override in overrides or [])


def finish(record: dict[str, Any], file: Path | None) -> None:
    """Write a verb's result where `--json` asks for it."""
    if file is not None:
        from orchestrator.storage.outputs import write_result

        write_result(file, record)
