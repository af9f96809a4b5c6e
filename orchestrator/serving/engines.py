"""The engines, by name: one file and one line each."""

from __future__ import annotations

from attention.base.messages import one_of
from orchestrator.serving import llama_cpp, transformers, vllm
from orchestrator.serving.engine import Engine

ENGINES = {engine.name: engine for engine in (transformers.ENGINE, vllm.ENGINE, llama_cpp.ENGINE)}


def engine(name: str) -> Engine:
    """Return an engine by its name, in any spelling of capitals.

    Raises ValueError naming the engines for one that is unknown.
    """
    by_name = {spelling.lower(): each for spelling, each in ENGINES.items()}
    if name.lower() not in by_name:
        raise ValueError(one_of("engine", sorted(ENGINES), name))
    return by_name[name.lower()]
