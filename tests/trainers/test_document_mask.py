"""Packed documents kept apart: the loss of a sequence is that of its documents alone, for every family."""

from __future__ import annotations

import copy
import json
from contextlib import closing
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from parameters import extended
from torch import Tensor

from attention.conversion.convert import convert
from attention.families import families
from attention.plan import AttentionPlan, Composition, LayerPlan
from trainers.engine import TrainEngine
from trainers.losses import objective
from trainers.settings import TrainSettings
from trainers.text.corpora import DataError
from trainers.text.data import TextCut
from trainers.text.documents import WITHOUT_MASKS, DocumentStarts, check_documents

END = 0
PLAN = AttentionPlan((LayerPlan((0, 0, 1, 1), (0, 1, 1, 0)), LayerPlan((0, 1, 2, 3), (0, 0, 0, 0))), head_dim=8)
STARTS = DocumentStarts(None, END)


@pytest.fixture(scope="module")
def documents() -> list[Tensor]:
    generator = torch.Generator().manual_seed(0)
    return [F.pad(torch.randint(1, 64, (n,), generator=generator), (0, 1), value=END) for n in (6, 11, 4)]


@torch.no_grad()
def alone(model: Any, documents: list[Tensor]) -> float:
    """Mean loss of what follows each token, each document run by itself."""
    row = torch.cat(documents)
    logits = torch.cat([model(document[None], use_cache=False).logits[0] for document in documents])
    return F.cross_entropy(logits[:-1].float(), row[1:]).item()


@pytest.mark.parametrize("name", sorted(families()))
def test_the_loss_of_a_sequence_is_that_of_its_documents(name: str, tiny_model: Any, documents: list[Tensor]) -> None:
    row = torch.cat(documents)[None]
    for model in (tiny_model(name), convert(tiny_model(name), PLAN)):
        expected = alone(model, documents)
        with torch.no_grad():
            masked = objective(positions=STARTS.positions)(model, row.expand(2, -1))
            whole = objective()(model, row)
        if name in WITHOUT_MASKS:  # refused; once transformers has them, this says so
            assert abs(masked.item() - expected) > 1e-3
            continue
        assert masked.item() == pytest.approx(expected, abs=2e-5)
        assert abs(whole.item() - expected) > 1e-3


def test_composed_heads_and_a_teacher_keep_documents_apart(tiny_model: Any, documents: list[Tensor]) -> None:
    row = torch.cat(documents)[None]
    plan = AttentionPlan((LayerPlan.identity(4),) * 2, head_dim=8, composition=Composition())
    model, teacher = convert(tiny_model("llama"), plan), tiny_model("llama", seed=1)
    with torch.no_grad():
        assert objective(positions=STARTS.positions)(model, row).item() == pytest.approx(
            alone(model, documents), abs=2e-5
        )
        result = objective("kl", 1.0, teacher, STARTS.positions)(model, row).item()
        logs = [
            torch.cat([each(document[None], use_cache=False).logits[0] for document in documents])[:-1].log_softmax(-1)
            for each in (model, teacher)
        ]
    assert result == pytest.approx(F.kl_div(*logs, reduction="none", log_target=True).sum(-1).mean().item(), abs=2e-5)


@pytest.mark.parametrize("stage", [1, extended(3)])
def test_they_are_kept_apart_in_training(tiny_model: Any, documents: list[Tensor], stage: int) -> None:
    row = torch.cat(documents)[None]
    settings = TrainSettings(batch_size=2, zero_stage=stage, activation_checkpointing=True)
    with closing(TrainEngine(tiny_model("llama"), settings, 2)) as engine:
        loss = engine.step(row.expand(2, -1), objective(positions=STARTS.positions))
    assert loss == pytest.approx(alone(tiny_model("llama"), documents), abs=2e-5)


def test_positions_start_again_with_each_document() -> None:
    ids = torch.tensor([[5, 6, END, 7, END, END, 8], [1, 2, 3, 4, 5, 6, 7]])
    assert STARTS.positions(ids).tolist() == [[0, 1, 2, 0, 1, 0, 0], [0, 1, 2, 3, 4, 5, 6]]
    # With a beginning token the end token alone starts nothing: a conversation may hold several
    ids = torch.tensor([[9, 5, END, 6, END, 9, 7]])
    assert DocumentStarts(9, END).positions(ids).tolist() == [[0, 1, 2, 3, 4, 0, 1]]


def test_conversations_that_cannot_be_distinguished_are_refused(
    tmp_path: Path, chat_tokenizer: Any, demo_tokenizer: Any
) -> None:
    file = tmp_path / "chat.jsonl"
    spoken = [[{"role": "user", "content": f"a {n}"}, {"role": "assistant", "content": "b"}] for n in range(30)]
    file.write_text("".join(f"{json.dumps({'messages': each})}\n" for each in spoken))
    cut = TextCut(str(file), "train", 64, 32)
    check_documents(cut, chat_tokenizer, "llama")
    with pytest.raises(DataError, match=r"train\.document_mask: headfold_opt makes no mask between packed"):
        check_documents(cut, chat_tokenizer, "headfold_opt")
    by_turns = copy.deepcopy(demo_tokenizer)
    by_turns.chat_template = "{% for m in messages %}{{ m['content'] }}{{ eos_token }}{% endfor %}"
    without_beginning = copy.deepcopy(chat_tokenizer)
    without_beginning.chat_template = by_turns.chat_template
    for tokenizer in (by_turns, without_beginning):
        with pytest.raises(DataError, match=r"chat\.jsonl: with train\.document_mask a conversation must begin"):
            check_documents(cut, tokenizer, "llama")
    plain = tmp_path / "plain.jsonl"
    plain.write_text("".join(f"{json.dumps({'text': f'a b {n}'})}\n" for n in range(30)))
    check_documents(TextCut(str(plain), "train", 64, 32), by_turns, "llama")
