"""The answers in packed conversations, so that training may count the loss of these alone.

A chat template writes an answer after the text that prompts for one, and ends it as it ends every
turn. Both are found once, from the template; then the answers of a sequence follow from its tokens.

Legend: B sequences, T tokens.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from torch import Tensor

from trainers.text.corpora import Conversation, DataError
from trainers.text.data import TextCut

_QUESTION = {"role": "user", "content": "grapefruit"}
_ANSWER = {"role": "assistant", "content": "porcupine"}  # words that no template has itself
_REMEDY = "set train.assistant_only_loss to false"


class AnswerSpans(NamedTuple):
    """By which tokens answers are found.

    Attributes:
        prompt: What stands before every answer.
        ends: What ends an answer: some templates end the last turn otherwise than the others.
    """

    prompt: tuple[int, ...]
    ends: tuple[int, ...]

    @classmethod
    def of(cls, tokenizer: Any) -> AnswerSpans:
        """Return those of a tokenizer's chat template.

        Raises:
            DataError: For a tokenizer without a template, and for a template that does not begin
                an answer as it prompts for one, or ends it with an ordinary token, and where the
                answers of a conversation are not what is found by these.
        """
        if not getattr(tokenizer, "chat_template", None):
            raise DataError(
                "train.assistant_only_loss needs a tokenizer with a chat template, which says "
                f"where an answer begins; {_REMEDY}"
            )
        question = tokenizer.apply_chat_template([_QUESTION], tokenize=False)
        asking = tokenizer.apply_chat_template(
            [_QUESTION], tokenize=False, add_generation_prompt=True
        )
        answered = tokenizer.apply_chat_template([_QUESTION, _ANSWER], tokenize=False)
        prompt = asking.removeprefix(question)
        answer = answered.removeprefix(asking)
        ids = _ids(tokenizer, asking)
        before = _ids(tokenizer, question)
        if not prompt or asking == prompt or answer == answered or ids[: len(before)] != before:
            raise DataError(
                "train.assistant_only_loss: the chat template must begin an answer with the text "
                f"by which it prompts for one (add_generation_prompt), and does not; {_REMEDY}"
            )
        content = _ANSWER["content"]
        text = tokenizer.apply_chat_template([_QUESTION, _ANSWER] * 2, tokenize=False)
        ends = [tuple(_ids(tokenizer, rest)[:1]) for rest in text.split(content)[1:]]
        special = _special_ids(tokenizer)
        for end in ends:
            if not special.issuperset(end) or not end:
                raise DataError(
                    "train.assistant_only_loss: the chat template must end an answer with a "
                    f"special token, got {tokenizer.decode(end)!r}; {_REMEDY}"
                )
        spans = cls(tuple(ids[len(before) :]), tuple(sorted({end[0] for end in ends})))
        conversation = torch.tensor([_ids(tokenizer, text)])
        found = tokenizer.decode(conversation[spans.mask(conversation)])
        if len(ends) != 2 or found.count(content) != 2 or _QUESTION["content"] in found:
            raise DataError(
                "train.assistant_only_loss: the answers of a conversation of two questions cannot "
                f"be told from the rest with this chat template, got {found!r}; {_REMEDY}"
            )
        return spans

    def mask(self, ids: Tensor) -> Tensor:
        """Return which tokens belong to answers, `[B, T]` bool, the end included.

        Those of an answer that began before the sequence do not.
        """
        index = torch.arange(ids.shape[1], device=ids.device).expand_as(ids)
        begins = torch.zeros_like(ids, dtype=torch.bool)
        if ids.shape[1] > len(self.prompt):
            prompt = torch.tensor(self.prompt, device=ids.device, dtype=ids.dtype)
            prompt_starts = (ids.unfold(1, len(self.prompt), 1) == prompt).all(-1)
            begins[:, len(self.prompt) :] = prompt_starts[:, :-1]
        ended = torch.zeros_like(begins)
        ended[:, 1:] = torch.isin(ids[:, :-1], ids.new_tensor(self.ends))
        last_begin = torch.where(begins, index, -1).cummax(1).values
        last_end = torch.where(ended, index, -1).cummax(1).values
        return (last_begin >= 0) & (begins | (last_begin > last_end))


def _ids(tokenizer: Any, text: str) -> list[int]:
    return list(tokenizer(text, add_special_tokens=False)["input_ids"])


def _special_ids(tokenizer: Any) -> set[int]:
    """Return the ids of tokens that no ordinary text contains."""
    added = getattr(tokenizer, "added_tokens_decoder", {})
    marked = {index for index, token in added.items() if getattr(token, "special", False)}
    return marked | set(tokenizer.all_special_ids)


def check_answers(cut: TextCut, tokenizer: Any) -> None:
    """Check that the answers of a text can be found once it is packed.

    Raises:
        DataError: For a text without conversations, or a chat template that hides them.
    """
    AnswerSpans.of(tokenizer)
    text = cut.first_document()
    if text is not None and not isinstance(text, Conversation):
        raise DataError(
            f"{cut.source}: train.assistant_only_loss needs conversations (a field `messages` or "
            f"`conversations`), and the records have text; {_REMEDY}"
        )
