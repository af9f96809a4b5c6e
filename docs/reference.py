"""Write the pages of docs/ that the code determines: the references of the configuration, of the commands and of the
parts of recipes, the JSON schema for editors, the table of supported families, and the configurations of public models.

    python docs/reference.py

`make docs` runs it, and `tests/repository/test_reference.py` checks that the pages are current.
"""

from __future__ import annotations

import importlib
import inspect
import json
import os
import re
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import yaml

DOCS = Path(__file__).resolve().parent
sys.path[:0] = [str(DOCS.parent), str(DOCS)]

from model_configs import model_configs  # noqa: E402
from support import recipe_table, table, with_table  # noqa: E402
from typer.main import get_command  # noqa: E402

from attention.axes import AUTO_KNOB, Knob  # noqa: E402
from orchestrator.config.schema import SearchConfig  # noqa: E402
from orchestrator.main import app  # noqa: E402
from search_spaces.recipes.recipe import AXES  # noqa: E402

LIMITS = {"minimum": "at least", "exclusiveMinimum": "above", "maximum": "at most", "exclusiveMaximum": "below"}


# ---- configuration -------------------------------------------------------------------------------------------------


def schema() -> dict[str, Any]:
    """Return the JSON Schema of a configuration file, for editors."""
    made = SearchConfig.model_json_schema()
    return {"$schema": "https://json-schema.org/draft/2020-12/schema", **_plain(made), "title": "Headfold search"}


def _plain(value: Any) -> Any:
    """Without titles that only repeat keys, and descriptions in one line."""
    if isinstance(value, list):
        return [_plain(one) for one in value]
    if not isinstance(value, dict):
        return value
    kept = {key: _plain(one) for key, one in value.items() if not (key == "title" and isinstance(one, str))}
    if isinstance(kept.get("description"), str):
        kept["description"] = _line(kept["description"])
    return kept


def _line(text: str) -> str:
    return re.sub(r"\s+", " ", text).strip()


def config_page() -> str:
    """A table of keys for each section."""
    whole = schema()
    parts = ["# Configuration reference\n"]
    parts.append(
        "<!-- written by docs/reference.py from orchestrator/config/ and trainers/settings.py; do not edit -->\n\n"
        "Every key of a search's YAML file. A key can be given on the command line as well, as `section.key=value`. "
        "Unknown keys are refused; *none* is `null` in YAML. `headfold init MODEL` writes a first file; its first line "
        "names the [schema](../config.schema.json), by which editors complete and check keys.\n"
    )
    for path, section in _sections(whole, whole, ""):
        parts.append(f"## {path or 'The file'}\n\n{_line(section.get('description', ''))}\n")
        parts.append("| key | default | allowed | meaning |\n|---|---|---|---|")
        for name, key in section["properties"].items():
            needed = name in section.get("required", ())
            allowed, inner = _allowed(key, whole), _section_of(key, whole)
            default = "required" if needed else "its defaults" if inner and path == "" else _value(key.get("default"))
            meaning = _line(key.get("description") or (inner or {}).get("description", ""))
            where = f"{path}.{name}" if path else name
            linked = f"[`{name}`](#{_anchor(where)})" if inner else f"`{name}`"
            parts.append(_row(linked, default, allowed, meaning))
        parts.append("")
    return "\n".join(parts).rstrip() + "\n"


def _sections(section: dict[str, Any], whole: dict[str, Any], path: str) -> Iterator[tuple[str, dict[str, Any]]]:
    """Each section by its path, from the outermost inwards; those of one kind under each name."""
    yield path, section
    for name, key in section["properties"].items():
        inner = _section_of(key, whole)
        if inner is not None:
            yield from _sections(inner, whole, f"{path}.{name}" if path else name)


def _section_of(key: dict[str, Any], whole: dict[str, Any]) -> dict[str, Any] | None:
    """The section that a key holds, by itself or in a list."""
    for one in (key, *key.get("anyOf", ()), key.get("items", {}), *key.get("items", {}).get("anyOf", ())):
        if isinstance(one, dict) and "$ref" in one:
            found = whole["$defs"][one["$ref"].rpartition("/")[2]]
            return found if "properties" in found else None
    return None


def _allowed(key: dict[str, Any], whole: dict[str, Any]) -> str:
    if "anyOf" in key:
        return " or ".join(dict.fromkeys(_allowed(one, whole) for one in key["anyOf"]))
    if "$ref" in key:
        return "a section" if _section_of(key, whole) else "any value"
    if "enum" in key:
        return ", ".join(f"`{_bare(one)}`" for one in key["enum"])
    if "const" in key:
        return f"`{_bare(key['const'])}`"
    kinds = key.get("type", "any value")
    names = [_kind(kind, key, whole) for kind in ([kinds] if isinstance(kinds, str) else kinds)]
    limits = [f"{words} {key[limit]:g}" for limit, words in LIMITS.items() if limit in key]
    return ", ".join([" or ".join(names), *limits])


def _kind(kind: str, key: dict[str, Any], whole: dict[str, Any]) -> str:
    if kind == "array":
        return f"list of: {_allowed(key.get('items', {}), whole)}"
    words = {"string": "text", "integer": "whole number", "number": "number", "boolean": "true, false", "null": "none"}
    return words.get(kind, "keys and values" if kind == "object" else kind)


def _bare(value: Any) -> str:
    return yaml.safe_dump(value).removesuffix("\n...\n").strip()


def _value(value: Any) -> str:
    if value is None:
        return "none"
    if isinstance(value, list) and all(isinstance(one, dict) and one.get("recipe") for one in value) and value:
        value = [one["recipe"] for one in value]
    if isinstance(value, dict):
        value = {name: one for name, one in value.items() if one is not None}
    return f"`{json.dumps(value).replace(chr(34), '')}`"


def _row(*cells: str) -> str:
    return "| " + " | ".join(cell.replace("|", "\\|") for cell in cells) + " |"


def _anchor(heading: str) -> str:
    """As GitHub and Python-Markdown make it of a heading."""
    return heading.lower().replace(".", "")


# ---- commands ------------------------------------------------------------------------------------------------------


def commands_page() -> str:
    """A section for each verb, with a table of its arguments and options."""
    command = get_command(app)
    parts = [
        "# Command reference\n",
        "<!-- written by docs/reference.py from orchestrator/config/options.py; do not edit -->\n",
        "`headfold VERB`, or in a checkout `python -m orchestrator.main VERB`. Exit codes: 0 done, 1 the work "
        "failed, 2 a mistake in the command or its input, 130 interrupted. `headfold --install-completion` adds "
        "completion to your shell, `headfold --version` prints the version.\n",
    ]
    for name, verb in command.commands.items():  # type: ignore[attr-defined]
        arguments = [p for p in verb.params if p.param_type_name == "argument"]
        usage = " ".join([f"headfold {name}", *(_metavar(p) for p in arguments), "[OPTIONS]"])
        parts.append(f"## {name}\n\n{_line(inspect.cleandoc(verb.help or ''))}\n\n```text\n{usage}\n```\n")
        parts.append("| argument or option | default | meaning |\n|---|---|---|")
        parts += [_row(_names(p), _default(p), _line(p.help or "")) for p in verb.params]  # type: ignore[attr-defined]
        parts.append("")
    return "\n".join(parts).rstrip() + "\n"


def _metavar(parameter: Any) -> str:
    name = parameter.metavar or parameter.name.upper()
    return name if parameter.required or name.startswith("[") else f"[{name}]"


def _names(parameter: Any) -> str:
    if parameter.param_type_name == "argument":
        return f"`{_metavar(parameter)}`"
    names = [*parameter.opts, *parameter.secondary_opts]
    value = "" if parameter.is_flag else f" {parameter.metavar or _type(parameter)}"
    return ", ".join(f"`{name}{value}`" for name in names)


def _type(parameter: Any) -> str:
    return {int: "N", float: "X", Path: "PATH"}.get(parameter.type_descriptor.annotation, "TEXT")


def _default(parameter: Any) -> str:
    if parameter.required:
        return "required"
    if parameter.default is None or parameter.default is False or parameter.default in ((), []):
        return ""
    return f"`{str(parameter.default).lower() if parameter.is_flag else parameter.default}`"


# ---- parts ---------------------------------------------------------------------------------------------------------


def parts_page() -> str:
    """A section for each axis of a recipe, with its parts and their settings."""
    sections = [
        "# Parts of recipes\n",
        "<!-- written by docs/reference.py from the parts' own files; do not edit -->\n",
        "A recipe chooses one part on each axis. `--set AXIS=PART` changes that of a conversion and `--set "
        "AXIS.SETTING=VALUE` a setting; in a search's configuration it is `changes: {AXIS: PART}` of an arm, and "
        "`params: {AXIS.SETTING: VALUE}`. Not all parts can be combined: what cannot is refused with the "
        "reason.\n",
    ]
    for axis in AXES.values():
        about = _first(importlib.import_module(axis.package).__doc__)
        rows = [_row(f"`{part.name}`", _first(part.function.__doc__), part.source) for part in axis]
        sections.append(f"## {axis.name}\n\n{about}\n\n| part | what it does | source |\n|---|---|---|")
        sections += [*rows, ""]
        settings: dict[Knob, list[str]] = {}
        for part in axis:
            for knob in part.knobs:
                settings.setdefault(knob, []).append(f"`{part.name}`")
        if settings:
            sections.append("| setting | of | default | allowed | meaning |\n|---|---|---|---|---|")
            sections += [_setting(axis.name, knob, of) for knob, of in settings.items()]
            sections.append("")
    return "\n".join(sections).rstrip() + "\n"


def _setting(axis: str, knob: Knob, of: list[str]) -> str:
    allowed = ", ".join(f"`{_bare(choice)}`" for choice in knob.choices)
    if knob.kind == "bool":
        allowed = "`true`, `false`"
    elif knob.kind != "choice":
        allowed = f"at least {knob.low:g}" if knob.high is None else f"{knob.low:g} to {knob.high:g}"
        allowed += f", `{AUTO_KNOB}`" if knob.auto else ""
    default = f"{knob.default:g}" if isinstance(knob.default, float) else _bare(knob.default)
    return _row(f"`{axis}.{knob.name}`", ", ".join(of), f"`{default}`", allowed, knob.doc)


def _first(docstring: str | None) -> str:
    """The first paragraph of a docstring, in one line."""
    return _line((docstring or "").split("\n\n")[0])


# ---- notebook ------------------------------------------------------------------------------------------------------


def notebook() -> str:
    """The page of the Python functions as a notebook: text and code in turn, without what the code prints."""
    page = (DOCS / "python.md").read_text(encoding="utf-8")
    page = re.sub(r"```text\n.*?```\n", "", page, flags=re.DOTALL)
    page = re.sub(r"\[([^\]]+)\]\((?!https?:|#)([^)]+)\)", r"\1 (docs/\2)", page)
    cells = []
    for number, part in enumerate(re.split(r"```python\n(.*?)```\n", page, flags=re.DOTALL)):
        source = part.strip().splitlines(keepends=True)
        kind: dict[str, Any] = {"cell_type": "markdown"}
        if number % 2:
            kind = {"cell_type": "code", "execution_count": None, "outputs": []}
        if source:
            cells.append({**kind, "id": f"cell-{number}", "metadata": {}, "source": source})
    kernel = {"kernelspec": {"display_name": "Python 3", "language": "python", "name": "python3"}}
    return json.dumps({"cells": cells, "metadata": kernel, "nbformat": 4, "nbformat_minor": 5}, indent=1) + "\n"


# ---- all -----------------------------------------------------------------------------------------------------------


def pages() -> dict[str, str]:
    """Content of each file by its path in docs/."""
    return {
        "config.schema.json": json.dumps(schema(), indent=1, ensure_ascii=False) + "\n",
        "reference/config.md": config_page(),
        "reference/commands.md": commands_page(),
        "reference/parts.md": parts_page(),
        "python.ipynb": notebook(),
        **model_configs(),
        "families.md": with_table((DOCS / "families.md").read_text(encoding="utf-8"), table()),
        "../README.md": with_table((DOCS / "../README.md").read_text(encoding="utf-8"), recipe_table()),
    }


if __name__ == "__main__":
    os.environ.setdefault("COLUMNS", "200")
    for name, content in pages().items():
        (DOCS / name).parent.mkdir(parents=True, exist_ok=True)
        (DOCS / name).write_text(content, encoding="utf-8")
        print(f"wrote docs/{name}")
