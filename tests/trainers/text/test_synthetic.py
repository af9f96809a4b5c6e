"""Synthetic tasks: one right answer each, the same in every process, and an evaluation that can distinguish models."""

from __future__ import annotations

import hashlib
import json
import math
import os
import re
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from torch import nn

from trainers.text.synthetic import (
    PATTERNS,
    SHOTS,
    Example,
    SyntheticTask,
    all_tasks,
    draw,
    episode,
    evaluate_tasks,
    examples,
    split_tasks,
    vocabulary,
)
from trainers.text.synthetic_words import DOMAINS, PEOPLE

every_task = pytest.mark.parametrize("task", all_tasks(), ids=lambda task: task.name)


def generator(seed: int = 0) -> np.random.Generator:
    return np.random.default_rng(seed)


def words(text: str) -> list[str]:
    return re.findall(r"\w+", text)


def solve(example: Example) -> str:
    """Another way to the answer: read the text and the word tables, know nothing of how it was drawn."""
    task, domain = example.task, DOMAINS[example.task.domain]
    context, question = example.prompt.split("\n")[-1].split(" Back to ")
    whom = question.split(": ")[0]
    order = [w for w in words(context) if w in domain.items]
    people = [w for w in words(context) if w in PEOPLE]
    if task.pattern == "same person":
        source = order[people.index(whom)]
    elif task.pattern == "other person":
        source = next(item for person, item in zip(people, order, strict=True) if person != words(whom)[-1])
    elif task.pattern == "same item":
        return people[order.index(whom)]
    elif task.pattern == "odd one":
        source = next(item for item in order if order.count(item) == 1)
    elif task.pattern == "other class":
        source = next(item for item in order if item not in domain.classes[words(whom)[-1]])
    else:
        source = order[0 if task.pattern == "first" else -1]
    return domain.answers[task.transformation][source]


def test_the_grid_is_whole() -> None:
    tasks = all_tasks()
    assert len(tasks) == len(set(tasks)) == 62
    changes = {(t.domain, t.transformation) for t in tasks}
    assert len(changes) == 10 and {t.pattern for t in tasks} == set(PATTERNS)
    for pattern in ("same person", "other person", "first", "last", "odd one"):
        assert {(t.domain, t.transformation) for t in tasks if t.pattern == pattern} == changes


@every_task
def test_answers_are_right_and_unique(task: SyntheticTask) -> None:
    rng = generator(1)
    for _ in range(40):
        example = draw(task, rng)
        assert example.answer == solve(example), example
        if task.pattern == "same item":
            continue
        domain = DOMAINS[task.domain]
        context = example.prompt.split(" Back to ")[0]
        table = domain.answers[task.transformation]
        leading = {w for w in words(context) if w in domain.items and example.answer in (w, table[w])}
        assert len(leading) == 1, (leading, example)


def test_sources_are_spread_over_the_context() -> None:
    """No task can be solved by always taking the same place (but for those that ask for a place)."""
    for task in (t for t in all_tasks() if t.pattern not in ("first", "last") and t.transformation == "copy"):
        rng, places = generator(2), []
        for _ in range(150):
            example = draw(task, rng)
            known = PEOPLE if task.pattern == "same item" else DOMAINS[task.domain].items
            order = [w for w in words(example.prompt.split(" Back to ")[0]) if w in known]
            places.append(order.index(example.answer))
        assert min(places.count(i) for i in range(3)) > 25, task


def test_word_tables() -> None:
    for domain in DOMAINS.values():
        assert len(set(domain.items)) == len(domain.items)
        assert all(set(table) == set(domain.items) for table in domain.answers.values())
    assert DOMAINS["number"].answers["next"]["nine"] == "ten"
    assert DOMAINS["number"].answers["previous"]["two"] == "one"
    assert "seven" in DOMAINS["number"].classes["odd"] and "twelve" in DOMAINS["number"].classes["even"]
    opposite = DOMAINS["quality"].answers["opposite"]
    assert opposite["warm"] == "cold" and all(opposite[opposite[w]] == w for w in opposite)


def test_shots() -> None:
    created = episode(all_tasks()[0], 3, generator())
    lines = created.prompt.split("\n")
    assert len(lines) == 4 and all(line.endswith(".") for line in lines[:3]) and created.shots == 3
    drawn = examples(all_tasks(), 12, generator())
    assert len(drawn) == 62 * 12 and {e.shots for e in drawn} == set(SHOTS)


DIGEST = """
import hashlib, json, numpy as np
from trainers.text.synthetic import all_tasks, examples
drawn = [(e.prompt, e.answer) for e in examples(all_tasks(), 2, np.random.default_rng(7))]
print(hashlib.sha256(json.dumps(drawn).encode()).hexdigest())
"""


def test_same_in_every_process() -> None:
    drawn = [(e.prompt, e.answer) for e in examples(all_tasks(), 2, generator(7))]
    here = hashlib.sha256(json.dumps(drawn).encode()).hexdigest()
    for seed in ("1", "2"):
        done = subprocess.run(
            [sys.executable, "-c", DIGEST],
            env=os.environ | {"PYTHONHASHSEED": seed},
            cwd=Path(__file__).resolve().parents[3],
            capture_output=True,
            text=True,
            check=True,
        )
        assert done.stdout.strip() == here


def test_held_out_tasks_are_new_pairs_of_known_parts() -> None:
    train, test = split_tasks(all_tasks(), 15, generator())
    assert len(test) == 15 and not set(train) & set(test) and set(train) | set(test) == set(all_tasks())
    assert {t.pattern for t in test} <= {t.pattern for t in train}
    assert {(t.domain, t.transformation) for t in test} <= {(t.domain, t.transformation) for t in train}
    with pytest.raises(ValueError, match="at most"):
        split_tasks(all_tasks(), 60, generator())


IDS = {word: index for index, word in enumerate(vocabulary())}


def encode(text: str) -> list[int]:
    return [IDS[word] for word in re.findall(r"\w+|\n|[^\w\s]", text)]


def test_vocabulary_holds_every_word() -> None:
    for example in examples(all_tasks(), 10, generator(3)):
        assert 0 not in encode(f"{example.prompt} {example.answer}.\n")
        assert len(encode(example.answer)) == 1


class Oracle(nn.Module):
    """Gives a share of 0.9 to the token that really comes next in sequences it was shown, the rest to all others."""

    def __init__(self, items: list[Example], wrong: set[int]) -> None:
        super().__init__()
        self.anchor = nn.Parameter(torch.zeros(()))
        self.size, self.known = len(IDS), {}
        for index, e in enumerate(items):
            answer = 5 if index in wrong else encode(e.answer)[0]
            self.known[tuple(encode(e.prompt))] = answer

    def forward(self, input_ids: torch.Tensor, use_cache: bool) -> SimpleNamespace:
        logits = torch.full((*input_ids.shape, self.size), math.log(0.1 / (self.size - 1)))
        for row, ids in enumerate(input_ids.tolist()):
            for end in range(1, len(ids) + 1):
                if tuple(ids[:end]) in self.known:
                    logits[row, end - 1, self.known[tuple(ids[:end])]] = math.log(0.9)
        return SimpleNamespace(logits=logits)


def test_evaluation_worked_example() -> None:
    items = examples(all_tasks()[::8], 3, generator(), shots=(0, 1))
    wrong = {0, 1, 7}
    score = evaluate_tasks(Oracle(items, wrong), items, encode, batch_size=5)
    assert score.count == len(items) == 24
    assert score.accuracy == pytest.approx(21 / 24)
    nats = -(21 * math.log(0.9) + 3 * math.log(0.1 / (len(IDS) - 1))) / 24
    assert score.perplexity == pytest.approx(math.exp(nats), rel=1e-5)
    assert score.by_task[items[0].task.name] == pytest.approx(1 / 3)
    with pytest.raises(ValueError, match="at least one example"):
        evaluate_tasks(Oracle([], set()), [], encode)


def test_evaluation_of_a_real_checkpoint(demo_model, demo_tokenizer) -> None:
    """Answers of several tokens: the batch size does not matter, and a model that never saw such text is poor."""

    def encode(text: str) -> list[int]:
        return demo_tokenizer.encode(text, add_special_tokens=False)

    items = examples(all_tasks()[::10], 2, generator(), shots=(1, 2))
    one, many = (evaluate_tasks(demo_model, items, encode, batch_size=b) for b in (1, 8))
    assert one.perplexity == pytest.approx(many.perplexity, rel=1e-4) and one.accuracy == many.accuracy
    assert many.accuracy < 0.6 and many.perplexity > 2
