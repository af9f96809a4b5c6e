"""`import headfold`: models and texts in memory, results that print well, checkpoints that load anywhere."""

from __future__ import annotations

import json
import subprocess
import sys
from dataclasses import fields
from pathlib import Path
from typing import Any

import pytest
from command_line import run_here
from datasets import Dataset, DatasetDict
from hub_cache import put_in_hub_cache
from transformers import AutoModelForCausalLM

import headfold
from attention.conversion.convert import convert
from attention.io import checkpoint
from attention.plan import AttentionPlan, LayerPlan
from headfold import functions
from orchestrator.config.options import ConvertOptions, EvaluateOptions, InspectOptions
from orchestrator.config.schema import ConfigError
from trainers.text.data import DataError

FEW = ["--calibration-tokens", "512", "--eval-tokens", "512", "--sequence-length", "64", "--device", "cpu"]
SMALL: dict[str, Any] = {"calibration_tokens": 512, "eval_tokens": 512, "sequence_length": 64, "device": "cpu"}


@pytest.fixture(scope="module")
def half(demo_dir: Path, little_text: str) -> headfold.ConversionResult:
    return headfold.convert(demo_dir, kv_ratio=0.5, data=little_text, recipe="gqa", **SMALL)


def test_a_conversion_prints_what_it_gives(half: headfold.ConversionResult) -> None:
    output = repr(half)
    assert f"{half['original_perplexity']:.2f} before, {half['perplexity']:.2f} after" in output
    assert " ± " in output, "the error of the increase"
    assert f"{half['kv_bytes_per_token']:,} of {half['kv_bytes_per_token_original']:,} bytes per token (50%)" in output
    assert "loaded by  transformers, vLLM, llama.cpp" in output


def test_its_checkpoint_is_loaded_saved_and_exported(
    half: headfold.ConversionResult, tmp_path: Path, demo_dir: Path, little_text: str
) -> None:
    stored = half.save(tmp_path / "half")
    assert AutoModelForCausalLM.from_pretrained(stored).config.num_key_value_heads == 4
    assert half.load().num_parameters() == headfold.load(stored).num_parameters() == half["parameters"]
    exported = half.export("gqa", tmp_path / "exported")
    assert exported.path == tmp_path / "exported" and exported["exact"]
    assert "gqa, exact" in repr(exported)
    assert (half.export("gguf").path / "model.gguf").is_file()
    eval_options = {"eval_tokens": 512, "sequence_length": 64, "device": "cpu", "speed_tokens": 0}
    measured = headfold.evaluate(stored, demo_dir, little_text, **eval_options)
    assert measured["loss"] == pytest.approx(half["loss"], abs=1e-3)
    assert f"{measured['perplexity']:.2f}, {measured['original_perplexity']:.2f} of the original" in repr(measured)


def test_models_and_texts_in_memory(demo_dir: Path, little_text: str) -> None:
    model = AutoModelForCausalLM.from_pretrained(demo_dir)
    lines = Path(little_text).read_text(encoding="utf-8").splitlines()
    documents = [json.loads(line)["text"] for line in lines]
    dataset = Dataset.from_dict({"text": documents})
    small: dict[str, Any] = {"recipe": "gqa", **SMALL}
    by_object = headfold.convert(model, data=dataset, **small)
    by_checkpoint = headfold.convert(headfold.Checkpoint.open(demo_dir), 0.5, documents, **small)
    assert by_object["loss"] == by_checkpoint["loss"]
    assert by_object["plan_digest"] == by_checkpoint["plan_digest"]
    assert by_object["model"] == str(demo_dir)
    assert by_object["calibration_data"] == by_checkpoint["calibration_data"], "one file of the cache"
    assert Path(by_object["calibration_data"]).read_text().count("\n") == len(documents)


def test_a_model_in_memory_is_still_what_it_was_converted_from(half: headfold.ConversionResult) -> None:
    """As after a training by other code."""
    measured: dict[str, Any] = {name: SMALL[name] for name in ("eval_tokens", "sequence_length", "device")}
    model = AutoModelForCausalLM.from_pretrained(half.path)
    for source in (half.path, model):
        assert headfold.evaluate(source, speed_tokens=0, **measured)["kv_ratio"] == 0.5
    exported = headfold.export(model, "gqa")
    card = (exported.path / "README.md").read_text()
    assert "50% of its KV cache" in card and "by recipe `gqa`" in card


def test_a_conversion_on_the_hub_is_still_what_it_was_converted_from(
    half: headfold.ConversionResult, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    name = put_in_hub_cache(monkeypatch, tmp_path / "hub", "someone/half", half.path)
    measured: dict[str, Any] = {key: SMALL[key] for key in ("eval_tokens", "sequence_length", "device")}
    for source in (name, AutoModelForCausalLM.from_pretrained(name)):
        result = headfold.evaluate(source, speed_tokens=0, **measured)
        assert (result["checkpoint"], result["kv_ratio"], result["recipe"]["name"]) == (name, 0.5, "gqa")


def test_a_model_in_memory_whose_source_is_gone_has_no_note(demo_dir: Path) -> None:
    model = AutoModelForCausalLM.from_pretrained(demo_dir)
    model.name_or_path = "someone/gone"
    assert functions._note_on_hub(model) == {}


def test_the_format_of_a_cache_is_printed(half: headfold.ConversionResult, demo_dir: Path) -> None:
    measured: dict[str, Any] = {name: SMALL[name] for name in ("eval_tokens", "sequence_length", "device")}
    model = AutoModelForCausalLM.from_pretrained(demo_dir)
    measured |= {"original": model, "tokenizer": headfold.Checkpoint.open(demo_dir).tokenizer, "speed_tokens": 0}
    alone = repr(headfold.evaluate(half.path, cache_format="q4_0", **measured))
    assert "in engine  a cache in q4_0: " in alone and "of the original in 16 bits" in alone
    several = repr(headfold.evaluate(half.path, cache_types="f16,q4_0", **measured))
    assert "q4_0 " in several and "bytes per token, loss increase" in several


def test_a_model_in_memory_is_called_what_it_was_loaded_from(demo_dir: Path, little_text: str, tmp_path: Path) -> None:
    model = AutoModelForCausalLM.from_pretrained(demo_dir)
    result = headfold.convert(model, data=little_text, recipe="gqa", output_dir=tmp_path / "half", **SMALL)
    original = json.loads((tmp_path / "half" / "headfold.json").read_text())["original"]
    assert (result["model"], original["base"]) == (str(demo_dir), demo_dir.name)
    measured: dict[str, Any] = {name: SMALL[name] for name in ("eval_tokens", "sequence_length", "device")}
    assert headfold.evaluate(model, data=little_text, speed_tokens=0, **measured)["checkpoint"] == str(demo_dir)


def test_a_result_that_joins_a_folder_of_ratios_is_the_one_in_there(
    demo_dir: Path, little_text: str, tmp_path: Path
) -> None:
    assert (
        run_here(
            "convert",
            "--model",
            demo_dir,
            "--kv-ratio",
            "0.5,0.25",
            "--recipe",
            "gqa",
            "--out",
            tmp_path / "curve",
            "--data",
            little_text,
            *FEW,
        )
        == 0
    )
    result = headfold.convert(demo_dir, 0.125, little_text, tmp_path / "curve", recipe="gqa", **SMALL)
    assert result.path == tmp_path / "curve" / "kv-0.125"
    assert result.load().config.num_key_value_heads == 1


def test_a_size_in_bytes_of_an_engine_makes_one_checkpoint(demo_dir: Path, little_text: str, tmp_path: Path) -> None:
    """Several cache formats compete for it."""
    settings = {"refinement.fit_steps": 12}
    result = headfold.convert(
        demo_dir,
        data=little_text,
        output_dir=tmp_path / "out",
        kv_bytes=0.25,
        engine="llama.cpp",
        recipe="headfold_gqa",
        overrides=settings,
        **SMALL,
    )
    assert result.path == tmp_path / "out" and (result.path / "config.json").is_file()


def test_mistakes(demo_dir: Path, tiny_model: Any) -> None:
    wrong: Any = {"recipee": "gqa"}
    with pytest.raises(TypeError, match="recipee"):
        headfold.convert(demo_dir, **wrong)
    with pytest.raises(ConfigError, match="one checkpoint is made at a time"):
        headfold.convert(demo_dir, "0.5,0.25", recipe="gqa")
    with pytest.raises(DataError, match="column 'text', got columns \\['content'\\]; name its column as text_field"):
        headfold.convert(demo_dir, data=Dataset.from_dict({"content": ["a"]}))
    with pytest.raises(
        DataError, match=r"got 2 entries by name \(train, test\); give one of them, e.g. data\['train'\]"
    ):
        headfold.convert(
            demo_dir, data=DatasetDict({name: Dataset.from_dict({"text": ["a"]}) for name in ("train", "test")})
        )
    with pytest.raises(DataError, match="got int as item 1"):
        headfold.convert(demo_dir, data=["a", 1])
    with pytest.raises(ConfigError, match="tokenizer: only a model in memory takes one"):
        headfold.convert(demo_dir, tokenizer=object())
    with pytest.raises(ConfigError, match="tokenizer: this model was not loaded from a checkpoint"):
        headfold.convert(tiny_model("llama"))


@pytest.mark.parametrize(
    ("arguments", "options"),
    [
        (functions.ConvertArguments, ConvertOptions),
        (functions.InspectArguments, InspectOptions),
        (functions.EvaluateArguments, EvaluateOptions),
    ],
)
def test_arguments_are_options_of_the_verb(arguments: Any, options: Any) -> None:
    positional = {"model", "checkpoint", "original", "kv_ratio", "data", "calibration_data", "eval_data", "out"}
    assert set(arguments.__annotations__) == {field.name for field in fields(options)} - positional


def test_the_import_registers_the_format(tiny_model: Any, tmp_path: Path) -> None:
    """A plan of Headfold's own, opened by transformers in a process that imports nothing else of the product."""
    apart = LayerPlan((0, 0, 1, 1), (0, 1, 0, 1))
    folder = checkpoint.save(convert(tiny_model("llama"), AttentionPlan((apart, apart), head_dim=8)), tmp_path / "own")
    code = (
        "import headfold; from transformers import AutoModelForCausalLM; "
        f"print(AutoModelForCausalLM.from_pretrained({str(folder)!r}).config.model_type)"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert done.stdout.strip() == "headfold_llama", done.stderr[-2000:]
