"""The configuration: what it refuses, and what the refusal says."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import yaml

from orchestrator.config.parsing import dump_yaml, read_yaml
from orchestrator.config.schema import ConfigError, parse_config, read_search_config

REPOSITORY = Path(__file__).resolve().parents[3]
GOOD: dict[str, Any] = {
    "name": "small",
    "model": {"path": "examples/stdlib-llama"},
    "search": {"recipes": ["gqa", "headfold"], "kv_ratios": [0.5, 0.25]},
}


def with_value(path: str, value: Any) -> dict[str, Any]:
    """GOOD with one dotted key set."""
    record = yaml.safe_load(yaml.safe_dump(GOOD))
    *parents, last = path.split(".")
    node = record
    for parent in parents:
        node = node.setdefault(parent, {})
    node[last] = value
    return record


@pytest.mark.parametrize(
    ("path", "value", "message"),
    [
        ("serach", {}, ["serach", "unknown key", "did you mean search?"]),
        ("search.kv_ratois", [0.5], ["search.kv_ratois", "did you mean kv_ratios?", "recipes"]),
        ("train.lerning_rate", 1e-3, ["train.lerning_rate", "did you mean learning_rate?"]),
        ("data.train", {"tokens": 5, "sorce": "x"}, ["data.train.sorce", "did you mean source?"]),
        ("search.kv_ratios", [0.5, 0], ["search.kv_ratios.1", "got 0", "(0, 1)"]),
        ("search.kv_ratios", [1.5], ["search.kv_ratios.0", "got 1.5", "(0, 1)"]),
        ("search.kv_ratios", [-0.25], ["search.kv_ratios.0", "got -0.25", "(0, 1)"]),
        ("search.kv_ratios", [float("nan")], ["search.kv_ratios.0", "(0, 1)"]),
        ("search.kv_ratios", [0.5, 0.5], ["search.kv_ratios", "0.5 more than once"]),
        ("search.kv_ratios", [], ["search.kv_ratios", "at least 1"]),
        ("search.kv_heads", [4], ["search.kv_heads", "got [4]", "not both"]),
        ("search.kv_heads", [0], ["search.kv_heads.0", "got 0", "greater than 0"]),
        ("search.kv_heads", [2.5], ["search.kv_heads.0", "got 2.5", "integer"]),
        (
            "search.recipes",
            [{"recipe": "gqa", "kv_ratios": [0.5], "kv_heads": [4]}],
            ["search.recipes.0.kv_heads", "not both"],
        ),
        ("search.recipes", ["gqa", "gqa"], ["search.recipes", "'gqa' more than once"]),
        ("search.learning_rates", [-1.0], ["search.learning_rates.0", "got -1.0", "greater than 0"]),
        ("rungs.steps", [5, 10], ["rungs.steps", "[5, 10]", "first rung must be 0"]),
        ("rungs.steps", [0, 10, 10], ["rungs.steps", "must increase"]),
        ("rungs.reduction_factor", 1, ["rungs.reduction_factor", "greater than 1"]),
        ("train.zero_stage", 7, ["train.zero_stage", "got 7", "0, 1, 2 or 3"]),
        ("train.num_workers", 3, ["train", "batch_size", "multiple of"]),
        ("train.num_workers", [1, 2], ["train", "a range is for promotion.train, got [1, 2]", "give one number"]),
        ("model.dtype", "int8", ["model.dtype", "'int8'", "float32"]),
        ("name", "../up", ["name", "'../up'", "letters"]),
        ("promotion.select", "best", ["promotion.select", "'best'", "best_per_budget"]),
        ("resources.max_concurrent", 0, ["resources.max_concurrent", "got 0"]),
        ("data.sequence_length", 1, ["data.sequence_length", "got 1"]),
    ],
)
def test_a_wrong_value_is_refused_with_path_value_and_what_is_allowed(
    path: str, value: Any, message: list[str]
) -> None:
    with pytest.raises(ConfigError) as caught:
        parse_config(with_value(path, value))
    for word in message:
        assert word in str(caught.value)


@pytest.mark.parametrize("path", ["name", "model", "search", "model.path"])
def test_a_missing_key_is_named(path: str) -> None:
    record = yaml.safe_load(yaml.safe_dump(GOOD))
    *parents, last = path.split(".")
    node = record
    for parent in parents:
        node = node[parent]
    del node[last]
    with pytest.raises(ConfigError, match=f"{path}: required"):
        parse_config(record)


def test_budgets_or_kv_heads_must_be_there() -> None:
    record = with_value("search.seed", 1)
    del record["search"]["kv_ratios"]
    with pytest.raises(ConfigError, match=r"search.kv_heads: got \[\].*search.kv_ratios.*search.kv_heads"):
        parse_config(record)
    assert parse_config(record | {"search": {"kv_heads": [4, 2]}}).search.kv_heads == [4, 2]


def test_all_errors_are_reported_at_once() -> None:
    record = with_value("search.kv_ratios", [2])
    record["nmae"] = 1
    with pytest.raises(ConfigError) as caught:
        parse_config(record)
    assert "search.kv_ratios.0" in str(caught.value)
    assert "nmae" in str(caught.value)


@pytest.mark.parametrize(
    ("override", "message"),
    [
        ("search.num_samples", "key=value"),
        ("=4", "key=value"),
        ("name.first=x", "name is a value, not a section"),
        ("search.kv_ratios=[0.5", "not valid YAML"),
    ],
)
def test_a_wrong_override_is_refused(tmp_path: Path, override: str, message: str) -> None:
    file = tmp_path / "search.yaml"
    file.write_text(yaml.safe_dump(GOOD))
    with pytest.raises(ConfigError) as caught:
        read_search_config(file, [override])
    assert message in str(caught.value)


def test_overrides_reach_sections_that_the_file_leaves_out(tmp_path: Path) -> None:
    file = tmp_path / "search.yaml"
    file.write_text(yaml.safe_dump(GOOD))
    config = read_search_config(
        file, ["search.kv_ratios=[0.125]", "train.learning_rate=1e-3", "promotion.enabled=false"]
    )
    assert config.search.kv_ratios == [0.125]
    assert config.train.learning_rate == 1e-3
    assert config.learning_rates == [1e-3]
    assert config.promotion.enabled is False
    assert read_search_config(file).search.kv_ratios == [0.5, 0.25]


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("- a\n- b\n", "must hold a mapping"),
        ("a: [", "not valid YAML"),
        ("!!python/object:os.system {}", "not valid YAML"),
    ],
)
def test_a_file_that_is_no_configuration_is_refused(tmp_path: Path, text: str, message: str) -> None:
    file = tmp_path / "search.yaml"
    file.write_text(text)
    with pytest.raises(ConfigError, match=message):
        read_search_config(file)


def test_a_missing_file_is_named(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="no configuration file at .*nothing.yaml"):
        read_search_config(tmp_path / "nothing.yaml")


@pytest.mark.parametrize("file", sorted((REPOSITORY / "configs").glob("*.yaml")), ids=lambda f: f.name)
def test_the_shipped_configurations_are_valid(file: Path) -> None:
    assert read_search_config(file).rungs.steps[0] == 0


def test_the_baseline_always_runs() -> None:
    assert [a.name for a in parse_config(with_value("search.recipes", ["headfold"])).arms] == ["gqa", "headfold"]
    assert [a.name for a in parse_config(with_value("search.baseline", "mqa")).arms] == ["mqa", "gqa", "headfold"]


@pytest.mark.parametrize("number", ["1e-4", "-2E3", "1.5e+2", "3.e1"])
def test_a_number_with_an_exponent_is_one_with_and_without_a_point(number: str) -> None:
    """YAML 1.1 takes those without point or sign for text."""
    assert read_yaml(f"x: {number}") == {"x": float(number)}
    assert read_yaml(dump_yaml({"x": number, "y": float(number)})) == {"x": number, "y": float(number)}
    assert read_yaml("x: 1e4x") == {"x": "1e4x"} and read_yaml("x: 12") == {"x": 12}
