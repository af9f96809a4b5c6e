"""A text tokenised by all CPUs of the cluster: one process reads the documents and writes the shards of the token set,
Ray tasks tokenise block by block."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable, Iterator
from functools import lru_cache
from pathlib import Path
from typing import Any

from attention.io.tokenizers import read_tokenizer
from orchestrator.storage.paths import in_ray_job
from trainers.text.data import SMALL_TEXT
from trainers.text.tokenising import TokenBlock, Tokenise, tokenise, tokenise_here

AHEAD = 2
"""Blocks in memory for each CPU: one that is tokenised, one that waits, so that no CPU waits for the reader."""


def tokeniser(model: str, tokens: int) -> Tokenise:
    """For so many tokens: this process, where others would take as long to start, or the cluster that it is connected
    to."""
    return tokenise_here if tokens <= SMALL_TEXT else tokenise_on_cluster(model)


def tokenise_on_cluster(model: str) -> Tokenise:
    """Ray tasks of one CPU each with the tokenizer of `model`, a folder that every node sees or a hub name.

    Blocks come back in their order. A task whose process or node dies is run again by Ray.
    """
    import ray

    if Path(model).is_dir() and not in_ray_job():  # a job's working folder is that of its tasks too
        model = str(Path(model).absolute())

    def on_cluster(texts: Iterable[list[str]], tokenizer: Any) -> Iterator[TokenBlock]:
        task = ray.remote(num_cpus=1)(_tokenise)
        running: deque[Any] = deque()
        for block in texts:
            running.append(task.remote(block, model))
            if len(running) >= AHEAD * max(1, ray.cluster_resources().get("CPU", 1)):
                yield ray.get(running.popleft())
        while running:
            yield ray.get(running.popleft())

    return on_cluster


def _tokenise(texts: list[str], model: str) -> TokenBlock:
    return tokenise(texts, _tokenizer(model))


@lru_cache(maxsize=1)
def _tokenizer(model: str) -> Any:
    """Read once a process, which takes one block after the other."""
    return read_tokenizer(model)
