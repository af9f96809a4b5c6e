"""Verbs refuse a checkpoint with wrong weights or without a tokenizer before they read texts or weights."""

from __future__ import annotations

import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from safetensors.torch import load_file, save_file
from verbs import convert_checkpoint, convert_layerwise, evaluate_checkpoint, export_checkpoint, inspect_checkpoint

from attention.io import checkpoint
from attention.io.tokenizers import TokenizerError, read_tokenizer
from orchestrator.config.schema import ConfigError, parse_config
from orchestrator.search.validation import validate_search
from trainers.text.data import Texts

VICTIM = "model.layers.2.mlp.up_proj.weight"


def search(folder: Path) -> None:
    section = {"recipes": ["gqa"], "kv_ratios": [0.5], "searcher": "grid"}
    record = {"name": "s", "model": {"path": str(folder)}, "search": section, "storage": str(folder.parent / "store")}
    validate_search(parse_config(record))


def against_base(folder: Path) -> None:
    evaluate_checkpoint(folder.parent / "whole", folder)


VERBS: dict[str, Callable[[Path], Any]] = {
    "convert": lambda folder: convert_checkpoint(folder, "gqa", 0.5, folder.parent / "out"),
    "convert, layer by layer": lambda folder: convert_layerwise(folder, "gqa", 0.5, folder.parent / "out"),
    "evaluate": evaluate_checkpoint,
    "evaluate --original": against_base,
    "inspect": lambda folder: inspect_checkpoint(folder, kv_ratios=[0.5], cache_dir=folder.parent / "cache"),
    "export": lambda folder: export_checkpoint(folder, "gqa", folder.parent / "out"),
    "search": search,
}


@pytest.fixture
def copied(demo_dir: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A copy of the demo next to a complete one; texts and weights are out of reach."""
    for name in ("whole", "model"):
        shutil.copytree(demo_dir, tmp_path / name)

    def out_of_reach(*_: Any, **__: Any) -> None:
        raise AssertionError("read before all was checked")

    monkeypatch.setattr(Texts, "load", out_of_reach)
    monkeypatch.setattr(checkpoint.AutoModelForCausalLM, "from_pretrained", out_of_reach)
    return tmp_path / "model"


@pytest.mark.parametrize("verb", VERBS)
def test_missing_weights(verb: str, copied: Path) -> None:
    file = copied / "model.safetensors"
    tensors = load_file(file)
    del tensors[VICTIM]
    save_file(tensors, file, metadata={"format": "pt"})
    with pytest.raises(ConfigError, match=rf"lacks 1 of the \d+ tensors of LlamaForCausalLM: {VICTIM}"):
        VERBS[verb](copied)
    assert not (copied.parent / "out").exists()


def test_no_room_for_an_export(copied: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    stored = (copied / "model.safetensors").stat().st_size
    shutil.copyfile(copied / "model.safetensors", copied / "consolidated.safetensors")  # which nothing reads
    monkeypatch.setattr("orchestrator.serving.export.disk_free", lambda _: stored - 1)
    with pytest.raises(ConfigError, match=r"out: the export takes about .* free at '.*out'; free some"):
        export_checkpoint(copied, "gqa", copied.parent / "out")
    assert not (copied.parent / "out").exists()
    monkeypatch.setattr("orchestrator.serving.export.disk_free", lambda _: stored)
    with pytest.raises(AssertionError, match="read before"):
        export_checkpoint(copied, "gqa", copied.parent / "out")


@pytest.mark.parametrize("verb", ["convert", "evaluate", "search"])
def test_no_tokenizer(verb: str, copied: Path) -> None:
    for file in copied.glob("tokenizer*"):
        file.unlink()
    with pytest.raises(ConfigError, match=r"no tokenizer in .*copy tokenizer.json and tokenizer_config.json"):
        VERBS[verb](copied)


@pytest.mark.parametrize("family", ["gpt2", "opt", "qwen2", "gpt_neox", "gemma", "mistral", "phi"])
def test_an_empty_tokenizer_is_none(family: str, tiny_model: Any, tmp_path: Path) -> None:
    """transformers makes one without a vocabulary up for most of these."""
    tiny_model(family).config.save_pretrained(tmp_path)
    with pytest.raises(TokenizerError, match="no tokenizer in"):
        read_tokenizer(tmp_path)


def test_a_tokenizer_that_cannot_be_read_is_named(copied: Path) -> None:
    (copied / "tokenizer.json").write_text("<html>")
    with pytest.raises(TokenizerError, match=r"tokenizer\.json cannot be read: .*copy it again"):
        read_tokenizer(copied)
