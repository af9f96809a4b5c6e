"""The third text: held-out documents that the evaluation text does not touch."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from trainers.text.corpora import DataError, is_held_out
from trainers.text.data import TextCut, load_sequences, token_set
from trainers.text.token_sets import read_sequences
from trainers.text.unseen import UnseenCut, documents_of

LENGTH = 32


@pytest.fixture(scope="module")
def corpus(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """4,000 documents of some 20 tokens, of which 200 are held out."""
    file = tmp_path_factory.mktemp("text") / "corpus.jsonl"
    random = np.random.default_rng(0)
    texts = (f"number {n}: {' '.join(map(str, random.integers(100, size=8)))}" for n in range(4000))
    file.write_text("".join(json.dumps({"text": text}) + "\n" for text in texts))
    return file


def cut(source: Path, tokens: int) -> TextCut:
    return TextCut(str(source), "eval", tokens, LENGTH)


def names(sequences: torch.Tensor, tokenizer: Any) -> set[str]:
    """Names of the documents whose beginning is in the sequences."""
    parts = (part for row in sequences.tolist() for part in tokenizer.decode(row).split("number ")[1:])
    return {part.split(":")[0] for part in parts if ":" in part}


def test_it_has_held_out_documents_of_which_the_evaluation_text_has_no_token(
    corpus: Path, demo_tokenizer: Any, tmp_path: Path
) -> None:
    seen = cut(corpus, 32 * LENGTH)
    before = read_sequences(token_set(seen, demo_tokenizer, tmp_path / "alone")).digest
    folder = token_set(UnseenCut(seen, seen), demo_tokenizer, tmp_path)
    evaluation = read_sequences(token_set(seen, demo_tokenizer, tmp_path))
    unseen = read_sequences(folder)[:]
    assert evaluation.digest == before
    assert unseen.shape == (32, LENGTH)
    held_out = {
        str(n) for n, line in enumerate(corpus.read_text().splitlines()) if is_held_out(json.loads(line)["text"])
    }
    ours, theirs = names(unseen, demo_tokenizer), names(evaluation[:], demo_tokenizer)
    assert len(ours) > 20 and len(theirs) > 20
    assert not ours & theirs
    assert ours <= held_out
    trained = load_sequences(str(corpus), demo_tokenizer, split="train", tokens=20_000, sequence_length=LENGTH)
    assert not ours & names(trained, demo_tokenizer)


def test_every_token_has_the_number_of_its_document(corpus: Path, demo_tokenizer: Any, tmp_path: Path) -> None:
    seen = cut(corpus, 16 * LENGTH)
    folder = token_set(UnseenCut(seen, seen), demo_tokenizer, tmp_path)
    sequences, documents = read_sequences(folder)[:], documents_of(folder)
    assert documents.shape == sequences.shape
    # Another document begins after each end token and nowhere else
    ends = sequences[:, :-1] == demo_tokenizer.eos_token_id
    assert torch.equal(documents.diff() > 0, ends)
    assert (documents.flatten().diff() >= 0).all()
    plain = token_set(seen, demo_tokenizer, tmp_path)
    assert torch.equal(documents_of(plain)[:, 0], torch.arange(16)), "each sequence counts as one"


def test_text_that_is_too_small_for_three_is_refused(corpus: Path, demo_tokenizer: Any, tmp_path: Path) -> None:
    small = tmp_path / "small.jsonl"
    small.write_text("".join(corpus.read_text().splitlines(keepends=True)[:200]))
    seen = cut(small, 4 * LENGTH)
    with pytest.raises(DataError, match=r"leave \d+ tokens in \d+ documents, expected at least 128 in 2"):
        token_set(UnseenCut(seen, seen), demo_tokenizer, tmp_path)
