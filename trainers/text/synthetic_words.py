"""Words and sentences of the synthetic tasks.

The subjects of the contexts, and the statements about them.

All of it is written for this project; Xiao 2024 (App. F) gives only the idea and a few examples.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass


def _split(words: str) -> tuple[str, ...]:
    return tuple(words.split())


PEOPLE = _split(
    "Anna Boris Clara David Elena Felix Greta Hugo Irene Jonas Karin Leon Marta Nils Olga Peter "
    "Rosa Simon Tessa Viktor"
)


@dataclass(frozen=True)
class WordDomain:
    """A kind of things.

    `transformations`: phrase that requests it -> answer of every item, by name. `copy` is always
    among them.

    Attributes:
        classes: Class -> its items.
        statement: Of a person and an item.
        listing: Of items alone.
        other_class: Names what is outside a class ("" if no class may be requested).
    """

    name: str
    classes: Mapping[str, tuple[str, ...]]
    statement: str
    listing: str
    other_class: str
    phrases: Mapping[str, str]
    answers: Mapping[str, Mapping[str, str]]

    @property
    def items(self) -> tuple[str, ...]:
        return tuple(item for members in self.classes.values() for item in members)


def _domain(
    name: str,
    classes: Mapping[str, str],
    statement: str,
    listing: str,
    other_class: str,
    questions: Mapping[str, tuple[str, Mapping[str, str]]],
) -> WordDomain:
    members = {key: tuple(words.split()) for key, words in classes.items()}
    items = [item for words in members.values() for item in words]
    phrases = {"copy": "the word was"} | {key: phrase for key, (phrase, _) in questions.items()}
    answers = {"copy": {item: item for item in items}} | {
        key: table for key, (_, table) in questions.items()
    }
    return WordDomain(name, members, statement, listing, other_class, phrases, answers)


_THINGS = {
    "fruit": "apple pear plum grape lemon cherry",
    "clothing": "coat hat scarf glove sock belt",
    "transport": "van truck tractor bus taxi jeep",
    "livestock": "horse goat duck rabbit donkey hen",
    "music": "flute violin drum harp cello trumpet",
}
_USES = {
    "fruit": "eat",
    "clothing": "wear",
    "transport": "drive",
    "livestock": "feed",
    "music": "play",
}
_TOWNS = {
    "Norway": "Oslo Bergen Trondheim",
    "Kenya": "Nairobi Mombasa Kisumu",
    "Chile": "Santiago Valparaiso Arica",
    "Poland": "Warsaw Krakow Gdansk",
    "Vietnam": "Hanoi Haiphong Hue",
    "Egypt": "Cairo Luxor Aswan",
    "Peru": "Lima Cusco Arequipa",
    "Portugal": "Lisbon Porto Braga",
}
_OPPOSITES = _split(
    "warm cold tall short rich poor loud quiet wet dry fast slow old young full empty sharp blunt "
    "early late "
    "strong weak brave timid"
)
_COUNT = _split(
    "one two three four five six seven eight nine ten eleven twelve thirteen fourteen fifteen "
    "sixteen seventeen "
    "eighteen nineteen twenty"
)


def _inverse(classes: Mapping[str, str]) -> dict[str, str]:
    return {item: name for name, words in classes.items() for item in words.split()}


DOMAINS: dict[str, WordDomain] = {
    domain.name: domain
    for domain in (
        _domain(
            "thing",
            _THINGS,
            "{person} packed the {item}.",
            "On the table: {items}.",
            "that has nothing to do with {name}",
            {
                "superclass": ("it has to do with", _inverse(_THINGS)),
                "use": (
                    "it is something to",
                    {item: _USES[name] for item, name in _inverse(_THINGS).items()},
                ),
            },
        ),
        _domain(
            "town",
            _TOWNS,
            "{person} moved to {item}.",
            "On the map: {items}.",
            "outside {name}",
            {"country": ("it lies in", _inverse(_TOWNS))},
        ),
        _domain(
            "quality",
            {"quality": " ".join(_OPPOSITES)},
            "{person} felt {item}.",
            "On the chart: {items}.",
            "",
            {
                "opposite": (
                    "its opposite is",
                    {word: _OPPOSITES[place ^ 1] for place, word in enumerate(_OPPOSITES)},
                )
            },
        ),
        _domain(
            "number",
            {"odd": " ".join(_COUNT[2:-1:2]), "even": " ".join(_COUNT[1:-1:2])},
            "{person} counted {item}.",
            "On the board: {items}.",
            "that is not {name}",
            {
                "previous": (
                    "one less is",
                    {word: _COUNT[i - 1] for i, word in enumerate(_COUNT) if 0 < i < 19},
                ),
                "next": (
                    "one more is",
                    {word: _COUNT[i + 1] for i, word in enumerate(_COUNT) if 0 < i < 19},
                ),
            },
        ),
    )
}
