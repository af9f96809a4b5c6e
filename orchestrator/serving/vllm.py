"""vLLM, in a separate environment: it requires another version of torch."""

from __future__ import annotations

import json
import os
import sys
from pathlib import Path
from typing import Any

from orchestrator.serving.engine import (
    CHILDREN,
    Answer,
    Engine,
    EngineError,
    EngineRun,
    Question,
    SpeedAnswer,
    SpeedQuestion,
    completions_of,
    has_module,
    run_child,
)

NAME = "vLLM"
VARIABLE = "HEADFOLD_VLLM_PYTHON"
ROUNDING = 1e-3  # it computes in float32


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
    cache_bytes = answer["cache_bytes"] / answer["capacity"]
    return Answer(answer["version"], runs, "float32", cache_bytes, answer["capacity"])


def time(python: str, question: SpeedQuestion) -> SpeedAnswer:
    """Time it in the dtype of the weights, without graphs (`enforce_eager`)."""
    answer = _run(python, question, question.dtype, question.repetitions, False)
    cache_bytes = answer["cache_bytes"] / answer["capacity"]
    return SpeedAnswer(
        answer["version"], answer["seconds"], question.dtype, cache_bytes, answer["capacity"]
    )


def _run(
    python: str,
    question: Question | SpeedQuestion,
    dtype: str,
    repetitions: int,
    has_tokenizer: bool,
) -> dict[str, Any]:
    request = {
        "folder": str(question.folder),
        "prompts": [list(prompt) for prompt in question.prompts],
        "tokens": question.tokens,
        "repetitions": repetitions,
        "dtype": dtype,
        "memory": question.memory,
        "cells": question.longest,
        "has_tokenizer": has_tokenizer,
        "trust_remote_code": question.own_code,
        "model_impl": _implementation(question.folder),
    }
    environment = {
        name: value for name, value in os.environ.items() if not name.startswith(("PYTHON", "VLLM"))
    }
    return run_child(NAME, [python, "-P", str(CHILDREN / "vllm_child.py")], request, environment)[0]


def _implementation(folder: Path) -> str:
    """Return whose model classes vLLM takes: its own read no counts per layer."""
    config = json.loads((folder / "config.json").read_text(encoding="utf-8"))
    return "transformers" if "per_layer_config" in config else "auto"


ENGINE = Engine(NAME, find, ask, time)
