"""vLLM, in an environment of its own: it brings a torch that is not ours."""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from orchestrator.serving.engine import (
    CHILDREN,
    SECONDS,
    Answer,
    Engine,
    EngineError,
    EngineRun,
    Question,
    ScoreQuestion,
    Scores,
    SpeedAnswer,
    SpeedQuestion,
    completions_of,
    has_module,
    run_child,
)

NAME = "vLLM"
VARIABLE = "HEADFOLD_VLLM_PYTHON"
ROUNDING = 1e-3  # it is asked in float32
SCORED_MEMORY = 2**30  # bytes of the cache that text is scored in


def find(python: str | None) -> str:
    """Return the interpreter that has vLLM."""
    python = python or os.environ.get(VARIABLE) or sys.executable
    if not has_module(python, "vllm"):
        raise EngineError(
            f"vLLM is not installed for {python}. It needs its own environment: `make "
            "engines` makes one in engines/vllm (3.5 GB), or name the Python of yours: "
            f"--engine-python PYTHON, or {VARIABLE}=PYTHON"
        )
    return python


def ask(python: str, question: Question) -> Answer:
    """Complete prompts in float32."""
    answer = _run(python, question, "float32", 0, question.texts is not None)
    runs = [EngineRun("float32", completions_of(answer), ROUNDING)]
    held = answer["cache_bytes"] / answer["capacity"]
    return Answer(answer["version"], runs, "float32", held, answer["capacity"])


def time(python: str, question: SpeedQuestion) -> SpeedAnswer:
    """Time it in the dtype of the weights, without graphs (`enforce_eager`)."""
    answer = _run(python, question, question.dtype, question.repetitions, False)
    held = answer["cache_bytes"] / answer["capacity"]
    cache_dtype = question.dtype if question.cache is None else question.cache.name
    return SpeedAnswer(answer["version"], answer["seconds"], cache_dtype, held, answer["capacity"])


def score(python: str, question: ScoreQuestion) -> Scores:
    """Score the tokens of `sequences` with a cache of the formats `cache`.

    A sequence is computed at once, and its attention reads keys and values from the cache.
    """
    request = {
        "sequences": [list(sequence) for sequence in question.sequences],
        "cells": max(map(len, question.sequences)),
        "cache_dtype": question.cache.vllm_name,
        **_common(question.folder, question.dtype, SCORED_MEMORY, question.own_code),
    }
    answer = _answer(python, request, question.seconds)
    held = answer["cache_bytes"] / answer["capacity"]
    return Scores(answer["scores"], held, answer["version"], answer["device"])


def _run(
    python: str,
    question: Question | SpeedQuestion,
    dtype: str,
    repetitions: int,
    has_tokenizer: bool,
) -> dict[str, Any]:
    pair = question.cache if isinstance(question, SpeedQuestion) else None
    request = {
        "prompts": [list(prompt) for prompt in question.prompts],
        "tokens": question.tokens,
        "repetitions": repetitions,
        "cells": question.longest,
        "has_tokenizer": has_tokenizer,
        **({} if pair is None else {"cache_dtype": pair.vllm_name}),
        **_common(question.folder, dtype, question.memory, question.own_code),
    }
    return _answer(python, request, SECONDS)


def _common(folder: Path, dtype: str, memory: int, own_code: bool) -> dict[str, Any]:
    """Return what every request says of the model."""
    return {
        "folder": str(folder),
        "dtype": dtype,
        "memory": memory,
        "trust_remote_code": own_code,
        "model_impl": _implementation(folder),
    }


def _answer(python: str, request: Mapping[str, Any], seconds: float) -> dict[str, Any]:
    environment = {
        name: value for name, value in os.environ.items() if not name.startswith(("PYTHON", "VLLM"))
    }
    command = [python, "-P", str(CHILDREN / "vllm_child.py")]
    return run_child(NAME, command, request, environment, seconds)[0]


def _implementation(folder: Path) -> str:
    """Return whose model classes vLLM takes: its own read no counts per layer."""
    config = json.loads((folder / "config.json").read_text(encoding="utf-8"))
    return "transformers" if "per_layer_config" in config else "auto"


ENGINE = Engine(NAME, find, ask, time, score)
