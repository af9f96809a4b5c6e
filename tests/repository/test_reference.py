"""Generated parts of docs/ are current: references of configuration and commands, the schema for editors."""

from __future__ import annotations

import json
import runpy
from pathlib import Path
from typing import Any

import jsonschema
import pytest
import yaml
from typer.main import get_command

from orchestrator.config.schema import SearchConfig
from orchestrator.main import app

REPOSITORY = Path(__file__).resolve().parents[2]
DOCS = REPOSITORY / "docs"
WRITTEN: dict[str, str] = runpy.run_path(str(DOCS / "reference.py"))["pages"]()
SCHEMA = json.loads(WRITTEN["config.schema.json"])


@pytest.mark.parametrize("name", WRITTEN)
def test_the_file_is_current(name: str) -> None:
    assert (DOCS / name).read_text() == WRITTEN[name], "run `python docs/reference.py`"


def keys_without_meaning(model: Any, path: str = "") -> list[str]:
    missing = []
    for name, field in model.model_fields.items():
        inner = [
            a for a in (field.annotation, *getattr(field.annotation, "__args__", ())) if hasattr(a, "model_fields")
        ]
        if not field.description and not inner:
            missing.append(f"{path}{name}")
        missing += [key for section in inner for key in keys_without_meaning(section, f"{path}{name}.")]
    return missing


def test_every_key_and_option_has_a_meaning() -> None:
    assert keys_without_meaning(SearchConfig) == []
    verbs = get_command(app).commands  # type: ignore[attr-defined]
    without = [f"{name} {p.name}" for name, verb in verbs.items() for p in verb.params if not p.help]
    assert without == []
    for name, verb in verbs.items():
        assert f"\n## {name}\n" in WRITTEN["reference/commands.md"]
        for option in (option for p in verb.params if p.param_type_name == "option" for option in p.opts):
            assert f"`{option}" in WRITTEN["reference/commands.md"]


@pytest.mark.parametrize("file", sorted((REPOSITORY / "configs").rglob("*.yaml")), ids=lambda file: file.name)
def test_the_schema_accepts_our_configurations(file: Path) -> None:
    jsonschema.validate(yaml.safe_load(file.read_text()), SCHEMA)


@pytest.mark.parametrize(
    ("changed", "wrong"),
    [
        ({"search": {"kv_ratiox": [0.5]}}, "kv_ratiox"),
        ({"train": {"zero_stage": 4}}, "4"),
        ({"train": {"num_workers": "many"}}, "many"),
        ({"search": {"target": "onnx"}}, "onnx"),
        ({"model": {}}, "path"),
    ],
)
def test_the_schema_refuses(changed: dict[str, Any], wrong: str) -> None:
    record = yaml.safe_load((REPOSITORY / "configs" / "demo.yaml").read_text()) | changed
    with pytest.raises(jsonschema.ValidationError, match=wrong):
        jsonschema.validate(record, SCHEMA)


@pytest.mark.parametrize(
    "changed",
    [{"train": {"num_workers": [2, 8], "dtype": "bf16"}}, {"search": {"target": "llama.cpp", "kv_heads": [4]}}],
)
def test_the_schema_takes_short_forms(changed: dict[str, Any]) -> None:
    jsonschema.validate(yaml.safe_load((REPOSITORY / "configs" / "demo.yaml").read_text()) | changed, SCHEMA)
