"""transformers in a process that cannot import Headfold.

`python -S` skips the files that put it on the path.
"""

from __future__ import annotations

import os
import subprocess
import sys
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
    threads,
)

NAME = "transformers"
ROUNDING = 1e-3  # it computes in float32


def find(python: str | None) -> str:
    """Return the interpreter that has transformers."""
    python = python or sys.executable
    if not has_module(python, "transformers"):
        raise EngineError(
            f"transformers is not installed for {python}: `pip install transformers torch` there"
        )
    return python


def ask(python: str, question: Question) -> Answer:
    """Complete prompts in float32."""
    answer = _run(python, question, "float32", 0)
    cache_bytes = answer["kv_bytes_per_token"]
    runs = [EngineRun("float32", completions_of(answer), ROUNDING)]
    return Answer(
        answer["version"], runs, "float32", cache_bytes, int(question.memory // cache_bytes)
    )


def time(python: str, question: SpeedQuestion) -> SpeedAnswer:
    """Time `generate` in the dtype of the weights."""
    answer = _run(python, question, question.dtype, question.repetitions)
    cache_bytes = answer["kv_bytes_per_token"]
    return SpeedAnswer(
        answer["version"],
        answer["seconds"],
        question.dtype,
        cache_bytes,
        int(question.memory // cache_bytes),
    )


def _run(
    python: str, question: Question | SpeedQuestion, dtype: str, repetitions: int
) -> dict[str, Any]:
    request = {
        "folder": str(question.folder),
        "prompts": [list(prompt) for prompt in question.prompts],
        "tokens": question.tokens,
        "repetitions": repetitions,
        "dtype": dtype,
        "trust_remote_code": question.own_code,
        "threads": threads(),
    }
    environment = {
        name: value for name, value in os.environ.items() if not name.startswith("PYTHON")
    }
    environment |= {"PYTHONPATH": _packages(python), "HF_HUB_OFFLINE": "1"}
    command = [python, "-S", "-P", str(CHILDREN / "transformers_child.py")]
    return run_child(NAME, command, request, environment)[0]


def _packages(python: str) -> str:
    """Return the folder in which an interpreter's packages are installed."""
    look = "import sysconfig; print(sysconfig.get_path('purelib'))"
    return subprocess.run(
        [python, "-c", look], capture_output=True, text=True, check=True
    ).stdout.strip()


ENGINE = Engine(NAME, find, ask, time)
