"""Tokenise a text on all present CPUs of the cluster.

One process reads the documents and writes the shards of the token set, Ray tasks tokenise block by
block. No more of them are requested than can run at once: an autoscaler would start nodes for the
others, GPU nodes where it has no other type, for a text that one process reads.
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Iterable, Iterator
from functools import lru_cache
from pathlib import Path
from typing import Any

from attention.io.tokenizers import read_tokenizer
from orchestrator.storage.paths import in_ray_job
from trainers.text.data import SMALL_TEXT
from trainers.text.tokenising import TokenBlock, Tokenise, tokenise, tokenise_here

_BLOCKS_PER_CPU = 2
"""Blocks in memory per task: one in work, one that is done and waits for earlier ones."""


def tokeniser(model: str, tokens: int) -> Tokenise:
    """Return the tokeniser for a text of so many tokens.

    That is this process, if others would take as long to start, or the cluster that it is connected
    to.
    """
    return tokenise_here if tokens <= SMALL_TEXT else tokenise_on_cluster(model)


def tokenise_on_cluster(model: str) -> Tokenise:
    """Return a tokeniser that uses Ray tasks of one CPU each; blocks are returned in order.

    A task whose process or node dies is run again by Ray.

    Args:
        model: Source of the tokenizer: a folder that every node sees, or a hub name.
    """
    import ray
    from ray.exceptions import RayTaskError

    from orchestrator.cluster.capacity import live_nodes, slots

    if Path(model).is_dir() and not in_ray_job():  # a job's working folder is that of its tasks too
        model = str(Path(model).absolute())

    def on_cluster(texts: Iterable[list[str]], tokenizer: Any) -> Iterator[TokenBlock]:
        task = ray.remote(num_cpus=1)(_tokenise)
        in_use = ray.cluster_resources().get("CPU", 0) - ray.available_resources().get("CPU", 0)
        blocks: deque[Any] = deque()  # in order, running or done
        running: list[Any] = []
        try:
            for block in texts:
                cpus = slots(live_nodes(), {"CPU": 1}) - math.ceil(in_use)
                if cpus < 1 and not blocks:
                    yield tokenise(block, tokenizer)
                    continue
                while len(running) >= max(1, cpus):
                    _, running = ray.wait(running, num_returns=1)
                while len(blocks) >= _BLOCKS_PER_CPU * max(1, cpus):
                    yield ray.get(blocks.popleft())
                blocks.append(task.remote(block, model))
                running.append(blocks[-1])
            while blocks:
                yield ray.get(blocks.popleft())
        except RayTaskError as error:
            raise error.cause from None  # without Ray's trace around what a user can mend

    return on_cluster


def _tokenise(texts: list[str], model: str) -> TokenBlock:
    return tokenise(texts, _tokenizer(model))


@lru_cache(maxsize=1)
def _tokenizer(model: str) -> Any:
    """Return the tokenizer, read once per process, which processes one block after the other."""
    return read_tokenizer(model)
