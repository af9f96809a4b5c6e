"""Texts to token sets: the same set in one go, after kills and in many shards; nothing is tokenised twice."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from trainers.text.corpora import DataError
from trainers.text.data import TextCut, load_sequences, token_set
from trainers.text.token_sets import is_complete, read_sequences
from trainers.text.tokenising import PARALLELISM, TokenBlock, text_blocks, tokenise, tokenise_here

LENGTH, SEQUENCES, PER_SHARD = 64, 300, 40
SHARD_TOKENS = PER_SHARD * LENGTH
DOCUMENTS = [f"document {n}: " + " ".join(f"word{(n * k) % 97}" for k in range(n % 70)) for n in range(700)]


@pytest.fixture(scope="module")
def cut(tmp_path_factory: pytest.TempPathFactory) -> TextCut:
    file = tmp_path_factory.mktemp("text") / "corpus.jsonl"
    file.write_text("".join(json.dumps({"text": text}) + "\n" for text in DOCUMENTS))
    return TextCut(str(file), "train", SEQUENCES * LENGTH, LENGTH, seed=5)


@pytest.fixture(scope="module")
def calm(cut: TextCut, demo_tokenizer: Any, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return token_set(cut, demo_tokenizer, tmp_path_factory.mktemp("cache"), shard_tokens=SHARD_TOKENS)


class Killed(BaseException):
    """Raised instead of a signal, at a known moment."""


class Counting:
    """Tokenises in this process, notes what, and stops after so many blocks."""

    def __init__(self, limit: int = 1000) -> None:
        self.documents: list[str] = []
        self._left = limit

    def __call__(self, texts: Iterable[list[str]], tokenizer: Any) -> Iterator[TokenBlock]:
        for block in texts:
            if not self._left:
                raise Killed
            self._left -= 1
            self.documents += block
            yield tokenise(block, tokenizer)


def small(texts: Iterable[list[str]]) -> Iterator[list[str]]:
    """The same documents one by one."""
    return ([text] for block in texts for text in block)


def test_shards_hold_the_concatenation_of_all_documents(cut: TextCut, calm: Path, demo_tokenizer: Any) -> None:
    whole = load_sequences(cut.source, demo_tokenizer, split="train", tokens=cut.tokens, sequence_length=LENGTH, seed=5)
    assert torch.equal(read_sequences(calm)[:], whole)
    assert len(list(calm.glob("*.safetensors"))) == 8  # seven of 40 sequences and one of 20
    assert sorted(f.name for f in calm.iterdir() if f.suffix == ".json") == ["index.json"]


def test_how_the_text_is_divided_into_blocks_changes_nothing(
    cut: TextCut, calm: Path, demo_tokenizer: Any, tmp_path: Path
) -> None:
    def one_by_one(texts: Iterable[list[str]], tokenizer: Any) -> Iterator[TokenBlock]:
        return tokenise_here(small(texts), tokenizer)

    other = token_set(cut, demo_tokenizer, tmp_path, shard_tokens=SHARD_TOKENS, tokenise=one_by_one)
    assert other.name == calm.name
    assert read_sequences(other).digest == read_sequences(calm).digest


@pytest.mark.parametrize("before", [None, "false"])
def test_tokens_are_those_of_the_tokenizer_and_its_threads_are_given_back(
    before: str | None, demo_tokenizer: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    texts = [*DOCUMENTS[:40], "", "déjà vu 漢字 \x00 <|endoftext|>"]
    monkeypatch.setenv(PARALLELISM, before) if before else monkeypatch.delenv(PARALLELISM, raising=False)
    (block,) = tokenise_here([texts], demo_tokenizer)
    assert os.environ.get(PARALLELISM) == before
    alone = [demo_tokenizer(text, add_special_tokens=False)["input_ids"] for text in texts]
    assert block.ids.tolist() == [token for ids in alone for token in [*ids, demo_tokenizer.eos_token_id]]
    assert block.ends.tolist() == np.cumsum([len(ids) + 1 for ids in alone]).tolist()


def test_a_block_is_bounded_in_documents_and_in_characters() -> None:
    result = list(text_blocks(iter(["a"] * 300 + ["b" * 600_000] * 3 + ["c"] * 300)))
    assert [len(block) for block in result] == [256, 44 + 2, 1 + 209, 91]
    assert [text for block in result for text in block] == ["a"] * 300 + ["b" * 600_000] * 3 + ["c"] * 300


@pytest.mark.parametrize("limit", [1, 20, 21, 70, 110])
def test_a_killed_run_resumes_without_tokenising_what_is_written(
    limit: int, cut: TextCut, calm: Path, demo_tokenizer: Any, tmp_path: Path
) -> None:
    def run(counting: Counting) -> Path:
        def one_by_one(texts: Iterable[list[str]], tokenizer: Any) -> Iterator[TokenBlock]:
            return counting(small(texts), tokenizer)

        return token_set(cut, demo_tokenizer, tmp_path, shard_tokens=SHARD_TOKENS, tokenise=one_by_one)

    first, second = Counting(limit), Counting()
    with pytest.raises(Killed):
        run(first)
    folder = cut.folder(demo_tokenizer, tmp_path, SHARD_TOKENS)
    assert not is_complete(folder)
    assert run(second) == folder
    assert read_sequences(folder).digest == read_sequences(calm).digest
    twice = set(first.documents) & set(second.documents)
    longest = max(len(demo_tokenizer(text)["input_ids"]) for text in DOCUMENTS) + 1
    in_a_shard = sum(len(demo_tokenizer(text)["input_ids"]) + 1 for text in twice)
    assert in_a_shard <= SHARD_TOKENS + 2 * longest  # of what was not written yet, and where two shards meet


def test_a_damaged_set_is_mended_where_it_is_damaged(
    cut: TextCut, calm: Path, demo_tokenizer: Any, tmp_path: Path
) -> None:
    folder = token_set(cut, demo_tokenizer, tmp_path, shard_tokens=SHARD_TOKENS)
    for number in (2, 5):
        file = folder / f"{number:05d}.safetensors"
        file.write_bytes(file.read_bytes()[:-2])
    stamps = {file: file.stat().st_ino for file in folder.glob("*.safetensors")}
    counting = Counting()
    assert token_set(cut, demo_tokenizer, tmp_path, shard_tokens=SHARD_TOKENS, tokenise=counting) == folder
    assert read_sequences(folder).digest == read_sequences(calm).digest
    assert [file.name[:5] for file, inode in sorted(stamps.items()) if file.stat().st_ino != inode] == [
        "00002",
        "00005",
    ]


def test_too_little_text_is_reported_with_what_there_is_also_after_a_kill(
    cut: TextCut, demo_tokenizer: Any, tmp_path: Path
) -> None:
    more = TextCut(cut.source, "train", 200_000, LENGTH, seed=5)
    output = []
    for _ in range(2):  # the second time the first shards are there
        with pytest.raises(DataError, match=r"needs 3125 sequences of 64 tokens \(200000\), found \d+ \(") as caught:
            token_set(more, demo_tokenizer, tmp_path, shard_tokens=SHARD_TOKENS)
        output.append(str(caught.value))
    assert output[0] == output[1]
    with pytest.raises(DataError, match=r"needs 100000000 tokens, and all its text has \d+ at most; ask for fewer"):
        TextCut(cut.source, "train", 10**8, LENGTH).check()


KILLABLE = """
import sys, time
from trainers.text.data import TextCut, token_set
from trainers.text.tokenising import tokenise
from attention.io.tokenizers import read_tokenizer

def slowly(blocks, tokenizer):
    for block in blocks:
        time.sleep(1)
        yield tokenise(block, tokenizer)

source, model, cache = sys.argv[1:]
token_set(TextCut(source, "train", {tokens}, {length}, seed=5), read_tokenizer(model), cache, tokenise=slowly,
          shard_tokens={shard})
"""


@pytest.mark.extended
def test_a_process_that_is_killed_leaves_what_another_resumes_from(
    cut: TextCut, calm: Path, demo_tokenizer: Any, demo_dir: Path, tmp_path: Path
) -> None:
    code = KILLABLE.format(tokens=cut.tokens, length=LENGTH, shard=SHARD_TOKENS)
    command = [sys.executable, "-c", code, cut.source, str(demo_dir), str(tmp_path)]
    process = subprocess.Popen(command, env={**os.environ, "HF_HUB_OFFLINE": "1"})
    try:
        deadline = time.monotonic() + 120
        while not list(tmp_path.glob("*/00000.safetensors")) and time.monotonic() < deadline:
            time.sleep(0.01)
    finally:
        process.send_signal(signal.SIGKILL)
        process.wait()
    folder = cut.folder(demo_tokenizer, tmp_path, SHARD_TOKENS)
    assert list(folder.glob("*.safetensors"))
    assert not is_complete(folder)
    assert token_set(cut, demo_tokenizer, tmp_path, shard_tokens=SHARD_TOKENS) == folder
    assert read_sequences(folder).digest == read_sequences(calm).digest
