"""vLLM, in a separate environment: it requires another version of torch."""

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
    SpeedAnswer,
    SpeedQuestion,
    TextScores,
    completions_of,
    has_module,
    run_child,
)

NAME = "vLLM"
VARIABLE = "HEADFOLD_VLLM_PYTHON"
ROUNDING = 1e-3  # it computes in float32
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
    request = _prompts(question) | {"repetitions": 0, "has_tokenizer": question.texts is not None}
    answer = _run(python, question, request, "float32", question.memory)
    runs = [EngineRun("float32", completions_of(answer), ROUNDING)]
    cache_bytes = answer["cache_bytes"] / answer["capacity"]
    return Answer(answer["version"], runs, "float32", cache_bytes, answer["capacity"])


def time(python: str, question: SpeedQuestion) -> SpeedAnswer:
    """Time it in the dtype of the weights, without graphs (`enforce_eager`)."""
    request = _prompts(question) | {"repetitions": question.repetitions}
    cache_dtype = question.dtype
    if question.cache is not None:
        cache_dtype = request["cache_dtype"] = question.cache.vllm_name
    answer = _run(python, question, request, question.dtype, question.memory)
    cache_bytes = answer["cache_bytes"] / answer["capacity"]
    return SpeedAnswer(
        answer["version"], answer["seconds"], cache_dtype, cache_bytes, answer["capacity"]
    )


def score(python: str, question: ScoreQuestion) -> TextScores:
    """Score the tokens of `sequences` with a cache of the formats `cache`.

    A sequence is computed at once, and its attention reads keys and values from the cache.
    """
    request = {
        "sequences": [list(sequence) for sequence in question.sequences],
        "cells": max(map(len, question.sequences)),
        "cache_dtype": question.cache.vllm_name,
    }
    answer = _run(python, question, request, question.dtype, SCORED_MEMORY, question.seconds)
    cache_bytes = answer["cache_bytes"] / answer["capacity"]
    return TextScores(answer["scores"], cache_bytes, answer["version"], answer["device"])


def _prompts(question: Question | SpeedQuestion) -> dict[str, object]:
    """Return what a request says of completions."""
    return {
        "prompts": [list(prompt) for prompt in question.prompts],
        "tokens": question.tokens,
        "cells": question.longest,
    }


def _run(
    python: str,
    question: Question | SpeedQuestion | ScoreQuestion,
    request: Mapping[str, object],
    dtype: str,
    memory: int,
    seconds: float = SECONDS,
) -> dict[str, Any]:
    """Return the answer to a request about the model of a question."""
    model = {
        "folder": str(question.folder),
        "dtype": dtype,
        "memory": memory,
        "trust_remote_code": question.own_code,
        "model_impl": _implementation(question.folder),
    }
    environment = {
        name: value for name, value in os.environ.items() if not name.startswith(("PYTHON", "VLLM"))
    }
    command = [python, "-P", str(CHILDREN / "vllm_child.py")]
    return run_child(NAME, command, {**request, **model}, environment, seconds)[0]


def _implementation(folder: Path) -> str:
    """Return whose model classes vLLM takes: its own read no counts per layer."""
    config = json.loads((folder / "config.json").read_text(encoding="utf-8"))
    return "transformers" if "per_layer_config" in config else "auto"


ENGINE = Engine(NAME, find, ask, time, score)
