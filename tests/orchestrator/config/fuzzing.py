"""Bad configurations and plans from a seed: a sound record with one thing in it put wrong, and where that is."""

from __future__ import annotations

import copy
import datetime
import math
import random
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

JUNK: tuple[Any, ...] = (
    *(None, True, False, -1, 0, 1, 2**40, -(10**30), 10**30, 1.5, -0.25, math.nan, math.inf, -math.inf),
    *(
        "",
        " ",
        "x",
        "../../elsewhere",
        "/etc/passwd",
        "a\x00b",
        "\ud800",
        "a" * 5000,
        "1e3",
        "${HOME}",
        "a\nb: c",
    ),
    *([], [[]], [None], ["x", "x"], [{}], {}, {"": 1}, {1: 2}, {None: None}, {"a": {"b": []}}),
    *(b"bytes", datetime.date(2026, 1, 1), {1, 2}, (1, 2)),
)
RECIPE_FIELDS = ("grouping", "objective", "similarity", "allocation", "alignment", "fusion", "sharing", "refinement")
MORE_FIELDS = ("composition", "relaxation", "recovery", "together", "by", "params", "name", "source", "wings", "")
KNOBS = (
    *("grouping.iterations", "grouping.equal_sizes", "objective.steps", "relaxation.rate", "relaxation.fraction"),
    *(
        "searcher.chains",
        "searcher.x",
        "refinement.fit_steps",
        "sharing.alpha",
        "grouping",
        "",
        ".",
        "a.b.c",
        "fusion.",
    ),
)
NAMES = ("gqa", "dha", "align", "headfold", "postshare", "dcformer", "asymgqa", "neighbour", "exact", "mean", "none")


@dataclass(frozen=True)
class Bad:
    """A record with a fault at `place` (keys from the top). `sure`: it must be refused, others may be legal."""

    record: Any
    place: tuple[Any, ...]
    sure: bool = False

    @property
    def told(self) -> str:
        return ".".join(str(key) for key in self.place)


def places(record: Any, at: tuple[Any, ...] = ()) -> Iterator[tuple[Any, ...]]:
    """Every place in a record, the sections before what is in them."""
    keys = record if isinstance(record, dict) else range(len(record)) if isinstance(record, list) else ()
    for key in keys:
        yield (*at, key)
        yield from places(record[key], (*at, key))


def put(record: Any, place: tuple[Any, ...], value: Any) -> Any:
    """A copy of the record with another value at a place; `...` takes it away."""
    fresh = copy.deepcopy(record)
    *before, last = place
    node = fresh
    for key in before:
        node = node[key]
    if value is ...:
        del node[last]
    else:
        node[last] = value
    return fresh


def at(record: Any, place: tuple[Any, ...]) -> Any:
    for key in place:
        record = record[key]
    return record


def bad_configs(sound: dict[str, Any], required: tuple[tuple[Any, ...], ...], seed: int) -> Iterator[Bad]:
    """Endlessly: junk somewhere, an unknown key, a required one gone, a choice that cannot be."""
    rng = random.Random(seed)
    everywhere = list(places(sound))
    sections = [place for place in everywhere if isinstance(at(sound, place), dict)]
    fixed = [place for place in sections if place[-1] not in ("search_space", "params", "changes")]
    while True:
        kind = rng.randrange(6)
        if kind == 0:
            place = rng.choice(everywhere)
            old, new = at(sound, place), rng.choice(JUNK)
            sure = isinstance(old, float) and isinstance(new, float) and not math.isfinite(new)
            sure |= isinstance(old, dict) and not isinstance(new, dict) and new is not None
            yield Bad(put(sound, place, new), place, sure)
        elif kind == 1:
            section = rng.choice([(), *fixed])
            near = rng.choice([str(key) for key in at(sound, section)])
            name = rng.choice([near + rng.choice("sxz"), near[:-1] + "q", near.upper(), "__class__", "", "model.path"])
            yield Bad(put(sound, (*section, name), rng.choice(JUNK)), (*section, name), True)
        elif kind == 2:
            place = rng.choice(required)
            yield Bad(put(sound, place, ...), place, True)
        elif kind == 3:
            place = ("search", "recipes", 1, rng.choice(("changes", "params")))
            key = rng.choice((*RECIPE_FIELDS, *MORE_FIELDS) if place[-1] == "changes" else KNOBS)
            yield Bad(put(sound, place, {key: rng.choice((*JUNK, *NAMES))}), place)
        elif kind == 4:
            place = ("search", rng.choice(("search_space", "params")))
            key = rng.choice((*RECIPE_FIELDS, *MORE_FIELDS) if place[-1] == "search_space" else KNOBS)
            value = rng.choice((*JUNK, *NAMES))
            listed = place[-1] == "search_space" and rng.random() < 0.7
            yield Bad(put(sound, place, {key: [value] if listed else value}), place)
        else:
            place, value = rng.choice(
                (
                    (("search", "kv_ratios"), [rng.uniform(-0.2, 1.2)]),
                    (("search", "learning_rates"), [rng.choice((0.0, -1e-3, math.nan, math.inf, "fast"))]),
                    (("rungs", "steps"), [rng.randrange(-2, 9) for _ in range(3)]),
                    (("train", "batch_size"), rng.choice((3, 5, 7, -8, 8.5))),
                    (("train", "zero_stage"), rng.choice((4, -1, "1", 1.5))),
                    (("search", "searcher"), rng.choice(("Optuna", "grid ", "asymgqa", "hyperband"))),
                    (("search", "seeds"), [rng.choice((-1, 1.5, "a", 2**64))]),
                    (("name",), rng.choice(("..", "../x", "a/b", ".hidden", "-x", "a b", "x" * 65, "tür"))),
                    (("promotion", "registered_name"), rng.choice(("../x", "a/b", "", "a:b"))),
                    (("storage",), rng.choice(("gopher://x/y", "/proc/headfold", "", "/dev/null"))),
                    (("model", "path"), rng.choice(("/none", "nobody/none", "a/b/c/d", "/dev/null", "..", "a\x00b"))),
                    (("data", "sequence_length"), rng.choice((1, 0, 4096, 10**9, 2.5))),
                    (("data", "source"), rng.choice(("/none.txt", "a b c", "stdlib:test", "/none", "[", "\x00"))),
                    (("resources", "max_concurrent"), rng.choice((0, -1, "Auto", 1.5, "two"))),
                    (("train", "num_workers"), rng.choice((8, 512, 0, -1))),
                )
            )
            yield Bad(put(sound, place, value), place)


def bad_plans(sound: dict[str, Any], seed: int) -> Iterator[Bad]:
    """Endlessly: a plan's record with junk somewhere, a field too many, one gone, or an index out of order."""
    rng = random.Random(seed)
    everywhere = list(places(sound))
    plain = [value for value in JUNK if not isinstance(value, (bytes, datetime.date, set, tuple))]
    while True:
        kind, place = rng.randrange(3), rng.choice(everywhere)
        if kind == 0:
            value = rng.choice((*plain, rng.randrange(-3, 20), rng.randrange(-3, 20)))
            yield Bad(put(sound, place, value), place)
        elif kind == 1:
            yield Bad(put(sound, place, ...), place)
        else:
            sections = [(), *(p for p in everywhere if isinstance(at(sound, p), dict))]
            section = rng.choice(sections)
            name = rng.choice(("wings", "Layers", "", "heads"))
            yield Bad(put(sound, (*section, name), rng.choice(plain)), (*section, name), True)
