"""An engine: finding it, starting it in a separate process, and requests to it."""

from __future__ import annotations

import json
import os
import shutil
import signal
import subprocess
import tempfile
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

from attention.base.messages import cut
from attention.cache_formats import CachePair
from attention.io.targets import EngineSupport
from orchestrator.child_processes import Child

CHILDREN = Path(__file__).parent / "children"
SECONDS = 900  # that an engine may take to load a model and answer


class EngineError(ValueError):
    """An engine that is not installed, or a model that it cannot be given."""


class EngineFailure(RuntimeError):
    """An engine that does not load a model, or ends badly. The message has what it printed."""


@dataclass(frozen=True)
class Question:
    """A request to an engine: greedy completions of prompts, and the size of its cache.

    Attributes:
        prompts: Token ids.
        tokens: To generate after each prompt, stopping before an end token.
        dtype: Of the weights.
        support: The cache that the format promises.
        memory: Bytes of the cache in the request.
        texts: The prompts before tokenisation; None for a model without a tokenizer.
        own_code: Whether the folder has Python files that the engine must run.
        activation: Of the MLPs, by transformers' name.
    """

    folder: Path
    prompts: Sequence[Sequence[int]]
    tokens: int
    dtype: str
    support: EngineSupport
    memory: int
    texts: Sequence[str] | None = None
    own_code: bool = False
    activation: str = "silu"

    @property
    def longest(self) -> int:
        """Tokens of the longest prompt and its completion."""
        return max(map(len, self.prompts)) + self.tokens


@dataclass(frozen=True)
class Completion:
    """The tokens that an engine has added to a prompt of `prompt_tokens`.

    None stands for log-probabilities that it does not report.
    """

    tokens: list[int]
    log_probabilities: list[float | None]
    prompt_tokens: int


@dataclass(frozen=True)
class EngineRun:
    """A computation by an engine in one of its modes.

    Attributes:
        how: The mode, in words.
        tolerance: The difference of log-probabilities that its arithmetic may cause.
    """

    how: str
    completions: list[Completion]
    tolerance: float


@dataclass(frozen=True)
class Answer:
    """The results of an engine.

    Attributes:
        runs: At least one.
        kv_bytes_per_token: As the engine reports it for a cache in `cache_dtype`.
        capacity: Tokens in the memory of the question, likewise.
    """

    version: str
    runs: list[EngineRun]
    cache_dtype: str
    kv_bytes_per_token: float
    capacity: int


@dataclass(frozen=True)
class SpeedQuestion:
    """The size of an engine's timing; other fields as in `Question`.

    Attributes:
        prompts: Token ids, one at a time.
        tokens: To generate after each prompt, at least 2; end tokens are ignored.
        repetitions: Of each prompt.
        cache: The formats of keys and values; None for 16 bits, or 32 with such weights.
    """

    folder: Path
    prompts: Sequence[Sequence[int]]
    tokens: int
    repetitions: int
    dtype: str
    support: EngineSupport
    memory: int
    own_code: bool = False
    cache: CachePair | None = None

    @property
    def longest(self) -> int:
        return max(map(len, self.prompts)) + self.tokens


@dataclass(frozen=True)
class SpeedAnswer:
    """The times of an engine; other fields as in `Answer`.

    Attributes:
        seconds: For each prompt, of each repetition: from the prompt to the first new token, and
            from there to the last.
    """

    version: str
    seconds: list[list[tuple[float, float]]]
    cache_dtype: str
    kv_bytes_per_token: float
    capacity: int


@dataclass(frozen=True)
class ScoreQuestion:
    """Text that an engine scores with its cache in a format; other fields as in `Question`.

    Attributes:
        sequences: Token ids.
        cache: The formats of keys and values.
        seconds: That it may take.
    """

    folder: Path
    sequences: Sequence[Sequence[int]]
    dtype: str
    support: EngineSupport
    cache: CachePair
    seconds: float
    own_code: bool = False


class TextScores(NamedTuple):
    """What an engine makes of given text.

    Attributes:
        log_probabilities: Of each token but the first of each sequence; None for tokens of which
            the engine reports none.
        kv_bytes_per_token: Of its cache, as it reports it.
        version: Of the engine.
        device: That it ran on, as torch names it.
    """

    log_probabilities: list[list[float | None]]
    kv_bytes_per_token: float
    version: str
    device: str = "cpu"


@dataclass(frozen=True)
class Engine:
    """An engine, by what it can do.

    Attributes:
        find: Takes an interpreter or None, and returns the one that has the engine; raises
            EngineError saying how to install it.
        ask: Takes the interpreter and a question; raises EngineError if it does not answer.
        time: Likewise.
        score: Likewise; None for an engine whose cache has no formats.
    """

    name: str
    find: Callable[[str | None], str]
    ask: Callable[[str, Question], Answer]
    time: Callable[[str, SpeedQuestion], SpeedAnswer]
    score: Callable[[str, ScoreQuestion], TextScores] | None = None


def run_child(
    name: str,
    command: Sequence[str],
    request: Mapping[str, Any],
    environment: Mapping[str, str],
    seconds: float = SECONDS,
) -> tuple[dict[str, Any], str]:
    """Run a command with a file of the request as its last argument, in a folder of the request.

    Returns:
        Its last line as JSON, and its log (stderr).

    Raises:
        EngineError: If it crashes, fails, or does not end.
    """
    # A path of the current folder leads nowhere from the child's; the link that makes a Python that
    # of its environment stays
    program = Path(shutil.which(command[0]) or command[0]).absolute()
    with tempfile.TemporaryDirectory(prefix="headfold-") as folder:
        file = Path(folder) / "request.json"
        file.write_text(json.dumps(request), encoding="utf-8")
        try:
            child = Child(
                [str(program), *command[1:], str(file)],
                environment,
                cwd=folder,
                stdout=subprocess.PIPE,
                stderr=subprocess.PIPE,
            )
        except OSError as error:
            raise EngineFailure(f"{name} cannot be started: {error}") from None
        try:
            answer, errors = child.communicate(timeout=seconds)
        except subprocess.TimeoutExpired:
            raise EngineFailure(
                f"{name} did not answer within {seconds:g} seconds, and was stopped"
            ) from None
        finally:
            child.end()
    log = errors.decode(errors="replace")
    if child.returncode:
        raise EngineFailure(f"{name} {_end(child.returncode)}: {_last_words(log)}")
    lines = answer.decode(errors="replace").splitlines()
    try:
        return json.loads(lines[-1]), log
    except (IndexError, ValueError):
        raise EngineFailure(f"{name} exited without an answer: {_last_words(log)}") from None


def _end(code: int) -> str:
    return "failed" if code > 0 else f"crashed ({signal.Signals(-code).name})"


def _last_words(log: str) -> str:
    """Return what a log says of a failure: its lines of errors, else its last ones."""
    lines = [line.strip() for line in log.splitlines() if line.strip()]
    errors = [line for line in lines if " E " in line or "rror" in line]
    return cut(" | ".join((errors or lines)[-4:])) or "it said nothing"


def has_module(python: str, module: str) -> bool:
    """Return whether an interpreter can find a module, without importing it."""
    look = f"import importlib.util, sys; sys.exit(importlib.util.find_spec({module!r}) is None)"
    try:
        command = [python, "-P", "-c", look]  # a folder of that name is not the module
        return subprocess.run(command, capture_output=True, timeout=60).returncode == 0
    except (OSError, subprocess.TimeoutExpired):
        return False


def completions_of(answer: Mapping[str, Any]) -> list[Completion]:
    """Return the completions in a child's answer."""
    return [Completion(**completion) for completion in answer["completions"]]


def threads() -> int:
    """Return the threads that an engine may take: OMP_NUM_THREADS, else all of its cores."""
    return int(os.environ.get("OMP_NUM_THREADS") or len(os.sched_getaffinity(0)))


def idle_threads() -> int:
    """Return the threads for which cores are idle now, at least 1 and at most `threads()`.

    llama.cpp's threads wait for each other by spinning: with one more than there are idle cores it
    generates a twentieth of the tokens per second that one thread does.
    """
    load = os.getloadavg()[0] if hasattr(os, "getloadavg") else 0.0
    return max(1, min(threads(), len(os.sched_getaffinity(0)) - round(load)))
