"""vLLM, in an environment of its own: it brings a torch that is not ours."""

from __future__ import annotations

import os
import sys

from orchestrator.serving.engine import (
    CHILDREN,
    Answer,
    Engine,
    EngineError,
    Question,
    Run,
    completions_of,
    has_module,
    run_child,
)

NAME = "vLLM"
VARIABLE = "HEADFOLD_VLLM_PYTHON"
ROUNDING = 1e-3  # it is asked in float32


def find(python: str | None) -> str:
    python = python or os.environ.get(VARIABLE) or sys.executable
    if not has_module(python, "vllm"):
        raise EngineError(
            f"vLLM is not installed for {python}. It wants an environment of its own: `make engines` makes one in "
            f"engines/vllm (3.5 GB), or name the Python of yours: --engine-python PYTHON, or {VARIABLE}=PYTHON"
        )
    return python


def ask(python: str, question: Question) -> Answer:
    request = {
        "folder": str(question.folder),
        "prompts": [list(prompt) for prompt in question.prompts],
        "tokens": question.tokens,
        "dtype": "float32",
        "memory": question.memory,
        "cells": question.longest,
        "has_tokenizer": question.texts is not None,
        "trust_remote_code": question.own_code,
    }
    kept = {name: value for name, value in os.environ.items() if not name.startswith(("PYTHON", "VLLM"))}
    answer, _ = run_child(NAME, [python, "-P", str(CHILDREN / "vllm_child.py")], request, kept)
    runs = [Run("float32", completions_of(answer), ROUNDING)]
    held = answer["cache_bytes"] / answer["capacity"]
    return Answer(answer["version"], runs, "float32", held, answer["capacity"])


ENGINE = Engine(NAME, find, ask)
