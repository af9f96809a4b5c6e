"""Make the task files of `headfold evaluate --tasks demo`, in the format of lm-evaluation-harness, from held-out source
of Python's standard library: the kind of text that the demo checkpoint was trained on, from files that it never saw.

    python examples/make_tasks.py orchestrator/evaluation/demo_tasks

Items are chosen by the text alone (and by lengths in tokens of the demo checkpoint's tokenizer, so that no choice is
likelier for being short), never by what a model makes of them. Another version of Python has other text and
gives other items; those of the repository are from 3.11.
"""

from __future__ import annotations

import builtins
import json
import keyword
import re
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np

from attention.io.tokenizers import read_tokenizer
from trainers.text.corpora import resolve

SEED = 0
ITEMS, CONTEXT = 64, 360  # of each task; characters of the text before the question, at most
CHOICES = 4
NAME = re.compile(r"[A-Za-z_]\w{3,}")
TOKENIZER = read_tokenizer(Path(__file__).parent / "stdlib-llama")
COMMON = {*keyword.kwlist, *dir(builtins), "self"}
Item = dict[str, Any]
Maker = Callable[[str, np.random.Generator, list[str]], Item | None]


def sources() -> list[str]:
    """Held-out files that are code in ASCII: no tables of characters."""
    texts = resolve("stdlib").documents("held_out", "text", None)
    return [t for t in texts if t.isascii() and t.count("def ") > 3 and len(t) > 2000 and "_table" not in t]


def before(text: str, end: int) -> str:
    """Whole lines up to a place in one of them, CONTEXT characters at most."""
    start = text.find("\n", max(0, end - CONTEXT)) + 1
    return text[start:end]


def lines_of(text: str) -> list[str]:
    return [line for line in text.splitlines() if 16 <= len(line.strip()) <= 60 and len(NAME.findall(line)) > 1]


def next_line(text: str, generator: np.random.Generator, others: list[str]) -> Item | None:
    """Which line comes next; the wrong ones are from other files, as long, and indented alike."""
    right = str(generator.choice(lines_of(text)))
    end = text.index(right)
    indent = right[: len(right) - len(right.lstrip())]
    wrong = [o.strip() for o in others if abs(len(o.strip()) - len(right.strip())) < 4 and o.strip() not in text]
    context = before(text, end)
    if len(context) < CONTEXT // 2 or text[end - 1] != "\n" or len(set(wrong)) < CHOICES:
        return None
    drawn = generator.choice(sorted(set(wrong)), CHOICES - 1, replace=False)
    return shuffled(context, right, [f"{indent}{line}" for line in drawn], generator)


def which_name(text: str, generator: np.random.Generator, _: list[str]) -> Item | None:
    """Which of the names that the text has used already comes next."""
    names = list(NAME.finditer(text))
    place = names[int(generator.integers(len(names)))]
    context = before(text, place.start())
    alike = {name for name in NAME.findall(context) if name not in COMMON and tokens(name) == tokens(place[0])}
    if place[0] not in alike or len(alike) < CHOICES or len(context) < CONTEXT // 2:
        return None
    wrong = generator.choice(sorted(alike - {place[0]}), CHOICES - 1, replace=False)
    return shuffled(context, place[0], list(map(str, wrong)), generator)


def tokens(name: str) -> int:
    return len(TOKENIZER.encode(name, add_special_tokens=False))


def complete_name(text: str, generator: np.random.Generator, _: list[str]) -> Item | None:
    """The name that comes next, written out; the text has had the same two words with it before."""
    names = list(re.finditer(r"(\w+)\W{0,2}[.(\[]([A-Za-z_]\w{3,})(?=[^\w])", text))
    place = names[int(generator.integers(len(names)))] if names else None
    if place is None or place[2] in COMMON:
        return None
    context = before(text, place.start(2))
    if len(context) < CONTEXT // 2 or place[0] not in context:
        return None
    return {"context": context, "target": place[2]}


def shuffled(context: str, right: str, wrong: list[str], generator: np.random.Generator) -> Item:
    choices = [right, *wrong]
    order = generator.permutation(len(choices)).tolist()
    return {"context": context, "choices": [choices[i] for i in order], "label": order.index(0)}


def items(make: Maker, texts: list[str], generator: np.random.Generator) -> Iterator[Item]:
    """ITEMS of them, from file after file, so that no file has many."""
    lines, written = [lines_of(text) for text in texts], 0
    while written < ITEMS:
        for index in generator.permutation(len(texts)).tolist():
            others = [line for i, lines_of_text in enumerate(lines) if i != index for line in lines_of_text]
            item = make(texts[index], generator, others)
            if item is not None and written < ITEMS:
                written += 1
                yield item


def main(folder: str) -> None:
    for make in (next_line, which_name, complete_name):
        generator = np.random.default_rng([SEED, *make.__name__.encode()])
        records = [json.dumps(item, sort_keys=True) for item in items(make, sources(), generator)]
        (Path(folder) / f"{make.__name__}.jsonl").write_text("\n".join(records) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main(*sys.argv[1:])
