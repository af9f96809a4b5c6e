"""Long-context tasks as RULER defines them, generated from a seed without any data.

The definitions (what is hidden, how often, what counts as an answer, tokens to generate) are those
of RULER (Hsieh 2024, arXiv 2404.06654; code of July 2026); prompts, words and the noise text are
this project's. Where RULER hides needles in essays, they are hidden in the noise text here. Its two
question-answering tasks need data and are left out.
"""

from __future__ import annotations

import random
import re
import string
import uuid
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import pairwise
from typing import Any, TypedDict

from orchestrator.config.schema import ConfigError
from orchestrator.evaluation.task_files import STRING_MATCH, TaskConfig

PREFIX = "ruler_"
SAMPLES = 100
"""Documents per task and length; RULER has 500."""
_LONG = 4096  # tokens from which on common words are 30 times in the list, the others 3 times
_ZETA_2 = 1.6449340668482264
_TRIES = 50

_NOISE = (
    "Rain fell on the roof. The kettle was warm. A clock ticked in the hall. Nobody came by. "
    "The street was quiet."
)


def _split(words: str) -> list[str]:
    return words.split()


_ADJECTIVES = _split(
    "amber ancient bitter bold brave bright brisk calm careful chilly clever crisp curious dark "
    "deep dusty eager early empty faint fair famous fancy fierce firm fresh gentle giant golden "
    "grand green happy heavy hidden hollow honest humble icy idle jolly keen kind late lazy light "
    "little lively lonely loud lucky mellow merry mighty modest narrow neat noble odd pale plain "
    "polite proud purple quick quiet rapid rare rough round royal rusty salty scarlet secret "
    "sharp shiny silent silver simple sleepy slow small smooth soft solid spicy steady stormy "
    "strong sunny sweet swift tall tame thick tidy tiny tough vast velvet warm wild wise witty "
    "young"
)
_NOUNS = _split(
    "acorn anchor apron arrow atlas badge bakery banjo barn basket beacon beetle bell bench "
    "blanket boat bottle bridge broom bucket button cabin cactus camel candle canyon carpet "
    "castle cedar cellar chair cherry circle cliff cloud coat comet copper coral cottage cradle "
    "crane cricket crown cup daisy desert desk dolphin donkey door dragon drum eagle engine "
    "falcon farm feather fence ferry fiddle field flag flute forest fountain fox garden gate "
    "ginger glacier glove goose grape guitar hammer harbor hat hawk hedge helmet hill honey horse "
    "island ivory jacket jar jungle kettle key kite ladder lake lantern lemon library lily lion "
    "lizard lobster magnet maple marble meadow melon mirror monkey moon mountain muffin needle "
    "nest oak ocean olive orchard otter owl paddle palace panda paper parrot peach pebble pencil "
    "pepper piano pigeon pillow pine planet plum pocket pond poppy pumpkin puppet quilt rabbit "
    "raft rainbow ribbon river robin rocket rose saddle sail salmon scarf school seed shadow "
    "shell ship shoe shovel sparrow spider spoon spring squirrel star statue stone sugar swan "
    "table teapot temple tiger tower tractor train tree trumpet tulip tunnel turtle valley vase "
    "village violin wagon walnut walrus water whale wheel willow window wing wolf yarn zebra"
)
_WORDS = [*_ADJECTIVES, *_NOUNS]
_COMPOUNDS = [f"{adjective}-{noun}" for adjective in _ADJECTIVES for noun in _NOUNS]


class Sample(TypedDict):
    """A document of a task: its prompt, and what has to be in the answer."""

    prompt: str
    answers: list[str]


@dataclass(frozen=True)
class _Needles:
    """Key-value sentences hidden among lines; the question is about some of the keys.

    Attributes:
        keys: How many are hidden.
        values: Of each key.
        queries: Keys in the question.
        key_kind: "word" or "uuid".
        value_kind: "number" or "uuid".
        among_needles: Whether the other lines are sentences of the same kind with other keys,
            instead of noise.
    """

    keys: int = 1
    values: int = 1
    queries: int = 1
    key_kind: str = "word"
    value_kind: str = "number"
    among_needles: bool = False

    def sample(self, rng: random.Random, size: int, length: int) -> Sample:
        count = self.keys + (size if self.among_needles else 0)
        keys = _distinct(rng, count, partial(_token, self.key_kind))
        values = _distinct(rng, self.keys * self.values, partial(_token, self.value_kind))
        hidden = {key: values[n :: self.keys] for n, key in enumerate(keys[: self.keys])}
        lines = [
            _sentence(self.value_kind, key, _token(self.value_kind, rng))
            for key in keys[self.keys :]
        ]
        lines = lines or [_NOISE] * size
        needles = [_sentence(self.value_kind, key, v) for key, each in hidden.items() for v in each]
        rng.shuffle(needles)
        _hide(rng, lines, needles)
        asked = rng.sample(keys[: self.keys], self.queries)
        answers = [value for key in asked for value in hidden[key]]
        names = (
            " and ".join(asked) if len(asked) < 3 else f"{', '.join(asked[:-1])}, and {asked[-1]}"
        )
        one = len(answers) == 1
        kind = f"secret {self.value_kind}{'' if one else 's'}"
        text = "\n".join(lines)
        return {
            "prompt": f"The text below hides {'a' if one else 'some'} {kind}. Remember "
            f"{'it' if one else 'them'}: a question follows.\n{text}\nWhich {kind} does the text "
            f"give for {names}? According to the text, the {kind} for {names} "
            f"{'is' if one else 'are'}",
            "answers": answers,
        }


def _variables(rng: random.Random, size: int, length: int) -> Sample:
    """Return one chain of five variables, after an example of a quarter of the length at most."""
    example = _chain(rng, min(size // 8, 12), 3)
    question = _chain(rng, size, 5)
    return {
        "prompt": f"{example['prompt']} {' '.join(example['answers'])}\n\n{question['prompt']}",
        "answers": question["answers"],
    }


def _chain(rng: random.Random, size: int, letters: int) -> Sample:
    names = _distinct(rng, 5, lambda rng: "".join(rng.choices(string.ascii_uppercase, k=letters)))
    value = str(rng.randrange(10_000, 100_000))
    chain = [f"VAR {names[0]} = {value}"]
    chain += [f"VAR {name} = VAR {before}" for before, name in pairwise(names)]
    lines = [_NOISE] * size
    _hide(rng, lines, chain)
    text = "\n".join(lines)
    return {
        "prompt": f"The text below assigns values to variables, some by way of others. Follow the "
        f"assignments.\n\n{text}\n\nQuestion: which variables have the value {value}? Answer: the "
        f"{len(names)} variables that have the value {value} are:",
        "answers": names,
    }


def _common_words(rng: random.Random, size: int, length: int) -> Sample:
    """Return a numbered list with ten common words, after a short one with its answer."""
    if length < _LONG:
        example, question = _word_list(rng, 20, 3, 1), _word_list(rng, 10 + size, 6, 1)
    else:
        example, question = _word_list(rng, 40, 10, 3), _word_list(rng, 10 + size, 30, 3)
    return {
        "prompt": f"{example['prompt']} {_numbered(example['answers'])}\n{question['prompt']}",
        "answers": question["answers"],
    }


def _word_list(rng: random.Random, words: int, common: int, others: int) -> Sample:
    chosen = rng.sample(_WORDS if words <= len(_WORDS) else _COMPOUNDS, words)
    entries = chosen[:10] * common + chosen[10:] * others
    rng.shuffle(entries)
    return {
        "prompt": "Some words are in this numbered list more often than others. Remember those.\n"
        f"{_numbered(entries)}\nQuestion: which 10 words are in the list most often? Answer: the "
        "10 most frequent words of the list are:",
        "answers": chosen[:10],
    }


def _frequent_words(rng: random.Random, size: int, length: int) -> Sample:
    """Return coded words whose counts fall with the square of their rank; dots have the first."""
    ranks = max(5, length // 50)
    names = _distinct(rng, ranks - 1, lambda rng: "".join(rng.choices(string.ascii_lowercase, k=6)))
    counts = [int(size / (_ZETA_2 * rank**2)) for rank in range(1, ranks + 1)]
    entries = [
        word for word, count in zip(["...", *names], counts, strict=True) for _ in range(count)
    ]
    rng.shuffle(entries)
    return {
        "prompt": f"The coded text below repeats some words. Count each. {' '.join(entries)}\n"
        "Question: which three coded words are the most frequent? Dots are no word; give no "
        "reasons. Answer: the three most frequent words of the coded text are:",
        "answers": names[:3],
    }


@dataclass(frozen=True)
class _Task:
    """A task: its generator, tokens to generate, and the fewest units of context.

    The generator takes a source of randomness, units of context, and the length in tokens.
    """

    sample: Callable[[random.Random, int, int], Sample]
    generated: int
    least: int


_HAYSTACKS = {
    "niah_single_1": _Needles(),
    "niah_single_3": _Needles(value_kind="uuid"),
    "niah_multikey_1": _Needles(keys=4),
    "niah_multikey_2": _Needles(among_needles=True),
    "niah_multikey_3": _Needles(key_kind="uuid", value_kind="uuid", among_needles=True),
    "niah_multivalue": _Needles(values=4),
    "niah_multiquery": _Needles(keys=4, queries=4),
}
_TASKS = {f"{PREFIX}{name}": _Task(needles.sample, 128, 1) for name, needles in _HAYSTACKS.items()}
_TASKS |= {
    "ruler_vt": _Task(_variables, 30, 1),
    "ruler_cwe": _Task(_common_words, 120, 10),
    # So many that the fourth and the fifth word differ in number
    "ruler_fwe": _Task(_frequent_words, 50, 74),
}
RULER_TASKS = tuple(_TASKS)


def samples(
    name: str, tokenizer: Any, length: int, *, count: int = SAMPLES, seed: int = 0
) -> list[Sample]:
    """Return documents of a task, as long as they can be.

    Args:
        name: One of RULER_TASKS.
        tokenizer: Of the model.
        length: Tokens of prompt and answer together, at most.
        count: How many.
        seed: Equal seeds give equal documents.

    Raises:
        ConfigError: If not even the shortest document fits.
    """
    task = _TASKS[name]

    def sample(index: int, size: int) -> Sample:
        return task.sample(random.Random(f"{seed} {name} {length} {index}"), size, length)

    def fits(index: int, size: int) -> bool:
        try:
            prompt = sample(index, size)["prompt"]
        except ValueError:  # there are no more different words for so long a text
            return False
        return len(tokenizer.encode(prompt)) + task.generated <= length

    if not fits(0, task.least):
        needed = len(tokenizer.encode(sample(0, task.least)["prompt"])) + task.generated
        raise ConfigError(
            f"tasks: {name} needs contexts of at least {needed} tokens with this tokenizer "
            f"({task.generated} of them for the answer), got {length}; choose longer "
            "context lengths or leave the task out"
        )
    size = task.least
    while fits(0, 2 * size):
        size *= 2
    too_many = 2 * size
    while too_many - size > 1:
        middle = (size + too_many) // 2
        if fits(0, middle):
            size = middle
        else:
            too_many = middle
    try:
        sample(0, size + 1)
    except ValueError as error:
        raise ConfigError(
            f"tasks: {name} has not enough text for contexts of {length} tokens ({error}); choose "
            "shorter context lengths or leave the task out"
        ) from None
    documents = []
    for index in range(count):
        used = size
        while not fits(index, used):
            used -= max(1, used // 50)
            if used < task.least:
                raise ConfigError(
                    f"tasks: {name} does not fit contexts of {length} tokens with this tokenizer; "
                    "choose longer context lengths or leave the task out"
                )
        documents.append(sample(index, used))
    return documents


def string_match(answer: str, expected: Sequence[str]) -> float:
    """Return the share of the expected strings that are in an answer, whatever their case."""
    return sum(one.lower() in answer.lower() for one in expected) / len(expected)


def ruler_configs(
    names: Sequence[str], tokenizer: Any, lengths: Sequence[int], seed: int = 0
) -> list[TaskConfig]:
    """Return the tasks as the harness takes them: `ruler_vt_4096` for each name and length.

    Raises:
        ConfigError: As `samples`, and for an unknown name or no length.
    """
    for name in names:
        if name not in _TASKS:
            raise ConfigError(f"tasks: no {name!r}; there are {', '.join(RULER_TASKS)}")
        if not lengths:
            raise ConfigError(
                f"tasks: {name} is generated at the context lengths that are given; add "
                "--context-lengths 4096,8192 (in a promotion: context_lengths)"
            )
    return [
        _config(f"{name}_{length}", name, samples(name, tokenizer, length, seed=seed))
        for name in names
        for length in lengths
    ]


def _config(title: str, name: str, documents: list[Sample]) -> TaskConfig:
    def dataset(**_: Any) -> dict[str, Any]:
        from datasets import Dataset

        return {"test": Dataset.from_list([dict(document) for document in documents])}

    def score(document: Mapping[str, Any], results: Sequence[str]) -> dict[str, float]:
        printable = re.sub(r"[\x00-\x1f]", "\n", results[0])
        return {STRING_MATCH: string_match(printable, document["answers"])}

    return {
        "task": title,
        "custom_dataset": dataset,
        "test_split": "test",
        "output_type": "generate_until",
        "doc_to_text": "{{prompt}}",
        "doc_to_target": "{{answers}}",
        "target_delimiter": "",
        "process_results": score,
        "metric_list": [{"metric": STRING_MATCH, "aggregation": "mean", "higher_is_better": True}],
        "generation_kwargs": {
            "until": [],
            "max_gen_toks": _TASKS[name].generated,
            "do_sample": False,
        },
        "metadata": {"version": 1.0},
    }


def _token(kind: str, rng: random.Random) -> str:
    if kind == "word":
        return rng.choice(_COMPOUNDS)
    if kind == "uuid":
        return str(uuid.UUID(int=rng.getrandbits(128), version=4))
    return str(rng.randrange(10**6, 10**7))


def _distinct(rng: random.Random, count: int, draw: Callable[[random.Random], str]) -> list[str]:
    found: dict[str, None] = {}
    for _ in range(_TRIES * count):
        if len(found) == count:
            break
        found[draw(rng)] = None
    if len(found) < count:
        raise ValueError(f"there are no {count} different ones, found {len(found)}")
    return list(found)


def _sentence(kind: str, key: str, value: str) -> str:
    return f"The secret {kind} for {key} is {value}."


def _hide(rng: random.Random, lines: list[str], hidden: Sequence[str]) -> None:
    """Insert `hidden` into `lines` in its order, at places that are drawn."""
    places = sorted(rng.sample(range(len(lines) + len(hidden)), len(hidden)))
    for place, line in zip(places, hidden, strict=True):
        lines.insert(place, line)


def _numbered(words: Sequence[str]) -> str:
    return " ".join(f"{number}. {word}" for number, word in enumerate(words, start=1))
