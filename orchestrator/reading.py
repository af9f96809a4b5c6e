"""How a configuration is read: YAML without surprises, overrides, errors that name path, value and what is allowed."""

from __future__ import annotations

import difflib
import itertools
import reprlib
import types
import typing
from collections.abc import Iterable, Mapping, Sequence
from typing import Annotated, Any, TypeVar

import yaml
from pydantic import BaseModel, ValidationError

DEEPEST, MOST = 32, 20_000
"""Levels and values of a configuration: one of more is no configuration, or unfolds to one by YAML's references."""


class ConfigError(ValueError):
    """A configuration that cannot be run. The message names key, value and remedy."""


Parsed = TypeVar("Parsed", bound=BaseModel)


class _Loader(yaml.SafeLoader):
    """YAML's safe loader, which takes the last of two equal keys without a word; this one refuses them."""

    def construct_mapping(self, node: Any, deep: bool = False) -> dict[Any, Any]:
        seen: set[str] = set()
        for key, _ in node.value:
            if isinstance(key, yaml.ScalarNode) and key.value in seen:
                raise yaml.constructor.ConstructorError(None, None, f"{key.value} is given twice", key.start_mark)
            seen.add(str(key.value) if isinstance(key, yaml.ScalarNode) else "")
        return super().construct_mapping(node, deep)


def read_yaml(text: str) -> Any:
    """The value of a YAML text, plain values only. Raises ValueError that names the place."""
    try:
        return yaml.load(text, Loader=_Loader)
    except yaml.YAMLError as error:
        raise ValueError(str(error)) from None
    except Exception as error:  # e.g. !!int "", 2026-99-99: its constructors raise what they happen to meet
        raise ValueError(f"a value cannot be read ({type(error).__name__}: {str(error)[:200]})") from None


def apply_override(record: dict[str, Any], override: str) -> None:
    """Set one `section.key=value` in place. Raises ConfigError if it has no `=` or walks through a plain value."""
    key, equals, text = override.partition("=")
    if not equals or not key:
        raise ConfigError(f"an override must read key=value, e.g. search.samples=4, got {shown(override)}")
    *parents, last = parts = key.strip().split(".")
    if not all(parts):
        raise ConfigError(f"an override's key reads like search.samples, got {shown(override)}")
    node = record
    for depth, parent in enumerate(parents):
        if node.get(parent) is None:
            node[parent] = {}
        node = node[parent]
        if not isinstance(node, dict):
            raise ConfigError(f"override {shown(override)}: {'.'.join(parents[: depth + 1])} is a value, not a section")
    try:
        node[last] = read_yaml(text)
    except ValueError as error:
        raise ConfigError(f"{key.strip()}: the value {shown(text)} is not valid YAML: {error}") from None


def parse_section(section: type[Parsed], record: Mapping[str, Any], where: str) -> Parsed:
    """Validate a mapping as a section. Raises ConfigError with one line for each wrong key."""
    _check_size(record, where)
    try:
        return section.model_validate(record)
    except ValidationError as error:
        lines = [_explain(item, section) for item in error.errors(include_url=False)]
        raise ConfigError(
            f"{where} cannot be used:\n" + "\n".join(f"  {line}" for line in dict.fromkeys(lines))
        ) from None


def _check_size(record: Any, where: str) -> None:
    """Refuse what is too deep or too large to be looked at; a few lines of YAML can refer to themselves."""
    left = [(record, "", 0)]
    for number in itertools.count():
        if not left:
            return
        value, path, depth = left.pop()
        if depth > DEEPEST or number > MOST:
            top = ".".join(path.split(".")[:3])
            raise ConfigError(f"{where} cannot be used:\n  {top}: more than {DEEPEST} levels or {MOST} values")
        inner = value.items() if isinstance(value, dict) else enumerate(value) if isinstance(value, list) else ()
        left += [(one, f"{path}.{key}".lstrip("."), depth + 1) for key, one in inner]


def shown(value: Any) -> str:
    """A value for a message, cut where it is long."""
    short = reprlib.Repr()
    short.maxstring = short.maxother = short.maxlong = 120
    return short.repr(value)


def cut(message: Any) -> str:
    """What a part below says of a value, without all of a long one."""
    text = str(message)
    return text if len(text) <= 800 else f"{text[:500]} ... {text[-200:]}"


def _explain(item: Any, root: type[BaseModel]) -> str:
    place = [part for part in item["loc"] if part not in ("literal['auto']", "constrained-int")]
    path = ".".join(shown(part) if part == "" or not isinstance(part, (str, int)) else str(part) for part in place)
    if item["type"] == "extra_forbidden":
        allowed = sorted(_fields_at(place[:-1], root))
        return f"{path}: unknown key{_suggest(str(place[-1]), allowed)}; allowed here: {', '.join(allowed)}"
    if item["type"] == "missing":
        return f"{path}: required, but not given"
    message = item["msg"].removeprefix("Value error, ")
    return f"{path}: got {shown(item['input'])}; {message[:1].lower()}{message[1:]}"


def _suggest(word: str, allowed: Sequence[str]) -> str:
    close = difflib.get_close_matches(word, allowed, n=1)
    return f" (did you mean {close[0]}?)" if close else ""


def _fields_at(place: Sequence[Any], root: type[BaseModel]) -> Iterable[str]:
    """Field names of the section at a path of keys and list positions."""
    model: Any = root
    for part in place:
        if isinstance(part, int):
            continue  # an entry of a list of sections, whose annotation was looked into already
        field = model.model_fields.get(part) if hasattr(model, "model_fields") else None
        if field is None:
            return ()
        model = _model_in(field.annotation)
    return getattr(model, "model_fields", {})


def _model_in(annotation: Any) -> Any:
    """The section that an annotation is of: itself, in a list, annotated, or the first one of a union."""
    if hasattr(annotation, "model_fields"):
        return annotation
    origin, inner = typing.get_origin(annotation), typing.get_args(annotation)
    if origin is Annotated or origin is list:
        return _model_in(inner[0])
    if origin in (typing.Union, types.UnionType):
        return next((found for found in map(_model_in, inner) if found is not None), None)
    return None
