"""The texts of a search: their parts are those that the verbs measure a searched model on."""

from __future__ import annotations

import json
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest
import torch

from attention.checkpoint import Checkpoint
from orchestrator.config.schema import ConfigError, read_search_config
from orchestrator.search.prepare import _text_digests, check_texts
from orchestrator.search.texts import SearchTexts
from trainers.text import corpora
from trainers.text.data import TextCut, Texts
from trainers.text.token_sets import write_sequences

REPOSITORY = Path(__file__).resolve().parents[3]
DEMO = REPOSITORY / "examples" / "stdlib-llama"


def test_a_small_file_is_divided_as_the_verbs_divide_it(tmp_path: Path) -> None:
    """Else a promoted model would be measured on documents that the search has trained on."""
    source = tmp_path / "texts.jsonl"
    documents = [f"document {n}: " + "a few words of text " * 200 for n in range(100)]
    source.write_text("".join(json.dumps({"text": text}) + "\n" for text in documents))
    changes = [f"model.path={DEMO}", f"data.source={source}", "data.train.tokens=4096", "data.eval.tokens=2048"]
    config = read_search_config(REPOSITORY / "configs" / "demo.yaml", changes)
    texts = SearchTexts.check(config, Checkpoint.open(DEMO), tmp_path / "cache")

    def parts(split: str) -> set[str]:
        cut = texts.cuts[split]
        assert isinstance(cut, TextCut)
        return set(cut.documents())

    measured = set(Texts(str(source)).cut("eval", 2048, 128).documents())
    assert len(measured) > 20, "a quarter of a small file"
    assert parts("eval") == measured
    assert parts("train") == parts("calibration") == set(documents) - measured
    assert texts.divisions == dict.fromkeys(("train", "eval", "calibration"), "by_size")


def test_a_text_to_measure_on_has_no_document_that_is_learned_from(tmp_path: Path) -> None:
    """A part of a large text, as a file, holds out more of its documents than the whole does."""
    documents = [f"document {n}: " + "a few words of text " * 200 for n in range(300)]
    whole, part = tmp_path / "whole.jsonl", tmp_path / "part.jsonl"
    for file, texts in ((whole, documents), (part, [*documents[:30], *(f"new {text}" for text in documents[:30])])):
        file.write_text("".join(json.dumps({"text": text}) + "\n" for text in texts))
    changes = [f"model.path={DEMO}", f"data.source={whole}", "data.train.tokens=4096", "data.eval.tokens=2048"]
    changes += [f"data.eval.source={part}"]
    config = read_search_config(REPOSITORY / "configs" / "demo.yaml", changes)
    texts = SearchTexts.check(config, Checkpoint.open(DEMO), tmp_path / "cache")
    cut = texts.cuts["eval"]
    assert isinstance(cut, TextCut) and cut.apart_from == (str(whole),)
    measured = list(cut.documents())
    assert measured and all(text.startswith("new ") for text in measured)
    assert texts.cuts["train"].apart_from == ()  # type: ignore[union-attr]


def test_large_files_and_what_comes_along_keep_their_token_sets(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    source = tmp_path / "texts.jsonl"
    source.write_text("".join(json.dumps({"text": f"document {n} of a few words"}) + "\n" for n in range(100)))
    monkeypatch.setattr(corpora, "SMALL_BYTES", 1000)
    for name in (str(source), "stdlib", "builtin"):
        config = read_search_config(REPOSITORY / "configs" / "demo.yaml", [f"model.path={DEMO}", f"data.source={name}"])
        texts = SearchTexts.check(config, Checkpoint.open(DEMO), tmp_path / "cache")
        assert set(texts.divisions.values()) == {"twentieth"}


def test_a_search_that_was_begun_with_another_division_is_refused() -> None:
    texts: Any = SimpleNamespace(divisions={"train": "by_size", "eval": "by_size", "calibration": "twentieth"})
    prepared: Any = SimpleNamespace(texts=texts)
    with pytest.raises(ConfigError, match=r"data\.train: this search was begun by a version"):
        check_texts(prepared, cast(Any, {"loss": 2.0}))


def test_a_search_whose_text_has_changed_is_refused(tmp_path: Path) -> None:
    tokens = torch.arange(64).view(2, 32)
    for name, rows in (("before", tokens), ("after", tokens + 1)):
        write_sequences(rows, tmp_path / name, largest_id=100)
    cuts = dict.fromkeys(("train", "eval", "calibration"), SimpleNamespace(source="texts.jsonl"))
    prepared: Any = SimpleNamespace(texts=SimpleNamespace(cuts=cuts), files=dict.fromkeys(cuts, tmp_path / "before"))
    original: Any = {"texts": _text_digests(prepared)}
    check_texts(prepared, original)
    prepared.files["eval"] = tmp_path / "after"
    with pytest.raises(ConfigError, match=r"data\.eval: the text of texts\.jsonl is another than when this search"):
        check_texts(prepared, original)
