"""Synthetic tasks that need the right source token and the right change of it.

Xiao 2024, sec. 4.3 and App. F. A task is an attention pattern (whom to look up) with a
transformation (what to make of what is found there): heads with one fixed QK and one fixed OV
circuit need one head for every pair, composed heads only one for each. The paper has 74 tasks with
888 examples and prints a few; these sentences, words and tasks are our own, drawn without end.

Every choice comes from the given `numpy.random.Generator`. An example has one right answer, and
none of the other items in its context leads to it, copied or transformed.
"""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from torch.nn.utils.rnn import pad_sequence

from trainers.text.synthetic_words import DOMAINS, PEOPLE, WordDomain

Encode = Callable[[str], Sequence[int]]
SHOTS = (2, 3, 4, 5, 6, 7)  # the paper's mixture


@dataclass(frozen=True, order=True)
class SyntheticTask:
    """A task of generated text.

    Attributes:
        pattern: A key of PATTERNS.
        domain: A key of DOMAINS.
        transformation: One that the domain knows.
    """

    pattern: str
    domain: str
    transformation: str

    @property
    def name(self) -> str:
        return f"{self.pattern} / {self.domain} / {self.transformation}"


@dataclass(frozen=True)
class Example:
    """A prompt that ends right before the answer, and the one word that answers it.

    Attributes:
        shots: Solved examples in it.
    """

    task: SyntheticTask
    prompt: str
    answer: str
    shots: int = 0


# ---- attention patterns -----------------------------------------------------------------------


def _pick(words: Sequence[str], count: int, generator: np.random.Generator) -> list[str]:
    return [words[int(i)] for i in generator.choice(len(words), size=count, replace=False)]


def _apart(
    domain: WordDomain, table: dict[str, str], count: int, generator: np.random.Generator
) -> list[str]:
    """Items of which none leads to the answer of another, neither as it is nor transformed."""
    chosen: list[str] = []
    for item in _pick(domain.items, len(domain.items), generator):
        if all(
            table[item] not in (other, table[other]) and item != table[other] for other in chosen
        ):
            chosen.append(item)
            if len(chosen) == count:
                break
    return chosen


def _statements(domain: WordDomain, pairs: Iterable[tuple[str, str]]) -> str:
    return " ".join(domain.statement.format(person=person, item=item) for person, item in pairs)


Drawn = tuple[str, str, str]  # context, whom to look up, the source item


def _same_person(
    domain: WordDomain, table: dict[str, str], generator: np.random.Generator
) -> Drawn:
    pairs = list(zip(_pick(PEOPLE, 3, generator), _apart(domain, table, 3, generator), strict=True))
    person, item = pairs[generator.integers(3)]
    return _statements(domain, pairs), person, item


def _other_person(
    domain: WordDomain, table: dict[str, str], generator: np.random.Generator
) -> Drawn:
    twice, once = _pick(PEOPLE, 2, generator)
    items = _apart(domain, table, 3, generator)
    people = [twice, twice, once]
    order = generator.permutation(3)
    return (
        _statements(domain, [(people[i], items[i]) for i in order]),
        f"whoever is not {twice}",
        items[2],
    )


def _ordered(position: int, word: str) -> Callable[..., Drawn]:
    def draw(domain: WordDomain, table: dict[str, str], generator: np.random.Generator) -> Drawn:
        items = _apart(domain, table, 3, generator)
        pairs = zip(_pick(PEOPLE, 3, generator), items, strict=True)
        return _statements(domain, pairs), f"the {word} one", items[position]

    return draw


def _odd_one(domain: WordDomain, table: dict[str, str], generator: np.random.Generator) -> Drawn:
    common, odd = _apart(domain, table, 2, generator)
    listed = [(common, common, odd)[i] for i in generator.permutation(3)]
    return domain.listing.format(items=", ".join(listed)), "the one listed once", odd


def _other_class(
    domain: WordDomain, table: dict[str, str], generator: np.random.Generator
) -> Drawn:
    while True:
        inside, outside = _pick(list(domain.classes), 2, generator)
        pair = _pick(domain.classes[inside], 2, generator)
        odd = _pick(domain.classes[outside], 1, generator)[0]
        if all(table[odd] not in (item, table[item]) and odd != table[item] for item in pair):
            break
    listed = [(*pair, odd)[i] for i in generator.permutation(3)]
    return (
        domain.listing.format(items=", ".join(listed)),
        f"the one {domain.other_class.format(name=inside)}",
        odd,
    )


def _same_item(domain: WordDomain, table: dict[str, str], generator: np.random.Generator) -> Drawn:
    pairs = list(zip(_pick(PEOPLE, 3, generator), _pick(domain.items, 3, generator), strict=True))
    person, item = pairs[generator.integers(3)]
    return _statements(domain, pairs), item, person


PATTERNS: dict[str, Callable[[WordDomain, dict[str, str], np.random.Generator], Drawn]] = {
    "same person": _same_person,
    "other person": _other_person,
    "first": _ordered(0, "first"),
    "last": _ordered(2, "last"),
    "odd one": _odd_one,
    "other class": _other_class,
    "same item": _same_item,
}


# ---- tasks and examples -----------------------------------------------------------------------


def all_tasks() -> tuple[SyntheticTask, ...]:
    """Every pattern with every transformation that fits it, sorted.

    For a person (`same item`) there is only the name.
    """
    tasks = []
    for pattern in PATTERNS:
        for domain in DOMAINS.values():
            if pattern == "other class" and not domain.other_class:
                continue
            names = ["copy"] if pattern == "same item" else list(domain.answers)
            tasks += [
                SyntheticTask(pattern, domain.name, transformation) for transformation in names
            ]
    return tuple(sorted(tasks))


def split_tasks(
    tasks: Sequence[SyntheticTask], held_out: int, generator: np.random.Generator
) -> tuple[list[SyntheticTask], list[SyntheticTask]]:
    """(tasks to train on, `held_out` tasks to test on).

    Every pattern and every transformation of the second is also in the first, but no pair of them.

    Raises:
        ValueError: If so many cannot be held out.
    """
    training = set(tasks)
    out = list[SyntheticTask]()
    for task in (sorted(tasks)[i] for i in generator.permutation(len(tasks))):
        rest = training - {task}
        pattern_stays = any(t.pattern == task.pattern for t in rest)
        change_stays = any(
            (t.domain, t.transformation) == (task.domain, task.transformation) for t in rest
        )
        if len(out) < held_out and pattern_stays and change_stays:
            training = rest
            out = [*out, task]
    if len(out) < held_out:
        raise ValueError(
            f"of {len(tasks)} tasks at most {len(out)} can be held out, got held_out={held_out}"
        )
    return sorted(training), sorted(out)


def draw(task: SyntheticTask, generator: np.random.Generator) -> Example:
    """Return one example without shots."""
    domain = DOMAINS[task.domain]
    table = dict(domain.answers[task.transformation])
    context, whom, source = PATTERNS[task.pattern](domain, table, generator)
    about_person = task.pattern == "same item"
    phrase = "the name was" if about_person else domain.phrases[task.transformation]
    return Example(
        task, f"{context} Back to {whom}: {phrase}", source if about_person else table[source]
    )


def episode(task: SyntheticTask, shots: int, generator: np.random.Generator) -> Example:
    """Return an example after `shots` solved ones of the same task, one a line."""
    solved = "".join(
        f"{e.prompt} {e.answer}.\n" for e in (draw(task, generator) for _ in range(shots))
    )
    last = draw(task, generator)
    return Example(task, solved + last.prompt, last.answer, shots)


def examples(
    tasks: Sequence[SyntheticTask],
    per_task: int,
    generator: np.random.Generator,
    shots: Sequence[int] = SHOTS,
) -> list[Example]:
    """Return `per_task` examples of each task (the paper has 12).

    Each has one of `shots` numbers of shots, drawn evenly.
    """
    return [
        episode(task, int(generator.choice(shots)), generator)
        for task in tasks
        for _ in range(per_task)
    ]


def vocabulary() -> tuple[str, ...]:
    """Return every word and sign that an example can have, sorted.

    Padding (id 0) and the line end come first.
    """
    texts = [*PEOPLE, "Back to whoever is not the first last one listed once name was : . ,"]
    for domain in DOMAINS.values():
        texts += [
            domain.statement,
            domain.listing,
            domain.other_class,
            *domain.classes,
            *domain.items,
        ]
        texts += [
            *domain.phrases.values(),
            *(w for table in domain.answers.values() for w in table.values()),
        ]
    plain = re.sub(r"\{\w+\}", " ", " ".join(texts))
    return ("<pad>", "\n", *sorted(set(re.findall(r"\w+|[^\w\s]", plain))))


# ---- evaluation -------------------------------------------------------------------------------


@dataclass(frozen=True)
class Score:
    """Over `count` examples.

    `accuracy`, the share whose answer is the model's likeliest, token by token; `perplexity` of the
    answer word, exp of its mean nats (all its tokens together).

    Attributes:
        by_task: Accuracy of each task by name.
    """

    accuracy: float
    perplexity: float
    count: int
    by_task: dict[str, float]


def evaluate_tasks(
    model: Any,
    items: Sequence[Example],
    encode: Encode,
    *,
    first: Sequence[int] = (),
    batch_size: int = 16,
) -> Score:
    """Score a causal model on examples (Xiao 2024, Table 5).

    `encode` gives token ids without special tokens; `first`: those that a prompt begins with.

    Padded on the right, which a causal model does not see. The answer is encoded with its leading
    space.
    """
    from attention.modeling.running import evaluating  # brings all of transformers

    if not items:
        raise ValueError("expected at least one example, got none")
    device = next(model.parameters()).device
    nats = []
    right = []
    with evaluating(model):
        for start in range(0, len(items), batch_size):
            pairs = [
                ([*first, *encode(e.prompt)], list(encode(f" {e.answer}")))
                for e in items[start : start + batch_size]
            ]
            rows = [torch.tensor(prompt + answer, device=device) for prompt, answer in pairs]
            logits = model(input_ids=pad_sequence(rows, batch_first=True), use_cache=False).logits
            for row, (prompt, answer) in enumerate(pairs):
                predicted = logits[row, len(prompt) - 1 : len(prompt) + len(answer) - 1].float()
                target = torch.tensor(answer, device=device)
                nats.append(float(F.cross_entropy(predicted, target, reduction="sum")))
                right.append(bool((predicted.argmax(-1) == target).all()))
    by_task: dict[str, list[bool]] = {}
    for example, is_right in zip(items, right, strict=True):
        by_task.setdefault(example.task.name, []).append(is_right)
    accuracies = {name: float(np.mean(by_task[name])) for name in sorted(by_task)}
    return Score(float(np.mean(right)), math.exp(float(np.mean(nats))), len(items), accuracies)
