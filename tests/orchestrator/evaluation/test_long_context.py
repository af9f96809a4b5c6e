"""Loss by position and recall of a hidden line: known numbers, a model that looks, and one that cannot."""

from __future__ import annotations

from itertools import pairwise
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from transformers import AutoModelForCausalLM, PreTrainedModel, PreTrainedTokenizerBase

from attention.base.progress import show_progress
from orchestrator.config.schema import ConfigError
from orchestrator.evaluation import long_context
from orchestrator.evaluation.extras import Extras
from orchestrator.evaluation.generations import encode_prompts
from orchestrator.evaluation.long_context import BINS, CANDIDATES, DEPTHS, NUM_TEXTS, Needles, context_lengths
from trainers.text.data import load_sequences


@pytest.fixture(scope="module")
def texts(demo_tokenizer: PreTrainedTokenizerBase) -> torch.Tensor:
    return load_sequences("stdlib", demo_tokenizer, split="eval", tokens=NUM_TEXTS * 128, sequence_length=128)


def test_the_loss_of_each_part_is_that_of_its_positions(demo_model: PreTrainedModel, texts: torch.Tensor) -> None:
    parts = long_context.loss_by_position(demo_model, texts)
    assert len(parts) == BINS
    assert (parts[0]["from"], parts[-1]["to"]) == (1, 128)
    assert all(one["to"] == other["from"] for one, other in pairwise(parts))
    with torch.no_grad():
        logits = demo_model(texts).logits[:, :-1].transpose(1, 2)
    losses = F.cross_entropy(logits, texts[:, 1:], reduction="none").mean(0)
    for part in parts:
        expected = losses[part["from"] - 1 : part["to"] - 1].mean().item()
        assert part["loss"] == pytest.approx(expected, abs=1e-5)


def test_a_line_lies_where_it_should_and_the_question_at_the_end(
    demo_tokenizer: PreTrainedTokenizerBase, texts: torch.Tensor
) -> None:
    needles = Needles.hide(texts, demo_tokenizer, 0)
    assert needles.ids.shape == (len(DEPTHS), NUM_TEXTS, CANDIDATES, 128)
    places = []
    for contexts in needles.ids:
        text, value = demo_tokenizer.decode(contexts[0, 1]), demo_tokenizer.decode(needles.candidates[0, 1])
        question = text[text.rindex("\n") :]
        assert text.count(f"{question}{value}'\n") == 1
        places.append(text.index(question))
    assert places == sorted(places)
    assert places[0] == 0 and places[-1] > places[1]
    again = Needles.hide(texts, demo_tokenizer, 0)
    assert torch.equal(needles.ids, again.ids)
    assert not torch.equal(needles.ids, Needles.hide(texts, demo_tokenizer, 1).ids)


def test_nothing_is_hidden_before_what_begins_every_text(chat_tokenizer: PreTrainedTokenizerBase) -> None:
    texts = load_sequences("stdlib", chat_tokenizer, split="eval", tokens=NUM_TEXTS * 128, sequence_length=128)
    needles = Needles.hide(texts, chat_tokenizer, 0)
    assert (needles.ids[..., 0] == 2047).all()
    assert (needles.ids[..., 1:] != 2047).float().mean() > 0.95
    assert encode_prompts(["a b"], chat_tokenizer, 512) == [chat_tokenizer("a b")["input_ids"]]


class Perfect(torch.nn.Module):
    """Answers with the token that followed the question's last three before, if there was one."""

    def __init__(self, words: int) -> None:
        super().__init__()
        self.config = SimpleNamespace()
        self.head = torch.nn.Linear(words, words, bias=False)
        self.head.weight.data = torch.eye(words)

    def get_output_embeddings(self) -> torch.nn.Module:
        return self.head

    def forward(self, input_ids: torch.Tensor, **_: Any) -> Any:
        states = torch.zeros(*input_ids.shape, self.head.in_features)
        for row, ids in enumerate(input_ids.tolist()):
            end = ids[-3:]
            found = [i for i in range(3, len(ids)) if ids[i - 3 : i] == end]
            states[row, -1, ids[found[-1]]] = 5.0
        return type("Output", (), {"logits": self.head(states)})()


@pytest.mark.extended
def test_who_finds_every_line_has_all_and_who_cannot_look_has_nothing(
    demo_tokenizer: PreTrainedTokenizerBase, texts: torch.Tensor, demo_model: PreTrainedModel
) -> None:
    needles = Needles.hide(texts, demo_tokenizer, 0)
    for found in needles.recall(Perfect(len(demo_tokenizer))):
        assert (found["recall"], found["greedy"], found["contexts"]) == (1.0, 1.0, NUM_TEXTS * CANDIDATES)
        assert found["margin"] == pytest.approx(5.0, abs=1e-4)
    with torch.random.fork_rng():
        torch.manual_seed(0)
        untrained = AutoModelForCausalLM.from_config(demo_model.config).eval()
    assert all(abs(found["margin"]) < 0.1 for found in needles.recall(untrained))
    seen = needles.recall(demo_model)
    assert seen[-1]["margin"] > 2
    assert seen[-1]["margin"] > seen[0]["margin"] > 3 * seen[0]["margin_stderr"]


@pytest.mark.parametrize(("given", "lengths"), [("max", [512]), ("256, 128", [128, 256]), ("512", [512])])
def test_lengths(given: str, lengths: list[int]) -> None:
    assert context_lengths(given, 512) == lengths


@pytest.mark.parametrize(("given", "said"), [("513", "513"), ("10", "10"), ("many", "'many'"), ("", "''")])
def test_lengths_that_cannot_be(given: str, said: str) -> None:
    with pytest.raises(ConfigError, match=said):
        context_lengths(given, 512)


def test_a_record_has_both_models_by_field(
    demo_model: PreTrainedModel, demo_tokenizer: PreTrainedTokenizerBase
) -> None:
    def held_out(length: int) -> torch.Tensor:
        return torch.randint(1000, (NUM_TEXTS, length), generator=torch.Generator().manual_seed(length))

    prepared = Extras(context_lengths="64,96").prepare(demo_tokenizer, 512, held_out, 0)
    lines: list[str] = []
    with show_progress("evaluate", lines.append, every=0):
        made = prepared.measure(demo_model)
    tokens = len(DEPTHS) * NUM_TEXTS * CANDIDATES * (64 + 96)
    assert lines[-1].startswith(f"recall in long contexts: {tokens} of {tokens} tokens")
    record = prepared.record({"checkpoint": made, "original": made})
    assert set(record) == {"long_context"}
    assert set(record["long_context"]["recall"]["original"]) == {"64", "96"}
    assert record["long_context"]["loss_by_position"]["checkpoint"][-1]["to"] == 96
