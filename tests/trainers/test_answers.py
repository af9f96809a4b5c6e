"""The loss of answers alone: which tokens are answers, and that the mean is over them."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor
from transformers import AutoTokenizer

from attention.modeling import predictions
from orchestrator.storage.shipped import shipped
from trainers.losses import objective
from trainers.text.answers import AnswerSpans, check_answers
from trainers.text.corpora import Conversation, DataError
from trainers.text.data import TextCut
from trainers.text.tokenising import tokenise

CHATML = (
    "{% for m in messages %}<|im_start|>{{ m['role'] }}\n{{ m['content'] }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
MESSAGES = [
    {"role": "user", "content": "What is x?"},
    {"role": "assistant", "content": "return x"},
    {"role": "user", "content": "And y?"},
    {"role": "assistant", "content": "def y():\n    pass"},
]
SPANS = AnswerSpans(prompt=(1, 2), ends=(3,))


def chat_tokenizer(template: str = CHATML) -> Any:
    tokenizer = AutoTokenizer.from_pretrained(shipped("examples/stdlib-llama/config.json").parent)
    tokenizer.add_special_tokens({"additional_special_tokens": ["<|im_start|>", "<|im_end|>"]})
    tokenizer.chat_template = template
    return tokenizer


def test_the_tokens_between_the_prompt_and_the_end_by_hand() -> None:
    ids = [[7, 3, 1, 2, 8, 9, 3, 5, 1, 2, 3, 6], [8, 9, 3, 1, 1, 2, 4, 1, 2, 4, 4, 1]]
    marked = [[0, 0, 0, 0, 1, 1, 1, 0, 0, 0, 1, 0], [0, 0, 0, 0, 0, 0, 1, 1, 1, 1, 1, 1]]
    assert SPANS.mask(torch.tensor(ids)).int().tolist() == marked
    assert not SPANS.mask(torch.tensor([[1, 2]])).any(), "nothing follows the prompt"


def test_a_template_says_where_answers_begin_and_end() -> None:
    tokenizer = chat_tokenizer()
    spans = AnswerSpans.of(tokenizer)
    assert tokenizer.decode(spans.prompt) == "<|im_start|>assistant\n"
    ids = torch.from_numpy(tokenise([Conversation.of(MESSAGES, "messages")], tokenizer).ids).long()[None]
    answers = tokenizer.decode(ids[spans.mask(ids)])
    assert answers == "return x<|im_end|>def y():\n    pass<|im_end|>"


def test_answers_with_a_header_and_an_end_that_is_only_the_last_one_s() -> None:
    """As gpt-oss writes them: the prompt is less than what stands before an answer."""
    template = (
        "{% for m in messages %}<|start|>{{ m['role'] }}{% if m['role'] == 'assistant' %}<|channel|>final{% endif %}"
        "<|message|>{{ m['content'] }}{% if loop.last and m['role'] == 'assistant' %}<|return|>{% else %}<|end|>"
        "{% endif %}{% endfor %}{% if add_generation_prompt %}<|start|>assistant{% endif %}"
    )
    tokenizer = chat_tokenizer(template)
    marks = ["<|start|>", "<|channel|>", "<|message|>", "<|end|>", "<|return|>"]
    tokenizer.add_special_tokens({"additional_special_tokens": marks})
    spans = AnswerSpans.of(tokenizer)
    assert sorted(tokenizer.decode(spans.ends).split("<")) == ["", "|end|>", "|return|>"]
    ids = torch.from_numpy(tokenise([Conversation.of(MESSAGES, "messages")], tokenizer).ids).long()[None]
    header = "<|channel|>final<|message|>"
    answers = tokenizer.decode(ids[spans.mask(ids)])
    assert answers == f"{header}return x<|end|>{header}def y():\n    pass<|return|>"


@pytest.mark.parametrize(
    ("template", "message"),
    [
        (None, "with a chat template"),
        (CHATML.partition("{% if")[0], "add_generation_prompt"),
        (CHATML.replace("assistant\n", "assistant\n<think>\n"), "add_generation_prompt"),
        (CHATML.replace("<|im_end|>", "."), "special token"),
        (CHATML.replace("m['content']", "m['content'] | upper"), "cannot be told from the rest"),
    ],
)
def test_a_template_that_hides_answers_is_refused(template: str, message: str) -> None:
    with pytest.raises(DataError, match=message):
        AnswerSpans.of(chat_tokenizer(template))


def test_a_text_without_conversations_is_refused(tmp_path: Any) -> None:
    (tmp_path / "a.jsonl").write_text('{"text": "a"}\n' * 9)
    with pytest.raises(DataError, match="needs conversations"):
        check_answers(TextCut(str(tmp_path / "a.jsonl"), "train", 64, 32), chat_tokenizer())


@pytest.fixture(params=[3, 1000])
def ids(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Tensor:
    """Two sequences with answers, whose logits exist for few positions at once, or for all."""
    monkeypatch.setattr(predictions, "positions_at_once", lambda *_: request.param)
    ids = torch.randint(4, 64, (2, 16), generator=torch.Generator().manual_seed(0))
    ids[0, 3:5] = torch.tensor(SPANS.prompt)
    ids[0, 9] = SPANS.ends[0]
    ids[1, 10:12] = torch.tensor(SPANS.prompt)
    return ids


@pytest.mark.parametrize("distillation", ["none", "kl"])
def test_the_loss_is_the_mean_over_answers(tiny_model: Any, ids: Tensor, distillation: str) -> None:
    model, teacher = tiny_model("llama"), tiny_model("llama", seed=1)
    result = objective(distillation, 1.0, teacher, answers=SPANS.mask)(model, ids)
    result.backward()
    counted = [(0, t) for t in range(5, 10)] + [(1, t) for t in range(12, 16)]
    with torch.no_grad():
        logs = [each(ids).logits.log_softmax(-1) for each in (model, teacher)]
    if distillation == "none":
        costs = [-logs[0][row, t - 1, ids[row, t]] for row, t in counted]
    else:
        costs = [
            F.kl_div(logs[0][row, t - 1], logs[1][row, t - 1], reduction="sum", log_target=True) for row, t in counted
        ]
    assert result.item() == pytest.approx(float(torch.stack(costs).mean()), abs=1e-5)
    assert model.get_input_embeddings().weight.grad.abs().sum() > 0


def test_sequences_without_answers_teach_nothing(tiny_model: Any, ids: Tensor) -> None:
    model = tiny_model("llama")
    loss = objective(answers=SPANS.mask)(model, ids.clamp_min(4))
    loss.backward()
    assert loss.item() == 0
    assert all(float(p.grad.abs().sum()) == 0 for p in model.parameters() if p.grad is not None)
