"""llama.cpp through `xllamacpp`, in a separate process.

It runs twice. Without flash attention it computes in float32, if the weights are in float32; that
shows whether the maths is right. With flash attention, as in normal use, it rounds keys and values
to 16 bits, and its cache stores for each layer the heads of that layer; without it the value cache
of every layer is as wide as the widest.
"""

from __future__ import annotations

import os
import re
import sys
from typing import Any

from attention.cache_formats import CachePair
from attention.plan import number_bytes
from orchestrator.serving.engine import (
    CHILDREN,
    Answer,
    Engine,
    EngineError,
    EngineFailure,
    EngineRun,
    Question,
    ScoreQuestion,
    SpeedAnswer,
    SpeedQuestion,
    TextScores,
    completions_of,
    has_module,
    idle_threads,
    run_child,
    threads,
)

NAME = "llama.cpp"
SIZE = re.compile(r"llama_kv_cache: size = +([\d.]+) MiB \( *(\d+) cells")
STEP = 0.01 * 2**20  # bytes: it logs sizes in MiB with two decimals
SCORED_CELLS = 4096  # of a cache that text is scored in: its logged size is then exact to 3 bytes
MOST = 512 * 2**20  # bytes of cache that are allocated to measure it
ROUNDING = {"float32": 1e-3, "float16": 1e-2, "bfloat16": 5e-2, "q8_0": 0.25}
"""Differences of log-probabilities that its arithmetic causes: activations are rounded to the dtype
of the weights."""

GELU = 1e-2  # it looks GELU up in a table of 16-bit numbers


def find(python: str | None) -> str:
    """Return the interpreter that has llama.cpp."""
    python = python or sys.executable
    if not has_module(python, "xllamacpp"):
        raise EngineError(
            f"llama.cpp is not installed for {python}: `pip install 'xllamacpp>=2026.10'` there, "
            "or name the Python of an environment that has it: --engine-python"
        )
    return python


def ask(python: str, question: Question) -> Answer:
    """Complete prompts without and with flash attention."""
    cache_dtype = _cache_dtype(question)
    head_bytes = 2 * question.support.head_dim * number_bytes(cache_dtype)
    exact, _ = _run(python, question, max(256, question.longest), "float32", flash=False)
    cells = cells_for(question.support.bytes_per_token(cache_dtype), head_bytes)
    served, log = _run(python, question, max(cells, question.longest), cache_dtype, flash=True)
    cache_bytes = kv_bytes_per_token(log, head_bytes)
    rounding = max(ROUNDING[question.dtype], GELU if "gelu" in question.activation else 0.0)
    runs = [
        EngineRun("float32 cache, no flash attention", completions_of(exact), rounding),
        EngineRun(
            f"{cache_dtype} cache, flash attention",
            completions_of(served),
            max(2 * rounding, ROUNDING["float16"]),
        ),
    ]
    return Answer(served["version"], runs, cache_dtype, cache_bytes, question.memory // cache_bytes)


def time(python: str, question: SpeedQuestion) -> SpeedAnswer:
    """Time it with flash attention, as people run it."""
    pair = question.cache
    if pair is None:
        cache_dtype = _cache_dtype(question)
        head_bytes = 2 * question.support.head_dim * number_bytes(cache_dtype)
        promised = question.support.bytes_per_token(cache_dtype)
    else:
        cache_dtype = pair.name
        head_bytes = pair.bytes_of([(1, question.support.head_dim)])
        promised = question.support.bytes_in(pair)
    cells = max(cells_for(promised, head_bytes), question.longest)
    answer, log = _run(python, question, cells, cache_dtype, flash=True)
    cache_bytes = kv_bytes_per_token(log, head_bytes)
    return SpeedAnswer(
        answer["version"],
        answer["seconds"],
        cache_dtype,
        cache_bytes,
        question.memory // cache_bytes,
    )


def score(python: str, question: ScoreQuestion) -> TextScores:
    """Score the text of a question with flash attention.

    Args:
        python: An interpreter that has llama.cpp (`find`).
        question: Its folder has the file `model.gguf`.
    """
    request = {
        "file": str(question.folder / "model.gguf"),
        "sequences": [list(sequence) for sequence in question.sequences],
        "repetitions": 0,
        "cells": max(SCORED_CELLS, -(-max(map(len, question.sequences)) // 256) * 256),
        "cache_formats": _names(question.cache),
        "flash_attention": True,
        "threads": idle_threads(),
    }
    command = [python, "-P", str(CHILDREN / "llama_cpp_child.py")]
    answer, log = run_child(NAME, command, request, os.environ, question.seconds)
    head_bytes = question.cache.bytes_of([(1, question.support.head_dim)])
    size = kv_bytes_per_token(log, head_bytes)
    return TextScores(answer["scores"], size, answer["version"])


def _names(pair: CachePair) -> list[str]:
    return [pair.keys.name, pair.values.name]


def _cache_dtype(question: Question | SpeedQuestion) -> str:
    return "float32" if question.dtype == "float32" else "float16"


def cells_for(promised: int, head_bytes: int) -> int:
    """Return the tokens of a cache whose logged size resolves one KV head of one layer.

    Sizes in the log are rounded. It is a power of two, for a cache of about `promised` bytes per
    token.

    Raises:
        EngineError: If that would take too much memory.
    """
    cells = 256
    while cells * 2 * promised <= MOST and cells < 2**15:
        cells *= 2
    if STEP / cells >= head_bytes:
        raise EngineError(
            f"a cache of {promised} bytes per token is too large to be read from llama.cpp's log"
        )
    return cells


def _run(
    python: str, question: Question | SpeedQuestion, cells: int, cache_dtype: str, *, flash: bool
) -> tuple[dict[str, Any], str]:
    timed = isinstance(question, SpeedQuestion)
    request = {
        "file": str(question.folder / "model.gguf"),
        "prompts": (None if timed else question.texts)
        or [list(prompt) for prompt in question.prompts],
        "repetitions": question.repetitions if timed else 0,
        "tokens": question.tokens,
        "cells": cells,
        **({"cache_formats": _names(question.cache)} if timed and question.cache else {}),
        "cache_dtype": cache_dtype,
        "flash_attention": flash,
        "threads": threads() if timed else idle_threads(),
    }
    return run_child(
        NAME, [python, "-P", str(CHILDREN / "llama_cpp_child.py")], request, os.environ
    )


def kv_bytes_per_token(log: str, head_bytes: int) -> int:
    """Return the bytes of the cache per token by llama.cpp's log, in whole KV heads.

    Raises EngineFailure if the log does not say.
    """
    sizes = SIZE.findall(log)
    if not sizes:
        raise EngineFailure(
            "llama.cpp's log does not name the size of its KV cache; another version logs it "
            "otherwise"
        )
    measured = sum(float(size) * 2**20 / int(cells) for size, cells in sizes)
    return round(measured / head_bytes) * head_bytes


ENGINE = Engine(NAME, find, ask, time, score)
