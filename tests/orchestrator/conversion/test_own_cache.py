"""Ratios are shares of the checkpoint's own KV cache, in every verb, whether its heads share already or not."""

from __future__ import annotations

import argparse
import inspect
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from transformers import PreTrainedModel, PreTrainedTokenizerBase
from verbs import convert_checkpoint, convert_curve, convert_layerwise, estimate_conversion, evaluate_checkpoint

from attention.conversion.convert import convert
from attention.families import geometry_of
from attention.geometry import HeadGeometry, RotaryLayout
from attention.io import checkpoint
from attention.modeling.model_classes import plan_of
from attention.plan import AttentionPlan, LayerPlan
from attention.plan_parts import dense
from attention.ratios import own_heads, ratio_of_kv_heads
from orchestrator import checkpoints, main
from orchestrator.config.schema import ConfigError, parse_config
from orchestrator.conversion.request import requested_ratios
from orchestrator.search.candidates import Candidate, named_candidates, ratios_of
from orchestrator.storage.json_files import write_json
from orchestrator.storage.paths import SearchFolder
from search_spaces.allocation.uniform import uniform
from trainers.evaluation import measure_cache

SMALL: dict[str, Any] = {"calibration_tokens": 384, "eval_tokens": 192, "sequence_length": 48, "device": "cpu"}
HELD_OUT = {name: SMALL[name] for name in ("eval_tokens", "sequence_length", "device")}
Tiny = Callable[..., PreTrainedModel]


@pytest.fixture(scope="module", autouse=True)
def text(tmp_path_factory: pytest.TempPathFactory) -> None:
    """A little text: what the tests here are about are heads."""
    file = tmp_path_factory.mktemp("texts") / "words.jsonl"
    words = inspect.getsource(argparse).splitlines()
    records = ({"text": "\n".join(words[i : i + 12])} for i in range(0, len(words), 12))
    file.write_text("\n".join(map(json.dumps, records)))
    SMALL.update(calibration_data=str(file), eval_data=str(file))
    HELD_OUT.update(eval_data=str(file))


@pytest.fixture(scope="module")
def grouped(
    tmp_path_factory: pytest.TempPathFactory, tiny_model: Tiny, demo_tokenizer: PreTrainedTokenizerBase
) -> Path:
    """A Llama of 8 query heads over 4 KV heads, two layers."""
    folder = tmp_path_factory.mktemp("models") / "grouped"
    heads = {"num_attention_heads": 8, "num_key_value_heads": 4, "hidden_size": 64, "vocab_size": 2048}
    tiny_model("llama", **heads).save_pretrained(folder)
    demo_tokenizer.save_pretrained(folder)
    return folder


def held(folder: Path) -> int:
    """Bytes that a checkpoint's cache holds after 32 tokens, in float32."""
    return measure_cache(checkpoints.load_model(folder), 32)


@pytest.mark.parametrize("family", ["llama", "mistral", "qwen3"])
def test_half_is_half_of_what_the_user_has(
    family: str, tmp_path: Path, tiny_model: Tiny, demo_tokenizer: PreTrainedTokenizerBase
) -> None:
    source = tmp_path / "source"
    tiny_model(family, num_key_value_heads=2, vocab_size=2048).save_pretrained(source)
    demo_tokenizer.save_pretrained(source)
    record = convert_checkpoint(source, "gqa", 0.5, tmp_path / "half", **SMALL)
    assert record["kv_ratio"] == record["kv_ratio_asked"] == 0.5
    assert record["kv_bytes_per_token"] * 2 == record["kv_bytes_per_token_original"]
    assert held(tmp_path / "half") * 2 == held(source)


@pytest.mark.extended
def test_a_streamed_conversion_says_the_same(grouped: Path, tmp_path: Path) -> None:
    record = convert_layerwise(grouped, "gqa", 0.25, tmp_path / "out", progress=lambda line: None, **SMALL)
    assert record["kv_ratio"] == 0.25 and record["kv_bytes_per_token"] * 4 == record["kv_bytes_per_token_original"]
    assert held(tmp_path / "out") * 4 == held(grouped)
    assert checkpoint.original_heads(tmp_path / "out", 8) == 2 * 2 * 4


def test_what_was_recorded_at_conversion_is_what_evaluate_compares_with(grouped: Path, tmp_path: Path) -> None:
    convert_checkpoint(grouped, "gqa", 0.5, tmp_path / "half", **SMALL)
    alone = evaluate_checkpoint(tmp_path / "half", speed_tokens=0, **HELD_OUT)
    assert alone["kv_ratio"] == 0.5 and "converted from" in alone["kv_ratio_of"]
    shared = evaluate_checkpoint(tmp_path / "half", grouped, speed_tokens=0, **HELD_OUT)
    assert shared["kv_ratio"] == 0.5 and "original" in shared["kv_ratio_of"]
    (tmp_path / "half" / checkpoint.PLAN_FILE).unlink()
    unknown = evaluate_checkpoint(tmp_path / "half", speed_tokens=0, **HELD_OUT)
    assert unknown["kv_ratio"] == 1 and "no other is known" in unknown["kv_ratio_of"]


def test_several_ratios_say_where_they_were_rounded_down(grouped: Path, capsys: pytest.CaptureFixture[str]) -> None:
    record = convert_curve(grouped, "gqa", [0.7, 0.25], None, **SMALL)
    assert [(p["kv_ratio_asked"], p["kv_ratio"]) for p in record["points"]] == [(0.7, 0.5), (0.25, 0.25)]
    assert record["kv_bytes_per_token_original"] == 2 * record["points"][0]["kv_bytes_per_token"]
    assert run("convert", grouped, "--recipe", "gqa", "--kv-ratio", "0.7,0.25") == 0
    output = capsys.readouterr().out
    assert "50% of the KV cache (requested 70%, using 50%: 4 of 8 KV heads)" in output
    assert "gqa at 25% of the KV cache\n" in output
    assert "128 bytes per token, 512 before; 7,812,500 tokens per GB, 1,953,125 before" in output


def test_an_estimate_of_several_ratios_rounds_down_as_the_conversion_does(grouped: Path) -> None:
    result = estimate_conversion(grouped, "gqa", 0.7, **SMALL)
    assert (result.kv_ratio_asked, result.kv_ratio) == (0.7, 0.5)
    assert result.kv_bytes_per_token * 2 == result.kv_bytes_per_token_original
    output = "50% of the original (requested 70%, using 50%: 4 of 8 KV heads): 256 of 512 KV bytes"
    assert output in result.describe()["cache"]


def run(verb: str, model: Path, *more: str) -> int | str | None:
    """A verb in this process; its exit code."""
    sizes = [f"--{name.replace('_', '-')}={SMALL[name]}" for name in ("calibration_tokens", "eval_tokens")]
    own = [str(model)] if verb == "inspect" else ["--model", str(model)]
    texts = [] if verb == "estimate" else [f"--data={SMALL['calibration_data']}", f"--eval-data={SMALL['eval_data']}"]
    with pytest.raises(SystemExit) as ended:
        main.run([verb, *own, *sizes, "--sequence-length=48", "--device=cpu", *texts, *more])
    return ended.value.code


@pytest.mark.heavy
def test_every_verb_takes_lists_of_ratios_and_of_heads(
    grouped: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    result = {}
    for words in (["--kv-ratio", "0.5,0.25"], ["--kv-heads", "2,1"]):
        file = tmp_path / "points.json"
        for verb in ("estimate", "convert"):
            assert run(verb, grouped, "--recipe", "gqa", *words, "--json", str(file)) == 0
            points = json.loads(file.read_text())["points"]
            result[verb, words[0]] = [(p["kv_ratio"], p["kv_bytes_per_token"]) for p in points]
        page = ["--out", str(tmp_path / "page.html"), "--cache", str(tmp_path / "cache"), "--compare", "none"]
        quick = ["--set", "allocation.tokens=48", "--set", "allocation.fit_steps=0"]
        assert run("inspect", grouped, "--recipe", "gqa", *words, *page, *quick, "--json", str(file)) == 0
        points = json.loads(file.read_text())["budgets"]
        result["inspect", words[0]] = [(p["kv_ratio"], p["kv_bytes_per_token"]) for p in points]
    own = 2 * 2 * 4 * 8 * 4  # keys and values, layers, KV heads, head dim, bytes
    assert set(map(tuple, result.values())) == {((0.5, own // 2), (0.25, own // 4))}
    assert "without any conversion: a cache in fp8 (vLLM)" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["--kv-ratio", "0.5", "--kv-heads", "2"], ["expected one of the three", "both"]),
        (["--kv-heads", "4"], ["kv_heads: got 4", "4 KV heads per layer for 8 query heads", "1 to 3"]),
        (["--kv-heads", "0"], ["kv_heads: got 0", "1 to 3"]),
        (["--kv-heads", "2.5"], ["kv_heads", "whole number", "2.5"]),
        (["--kv-ratio", "0.2"], ["kv_ratio: recipe gqa keeps at least 25% on this checkpoint, got 20%"]),
        (["--kv-ratio", "50"], ["kv_ratio: got 50", "(0, 1)", "did you mean 50%?"]),
        (["--kv-ratio", "0.5x"], ["kv_ratio: expected a share like 0.5 or 50%"]),
        (["--kv-ratio", "100%"], ["keeps the whole cache"]),
        (["--kv-ratio", "0.5", "0.25"], ["(0.25)", "separated by a comma"]),
        (["--kv-bytes", "64"], ["kv_bytes: recipe gqa keeps at least 128 KV bytes per token", "got 64"]),
        (
            ["--kv-bytes", "1KiB"],
            ["kv_bytes: got '1KiB', 1,024 bytes", "512 KV bytes per token", "give less"],
        ),
        (["--kv-bytes", "1KB"], ["kv_bytes: expected a share like 0.5 or 50%, or bytes per token like 24KiB"]),
        (["--kv-bytes", "0.5", "--kv-heads", "2"], ["expected one of the three", "both"]),
        (["--kv-ratio", "0.7", "--strict"], ["0.7", "nearest kv_ratio that recipe gqa can meet is 0.5 or 0.75"]),
        (["--kv-ratio", "1"], ["keeps the whole cache", "changes nothing", "give less than 1", "KV bytes per token"]),
        (["--kv-ratio", "1.5"], ["1.5", "(0, 1)"]),
        (
            ["--kv-ratio", "0.3", "--strict"],
            ["0.3", "4 KV heads per layer", "512 KV bytes per token", "0.25 or 0.5"],
        ),
    ],
)
def test_refusals_are_in_the_same_terms(
    words: list[str], message: list[str], grouped: Path, capsys: pytest.CaptureFixture[str], monkeypatch: Any
) -> None:
    monkeypatch.setenv("COLUMNS", "400")
    for verb in ("estimate", "convert"):
        assert run(verb, grouped, "--recipe", "gqa", *words) == 2
        output = capsys.readouterr().err
        for word in message:
            assert word in output, output


def test_neither_ratio_nor_heads_is_refused(grouped: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert run("convert", grouped, "--recipe", "gqa") == 2
    output = capsys.readouterr().err
    assert "--kv-ratio" in output and "--kv-heads" in output
    assert requested_ratios(grouped, None, None, default=(0.5, 0.25, 0.2)) == [0.5, 0.25]


def test_a_whole_cache_is_no_mistake_where_something_else_changes(grouped: Path, demo_dir: Path) -> None:
    assert estimate_conversion(demo_dir, "directshare", 1.0, eval_tokens=64).kv_ratio == 1
    assert estimate_conversion(grouped, "gqa", 1.0, recipe_settings={"composition": "dcmha"}, **SMALL).kv_ratio == 1


def test_a_checkpoint_that_was_converted_already_is_refused(grouped: Path, tmp_path: Path) -> None:
    """Its config still has the original's KV heads: a half of those could be more than it has now."""
    plan = AttentionPlan((LayerPlan((0,) * 8, (0, 0, 0, 0, 1, 1, 1, 1)),) * 2, 8)
    checkpoint.save(
        convert(checkpoints.load_model(grouped), plan), tmp_path / "uneven", checkpoints.load_tokenizer(grouped)
    )
    with pytest.raises(ConfigError, match="converted already and keeps 6 of 16 key and value heads"):
        convert_checkpoint(tmp_path / "uneven", "gqa", 0.5, **SMALL)


# ---- searches --------------------------------------------------------------------------------------------------------


def config_of(grouped: Path, **section: Any) -> Any:
    return parse_config({"name": "own", "model": {"path": str(grouped)}, "search": {"recipes": ["gqa"], **section}})


def test_a_search_takes_heads_or_shares(grouped: Path) -> None:
    geometry = checkpoints.open_checkpoint(grouped).geometry
    arms = ["gqa", {"recipe": "asymgqa", "kv_heads": [3]}, {"recipe": "align", "kv_ratios": [0.25]}]
    config = config_of(grouped, kv_heads=[2, 1], recipes=arms)
    assert ratios_of(config.search, geometry) == [0.5, 0.25]
    result = [(c.recipe.name, c.kv_ratio) for c in named_candidates(config_of(grouped, kv_heads=[2, 1]), geometry)]
    assert result == [("gqa", 0.5), ("gqa", 0.25)]
    assert ratios_of(config.arms[1], geometry) == [0.75]
    budgets = {c.recipe.name: {} for c in named_candidates(config, geometry)}
    for candidate in named_candidates(config, geometry):
        budgets[candidate.recipe.name][candidate.kv_ratio] = candidate.used_ratio
    every = {0.5: 0.5, 0.25: 0.25, 0.75: 0.75}
    assert budgets == {"gqa": every, "asymgqa": {0.75: 0.75}, "align": {0.25: 0.25}}  # the baseline at every budget
    with pytest.raises(ConfigError, match=r"search.kv_heads: got 4, but the checkpoint has 4 KV heads"):
        named_candidates(config_of(grouped, kv_heads=[4]), geometry)
    with pytest.raises(ConfigError, match=r"search.recipes: align: kv_heads: got 9"):
        named_candidates(config_of(grouped, kv_ratios=[0.5], recipes=[{"recipe": "align", "kv_heads": [9]}]), geometry)


def test_a_search_takes_ratios_as_ceilings(grouped: Path) -> None:
    geometry = checkpoints.open_checkpoint(grouped).geometry
    options = {"kv_ratios": [0.7, "40%"], "recipes": ["gqa", "headfold_layers"]}
    result = {(c.recipe.name, c.kv_ratio): c for c in named_candidates(config_of(grouped, **options), geometry)}
    used = {key: candidate.used for key, candidate in result.items()}
    assert used == {
        ("gqa", 0.7): 0.5, ("gqa", 0.4): 0.25,
        ("headfold_layers", 0.7): 0.625, ("headfold_layers", 0.4): 0.375,
    }  # fmt: skip
    for candidate in result.values():
        config = candidate.config()
        assert (config["kv_ratio"], config["used_kv_ratio"]) == (candidate.kv_ratio, candidate.used_ratio)
        assert Candidate.from_config(config) == candidate
    exact = named_candidates(config_of(grouped, kv_ratios=[0.5]), geometry)[0]
    assert exact.used is None and "used_kv_ratio" not in exact.config()  # as a search of before has it
    with pytest.raises(ConfigError, match=r"search.kv_ratios: got 0.7, which recipe gqa cannot meet.*0.5, 0.75"):
        named_candidates(config_of(grouped, strict=True, **options), geometry)
    with pytest.raises(ConfigError, match=r"search.kv_ratios: got 0.1, .*keeps at least 25%"):
        named_candidates(config_of(grouped, kv_ratios=[0.1]), geometry)


def test_only_the_baseline_runs_with_the_whole_cache(grouped: Path) -> None:
    geometry = checkpoints.open_checkpoint(grouped).geometry
    result = named_candidates(config_of(grouped, kv_ratios=[1.0, 0.5]), geometry)
    assert [c.kv_ratio for c in result] == [1.0, 0.5]
    with pytest.raises(ConfigError, match="recipe align cannot meet.*changes nothing.*it can meet 0.25, 0.5, 0.75 of"):
        named_candidates(config_of(grouped, kv_ratios=[1.0], recipes=["gqa", "align"]), geometry)


def test_a_search_of_a_former_version_is_not_misread(tmp_path: Path) -> None:
    folder = SearchFolder.fresh(tmp_path, "old")
    """Its ratios may have been shares of another cache."""
    folder.snapshot.write_text("name: old\n")
    write_json(folder.original, {"kv_ratio": 0.25, "loss": 3.0})
    with pytest.raises(ConfigError, match="former version of Headfold"):
        SearchFolder.existing(folder.root)


# ---- arithmetic ------------------------------------------------------------------------------------------------------


@settings(max_examples=12, deadline=None, derandomize=True)
@given(data=st.data())
def test_a_recorded_ratio_is_that_of_the_bytes(data: st.DataObject, tiny_model: Tiny) -> None:
    """Any plan that a checkpoint's own groups allow, on any number of KV heads: plan, cache and record agree."""
    stored = data.draw(st.sampled_from([1, 2, 4]))
    model = tiny_model("llama", num_key_value_heads=stored)
    geometry = geometry_of(model.config)
    maps = st.lists(st.integers(0, stored - 1), min_size=stored, max_size=stored)
    layers = [
        LayerPlan(*(dense(units[unit] for unit in geometry.kv_map) for units in (data.draw(maps), data.draw(maps))))
        for _ in range(2)
    ]
    converted = convert(model, AttentionPlan(tuple(layers), 8))
    facts = checkpoints.cache_facts(converted, own_heads(geometry))
    assert facts["kv_ratio"] == facts["cache_bytes_measured"] / measure_cache(model, facts["cache_tokens"])
    assert facts["kv_ratio"] == facts["kv_bytes_per_token"] / plan_of(model).kv_bytes_per_token(model.dtype)


@given(heads=st.integers(1, 64), times=st.integers(1, 8), layers=st.integers(1, 80), kept=st.integers(-1, 65))
@settings(max_examples=60, deadline=None, derandomize=True)
def test_kv_heads_are_a_share_of_the_models_count(heads: int, times: int, layers: int, kept: int) -> None:
    bare = (8, RotaryLayout.none(8), False, False, False, False, False, 64, 32)
    geometry = HeadGeometry("llama", layers, 8 * heads * times, heads * times, heads, *bare)
    if not 1 <= kept < heads:
        with pytest.raises(ValueError, match=f"got {kept}, but the checkpoint has {heads} KV head"):
            ratio_of_kv_heads(kept, geometry)
        return
    ratio = ratio_of_kv_heads(kept, geometry)
    assert uniform(layers, heads, ratio, admissible=range(1, heads + 1)) == ((kept, kept),) * layers
