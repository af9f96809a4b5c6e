"""`synthetic:NAME` as a source of text: sides, determinism, names, and answers that a model must give."""

from __future__ import annotations

import re
import subprocess
import sys
from itertools import islice
from pathlib import Path

import pytest
import torch
from transformers import AutoTokenizer

from attention.conversion.convert import build
from attention.io.checkpoint import load_config
from attention.modeling.model_classes import plan_of_config
from trainers.text import synthetic_corpus
from trainers.text.corpora import DataError, resolve
from trainers.text.data import load_sequences
from trainers.text.synthetic import all_tasks, vocabulary

REPOSITORY = Path(__file__).resolve().parents[3]

FINGERPRINT = "620e4f4045e599de4e4c854fbdc9fa8ea4fdb5c42e39535e2483f0907916ccf2"


@pytest.fixture(scope="module")
def words(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The output of examples/make_words.py."""
    out = tmp_path_factory.mktemp("words") / "words"
    command = [sys.executable, str(REPOSITORY / "examples" / "make_words.py"), "--out", str(out)]
    subprocess.run(command, check=True, cwd=REPOSITORY)
    return out


def test_documents_are_the_same_in_every_call_and_others_on_each_side() -> None:
    corpus = resolve("synthetic:all")
    first, again, other = (list(islice(corpus.documents("train", "text", seed), 40)) for seed in (0, 0, 1))
    held_out = list(corpus.documents("held_out", "text", None))
    assert first == again and first != other
    assert len(held_out) == synthetic_corpus.HELD_OUT and not set(first) & set(held_out)
    assert held_out == list(corpus.documents("held_out", "text", None))
    assert resolve("synthetic:all").fingerprint == corpus.fingerprint != resolve("synthetic:first").fingerprint


@pytest.mark.parametrize("name", synthetic_corpus.names())
def test_names(name: str) -> None:
    train, requested = (set(synthetic_corpus.tasks_of(name, side)) for side in (True, False))
    if name == "new-pairs":
        assert not train & requested and train | requested == set(all_tasks()) and len(requested) == 15
    else:
        assert train == requested
    if name not in ("all", "new-pairs"):
        assert {task.pattern.replace(" ", "-") for task in train} == {name}


def test_an_unknown_name_is_refused() -> None:
    with pytest.raises(DataError, match="synthetic:induction: expected one of all, new-pairs, same-person"):
        resolve("synthetic:induction")


@pytest.mark.extended
def test_the_example_tokenizer_has_every_word_and_a_model_can_answer(words: Path) -> None:
    tokenizer = AutoTokenizer.from_pretrained(words)
    ids = {word: index for index, word in enumerate(vocabulary())}
    for text in islice(synthetic_corpus.documents("all", True, 3), 50):
        expected = [ids[word] for word in re.findall(r"\w+|\n|[^\w\s]", text)]
        assert tokenizer.encode(text, add_special_tokens=False) == expected
    rows = load_sequences("synthetic:odd-one", tokenizer, split="eval", tokens=1024, sequence_length=64)
    assert rows.shape == (16, 64) and int(rows.max()) < len(ids)
    config = load_config(words)
    torch.manual_seed(0)
    model = build(config, plan_of_config(config)).eval()
    result = synthetic_corpus.score_held_out(model, tokenizer, "odd-one", per_task=2)
    assert result.count == 2 * len(synthetic_corpus.tasks_of("odd-one", False))
    assert result.accuracy < 0.3 and result.perplexity > 50  # it has learned nothing yet


def test_sets_of_tokens_made_before_stay_valid() -> None:
    """A change here needs a change of the words or the tasks, and makes all sets anew."""
    assert synthetic_corpus.fingerprint() == FINGERPRINT
