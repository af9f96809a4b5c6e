"""Reading of a configuration: plain YAML, overrides, errors that name path, value and remedy."""

from __future__ import annotations

import re
import reprlib
import types
import typing
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Annotated, Any, TypeVar

import yaml
from pydantic import BaseModel, ValidationError

from attention.base.messages import did_you_mean, reason
from attention.cache_formats import CacheFormatError, CachePair

_MOST_LINES = 12  # mistakes of one file that a message lists
IN_WORDS = {
    "model_type": "expected a section, with its own keys and values",
    "dict_type": "expected keys and values",
    "list_type": "expected a list, e.g. [0.5, 0.25]",
    "too_short": "expected at least 1 value",
}

NUMBERS = re.compile("[0-9.%, ]+")
BY_COMMA = "several values of one option are separated by a comma, e.g. --kv-ratio 0.5,0.25"


class ConfigError(ValueError):
    """A configuration that cannot be run. The message names key, value and remedy."""


def read_cache_format(text: str) -> CachePair:
    """Return the formats of a KV cache. Raises ConfigError for what no engine holds."""
    try:
        return CachePair.parse(text)
    except CacheFormatError as error:
        raise ConfigError(f"cache_format: {error}") from None


Parsed = TypeVar("Parsed", bound=BaseModel)


class _Loader(yaml.SafeLoader):
    """YAML's safe loader; it refuses two equal keys, where the original takes the last of them."""

    def construct_mapping(self, node: Any, deep: bool = False) -> dict[Any, Any]:
        seen: set[str] = set()
        for key, _ in node.value:
            if isinstance(key, yaml.ScalarNode) and key.value in seen:
                raise yaml.constructor.ConstructorError(
                    None, None, f"{key.value} is given twice", key.start_mark
                )
            seen.add(str(key.value) if isinstance(key, yaml.ScalarNode) else "")
        return super().construct_mapping(node, deep)


class _Dumper(yaml.SafeDumper):
    """Writes what `_Loader` reads back as it is."""


# YAML 1.1 takes 1e-4 for text; JSON, Python and YAML 1.2 for a number
_EXPONENT = re.compile(r"[-+]?[0-9]+(\.[0-9]*)?[eE][-+]?[0-9]+$")
for _kind in (_Loader, _Dumper):
    _kind.add_implicit_resolver("tag:yaml.org,2002:float", _EXPONENT, "-+0123456789")


def dump_yaml(value: Any, *, one_line: bool = False) -> str:
    """Return plain values as a YAML text that `read_yaml` reads back, in their order."""
    style: Any = {"default_flow_style": True, "width": 1_000_000} if one_line else {}
    return yaml.dump(value, Dumper=_Dumper, sort_keys=False, **style)


def read_yaml(text: str) -> Any:
    """Return the value of a YAML text, plain values only.

    Raises:
        ValueError: That names the position.
    """
    try:
        return yaml.load(text, Loader=_Loader)
    except yaml.YAMLError as error:
        raise ValueError(str(error)) from None
    except Exception as error:  # e.g. !!int "", 2026-99-99: its constructors raise all kinds
        raise ValueError(
            f"a value cannot be read ({type(error).__name__}: {reason(error)})"
        ) from None


def read_sections(file: Path, problem: str = "is not valid YAML") -> dict[str, Any]:
    """Return the sections in a YAML file, not checked any further.

    Raises:
        ConfigError: If there are none; the message names the file and the `problem`.
    """
    try:
        record = read_yaml(file.read_text(encoding="utf-8"))
    except (ValueError, OSError) as error:
        raise ConfigError(f"{file} {problem}: {error}") from None
    if not isinstance(record, dict):
        raise ConfigError(f"{file} must hold a mapping of sections, got {type(record).__name__}")
    return record


def read_override(override: str, example: str = "search.num_samples=4") -> tuple[str, Any]:
    """Key and value of `section.key=value`. Raises ConfigError for anything else."""
    key, equals, text = override.partition("=")
    key = key.strip()
    if not equals or not key:
        raise ConfigError(f"an override must read key=value, e.g. {example}, got {shown(override)}")
    if not all(key.split(".")):
        raise ConfigError(
            f"an override's key reads like {example.partition('=')[0]}, got {shown(override)}"
        )
    try:
        return key, read_yaml(text)
    except ValueError as error:
        raise ConfigError(f"{key}: the value {shown(text)} is not valid YAML: {error}") from None


def apply_override(record: dict[str, Any], override: str) -> None:
    """Set one `section.key=value` in place.

    Raises ConfigError if it has no `=` or walks through a plain value.
    """
    key, value = read_override(override)
    *parents, last = key.split(".")
    node = record
    for depth, parent in enumerate(parents):
        if node.get(parent) is None:
            node[parent] = {}
        node = node[parent]
        if not isinstance(node, dict):
            raise ConfigError(
                f"override {shown(override)}: {'.'.join(parents[: depth + 1])} is a value, not a "
                "section"
            )
    node[last] = value


def parse_section(section: type[Parsed], record: Mapping[str, Any], where: str) -> Parsed:
    """Validate a mapping as a section. Raises ConfigError with one line for each wrong key."""
    try:
        return section.model_validate(record)
    except ValidationError as error:
        lines = list(
            dict.fromkeys(_explain(item, section) for item in error.errors(include_url=False))
        )
        if len(lines) > _MOST_LINES:
            lines[_MOST_LINES:] = [f"and {len(lines) - _MOST_LINES} more"]
        raise ConfigError(
            f"{where} cannot be used:\n" + "\n".join(f"  {line}" for line in lines)
        ) from None


def shown(value: Any) -> str:
    """Return a value as messages show it, cut where it is long."""
    short = reprlib.Repr()
    short.maxstring = short.maxother = short.maxlong = 120
    return short.repr(value)


def _explain(item: Any, root: type[BaseModel]) -> str:
    location = [part for part in item["loc"] if part not in ("literal['auto']", "constrained-int")]
    path = ".".join(
        shown(part) if part == "" or not isinstance(part, (str, int)) else str(part)
        for part in location
    )
    if item["type"] == "extra_forbidden":
        allowed = sorted(_fields_at(location[:-1], root))
        return (
            f"{path}: unknown key{did_you_mean(str(location[-1]), allowed)}; allowed here: "
            f"{', '.join(allowed)}"
        )
    if item["type"] == "missing":
        return f"{path}: required, but not given"
    message: str = IN_WORDS.get(item["type"]) or item["msg"].removeprefix("Value error, ")
    if item["type"] == "literal_error":
        message += did_you_mean(item["input"], re.findall("'(.*?)'", item["ctx"]["expected"]))
    message = f"{message[:1].lower()}{message[1:]}"
    # Of the section as a whole the values are in the message
    return f"{path}: got {shown(item['input'])}; {message}" if path else message


def _fields_at(location: Sequence[Any], root: type[BaseModel]) -> Iterable[str]:
    """Field names of the section at a path of keys and list positions."""
    model: Any = root
    for part in location:
        if isinstance(part, int):
            continue  # an entry of a list of sections, whose annotation was looked into already
        field = model.model_fields.get(part) if hasattr(model, "model_fields") else None
        if field is None:
            return ()
        model = _model_in(field.annotation)
    return getattr(model, "model_fields", {})


def _model_in(annotation: Any) -> Any:
    """Return the section of an annotation: it, or the first in a list, union or Annotated."""
    if hasattr(annotation, "model_fields"):
        return annotation
    origin, inner = typing.get_origin(annotation), typing.get_args(annotation)
    if origin is Annotated or origin is list:
        return _model_in(inner[0])
    if origin in (typing.Union, types.UnionType):
        return next((section for section in map(_model_in, inner) if section is not None), None)
    return None
