"""Text to sequences: splits are disjoint, order is reproducible, the cache is exact, and bad input is refused."""

from __future__ import annotations

import json
import os
import time
from pathlib import Path
from typing import Any

import datasets
import pytest
import torch

from trainers.evaluation import evaluate
from trainers.text.corpora import DataError, is_held_out, resolve
from trainers.text.data import TextCut, load_sequences, token_set
from trainers.text.token_sets import read_sequences

SENTENCES = [f"document {n}: " + " ".join(f"word{(n * k) % 97}" for k in range(30)) for n in range(400)]


@pytest.fixture(scope="module")
def jsonl(tmp_path_factory: pytest.TempPathFactory) -> Path:
    file = tmp_path_factory.mktemp("text") / "corpus.jsonl"
    file.write_text("".join(json.dumps({"text": s, "number": n}) + "\n" for n, s in enumerate(SENTENCES)))
    return file


def load(source: Any, tokenizer: Any, split: Any = "train", tokens: int = 2048, length: int = 64, **more: Any) -> Any:
    return load_sequences(str(source), tokenizer, split=split, tokens=tokens, sequence_length=length, **more)


def documents(sequences: torch.Tensor, tokenizer: Any) -> set[str]:
    """Whole documents in consecutive sequences: the tokens between two end tokens."""
    text = tokenizer.decode(sequences.flatten().tolist())
    return set(text.split(tokenizer.eos_token)[1:-1])


def test_sequences_are_the_documents_joined_by_the_end_token(tmp_path: Path, demo_tokenizer: Any) -> None:
    stored = [s for s in SENTENCES if not is_held_out(s)][:2]
    (tmp_path / "a.jsonl").write_text("".join(json.dumps({"text": s}) + "\n" for s in stored))
    ids = [demo_tokenizer(s, add_special_tokens=False)["input_ids"] + [0] for s in stored]
    got = load(tmp_path / "a.jsonl", demo_tokenizer, tokens=100, length=50)
    assert got.shape == (2, 50)
    assert got.dtype == torch.int64
    orders = [(ids[0] + ids[1])[:100], (ids[1] + ids[0])[:100]]
    assert got.flatten().tolist() in orders


def test_standard_library_is_divided_by_the_rule(demo_tokenizer: Any) -> None:
    corpus = resolve("stdlib")
    train, kept = set(corpus.documents("train", "text", 0)), set(corpus.documents("held_out", "text", None))
    everything = {f.read_text(encoding="utf-8", errors="replace") for f in corpus.files}
    assert train | kept == everything
    assert not {t for t in train & kept if len(t) > 200}  # a few empty __init__ files are equal
    assert 0.02 < len(kept) / len(everything) < 0.09
    assert not any("site-packages" in f.parts or "test" in f.parts or "tests" in f.parts for f in corpus.files)


def test_demo_checkpoint_reads_held_out_text_as_it_was_measured(demo_model: Any, demo_tokenizer: Any) -> None:
    sequences = load("stdlib", demo_tokenizer, "eval", 16_384, 256)
    assert 2.0 < evaluate(demo_model, sequences).loss < 2.45  # the range allows for another interpreter's files


@pytest.mark.parametrize("kind", ["jsonl", "json", "parquet", "text folder", "glob", "one text file"])
def test_every_local_format_gives_disjoint_splits(kind: str, tmp_path: Path, demo_tokenizer: Any) -> None:
    rows = datasets.Dataset.from_dict({"text": SENTENCES})
    source = tmp_path / f"corpus.{kind}"
    if kind in ("jsonl", "json"):
        rows.to_json(source)
    elif kind == "parquet":
        rows.to_parquet(source)
    elif kind == "one text file":
        source = tmp_path / "corpus.txt"
        source.write_text("\n\n".join(SENTENCES))
    else:
        for number, sentence in enumerate(SENTENCES):
            (tmp_path / f"{number:03d}.txt").write_text(sentence)
        source = tmp_path if kind == "text folder" else tmp_path / "*.txt"
    corpus = resolve(str(source))
    train, kept = (list(corpus.documents(side, "text", None)) for side in ("train", "held_out"))
    assert sorted(train + kept) == sorted(SENTENCES)
    assert kept
    assert all(map(is_held_out, kept))
    assert not any(map(is_held_out, train))
    assert documents(load(source, demo_tokenizer, tokens=20_000), demo_tokenizer) <= set(train)
    assert load(source, demo_tokenizer, "eval", 1024).shape == (16, 64)


def test_order_depends_on_the_seed_and_the_split_only(jsonl: Path, demo_tokenizer: Any) -> None:
    first = load(jsonl, demo_tokenizer, seed=3)
    assert torch.equal(first, load(jsonl, demo_tokenizer, seed=3))
    assert not torch.equal(first, load(jsonl, demo_tokenizer, seed=4))
    assert not torch.equal(first, load(jsonl, demo_tokenizer, "calibration", seed=3))


def test_a_small_evaluation_is_spread_over_the_whole_held_out_side(demo_tokenizer: Any) -> None:
    whole = load("stdlib", demo_tokenizer, "eval", 400 * 64)
    part = load("stdlib", demo_tokenizer, "eval", 100 * 64, seed=9)
    result = [int((whole == row).all(1).nonzero()[0]) for row in part if (whole == row).all(1).any()]
    assert torch.equal(part[0], whole[0])
    assert result == sorted(result)
    assert max(result) > 350


@pytest.mark.heavy
def test_a_calibration_comes_from_many_documents(demo_tokenizer: Any) -> None:
    corpus = resolve("stdlib")
    texts = [t for t in corpus.documents("train", "text", None) if len(t) > 100]

    def sources(split: str) -> int:
        whole = load("stdlib", demo_tokenizer, split, 16 * 256, 256, seed=2)
        middles = [demo_tokenizer.decode(row[64:128].tolist()) for row in whole]
        return len({next((n for n, t in enumerate(texts) if m in t), -1) for m in middles if "\0" not in m})

    assert sources("calibration") >= 12
    assert sources("train") < 8  # what a calibration drawn like this would rest on


def test_a_split_of_another_name_is_wholly_held_out(jsonl: Path, demo_tokenizer: Any) -> None:
    assert list(resolve(f"{jsonl}:validation").documents("held_out", "text", None)) == SENTENCES
    assert sorted(resolve(f"{jsonl}:train").documents("train", "text", 0)) == sorted(
        text for text in SENTENCES if not is_held_out(text)
    )
    with pytest.raises(DataError, match="held out and cannot be trained on"):
        load(f"{jsonl}:validation", demo_tokenizer)


def test_cache_answers_without_tokenising_and_notices_changes(tmp_path: Path, demo_tokenizer: Any) -> None:
    source = tmp_path / "text.jsonl"
    source.write_text("".join(json.dumps({"text": s}) + "\n" for s in SENTENCES))

    def folder(seed: int = 0) -> Path:
        return token_set(TextCut(str(source), "train", 1024, 64, seed), demo_tokenizer, tmp_path / "cache")

    first = folder()
    stamps = {file: file.stat().st_mtime_ns for file in first.iterdir()}
    assert torch.equal(read_sequences(first)[:], load(source, demo_tokenizer, tokens=1024))
    assert folder() == first
    assert {file: file.stat().st_mtime_ns for file in first.iterdir()} == stamps
    assert folder(seed=1) != first
    os.utime(source, ns=(time.time_ns(), time.time_ns() + 10**9))
    assert folder() != first


@pytest.mark.parametrize(
    ("source", "more", "message"),
    [
        ("{file}", {"tokens": 10**5}, r"needs 1562 sequences of 64 tokens.*found \d+ \(\d+ tokens in \d+ documents\)"),
        ("{file}", {"tokens": 10}, "10 tokens do not fill one sequence of 64"),
        ("{file}", {"length": 1}, "sequence_length must be at least 2"),
        ("{file}", {"split": "test"}, "split must be one of"),
        ("{file}", {"text_field": "body"}, r"expected a field 'body'.*got \['number', 'text'\].*--text-field"),
        ("{file}", {"text_field": "number"}, "must be text, or a list of messages, got int"),
        ("{folder}/none.jsonl", {}, "no such file"),
        ("none.csv", {}, "no such file"),
        ("{folder}/*.parquet", {}, "found none there"),
        ("no such/thing at all", {}, "neither 'builtin', nor 'stdlib', nor local text"),
        ("headfold-tests/no-such-set", {}, "cannot be opened as a data set"),
    ],
)
def test_bad_input_is_refused(
    source: str, more: dict[str, Any], message: str, jsonl: Path, demo_tokenizer: Any
) -> None:
    source = source.format(file=jsonl, folder=jsonl.parent)
    with pytest.raises(DataError, match=message):
        load(source, demo_tokenizer, **more)


@pytest.mark.parametrize(
    ("name", "content", "message"),
    [
        ("bad.jsonl", '{"text": "one"}\n{"text": "two}\n', "line 2 of bad.jsonl is not valid JSON"),
        ("bad.jsonl", '{"text": "one"}\n\n["two"]\n', "line 3 of bad.jsonl must be a JSON object"),
        ("bad.json", '[{"text": "one"},\n {"text": two}]\n', "line 2 of bad.json is not valid JSON"),
        ("table.csv", "text\none\n", ".csv is not read; expected .txt, .jsonl, .json, .parquet"),
        ("text", "one", "without a suffix is not read"),
        ("calls.jsonl", '{"messages": [{"who": "me", "content": "one"}]}\n', r"field 'messages'.*\['content', 'who'\]"),
        ("numbers.jsonl", '{"text": [1, 2]}\n', "must be text, or a list of messages, got list"),
    ],
)
def test_files_that_cannot_be_read_say_where_and_what(
    name: str, content: str, message: str, tmp_path: Path, demo_tokenizer: Any
) -> None:
    (tmp_path / name).write_text(content)
    with pytest.raises(DataError, match=message):
        load(tmp_path / name, demo_tokenizer)


def test_mixed_folder_and_empty_text_are_refused(tmp_path: Path, demo_tokenizer: Any) -> None:
    (tmp_path / "a.txt").write_text("")
    with pytest.raises(DataError, match="found 0 "):
        load(tmp_path, demo_tokenizer)
    (tmp_path / "b.jsonl").write_text("{}")
    with pytest.raises(DataError, match="files of one type"):
        load(tmp_path, demo_tokenizer)
