"""The synthetic tasks as text.

`synthetic:NAME`, documents without end for training, others held out.

NAME is `all`, one attention pattern (`same-person`, `odd-one`, ...) with every transformation that
fits it, or `new-pairs`: trained on the tasks but 15, held out on those, whose patterns and
transformations are all in the others and whose pairs are in none. A document is one episode: some
solved examples of a task and one more, solved too.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterator, Sequence
from functools import cache
from typing import Any

import numpy as np

from trainers.text.synthetic import (
    PATTERNS,
    Score,
    SyntheticTask,
    all_tasks,
    episode,
    evaluate_tasks,
    examples,
    split_tasks,
)
from trainers.text.synthetic_words import DOMAINS, PEOPLE

SYNTHETIC_PREFIX = "synthetic:"
HELD_OUT = 2_000  # documents
_SHOTS = 3  # per document
# Shots of a test example: those of the paper's 2 to 7 that fit a short context.
PROMPT_SHOTS = (2, 3, 4)
NEW_PAIRS = 15
_TRAINING, HOLDING, ASKING = range(3)  # streams of random numbers


def names() -> list[str]:
    """Return the names of the sources."""
    return ["all", "new-pairs", *(pattern.replace(" ", "-") for pattern in PATTERNS)]


def fingerprint() -> str:
    """Return a digest that changes with the words and the tasks."""
    content = repr((DOMAINS, PEOPLE, all_tasks(), _SHOTS))
    # By the names that the classes had when the first sets of tokens were made: they stay valid.
    content = content.replace("WordDomain(", "Domain(").replace("SyntheticTask(", "Task(")
    return hashlib.sha256(content.encode()).hexdigest()


@cache
def tasks_of(name: str, train: bool) -> Sequence[SyntheticTask]:
    """Return the tasks of one side of a source. Raises ValueError for an unknown name."""
    if name not in names():
        raise ValueError(
            f"{SYNTHETIC_PREFIX}{name}: expected one of {', '.join(names())} behind "
            f"{SYNTHETIC_PREFIX}"
        )
    if name == "new-pairs":
        return split_tasks(all_tasks(), NEW_PAIRS, np.random.default_rng(0))[0 if train else 1]
    return [task for task in all_tasks() if name in ("all", task.pattern.replace(" ", "-"))]


def documents(name: str, train: bool, seed: int | None) -> Iterator[str]:
    """Episodes of random tasks.

    Those to train on by `seed` and without end, those held out always the same.
    """
    generator = np.random.default_rng([0, HOLDING] if not train else [seed or 0, _TRAINING])
    tasks = tasks_of(name, train)
    count = 0
    while train or count < HELD_OUT:
        example = episode(tasks[int(generator.integers(len(tasks)))], _SHOTS, generator)
        yield f"{example.prompt} {example.answer}.\n"
        count += 1


def score_held_out(
    model: Any, tokenizer: Any, name: str, per_task: int = 12, *, first: Sequence[int] = ()
) -> Score:
    """Score a model's answers to the held-out tasks of `synthetic:name`, always the same examples.

    The paper has 12 a task (App. F).

    Args:
        first: Tokens that every prompt begins with.
    """
    prompts = examples(
        tasks_of(name, False), per_task, np.random.default_rng([0, ASKING]), PROMPT_SHOTS
    )

    def encode(text: str) -> list[int]:
        return tokenizer.encode(text, add_special_tokens=False)

    return evaluate_tasks(model, prompts, encode, first=first)
