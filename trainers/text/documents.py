"""The documents of packed sequences, which may be kept apart in training.

A sequence is a piece of a text, in which documents follow each other. Where attention is to stay
within each of them, a model is given positions that start again with every document: transformers
masks attention between the runs of such positions, and none of its caches are in use in training.

Legend: B sequences, T tokens.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from torch import Tensor

from trainers.text.corpora import Conversation, DataError
from trainers.text.data import TextCut
from trainers.text.tokenising import beginning, check_end_token, tokenise

WITHOUT_MASKS = ("gpt_oss", "opt")
"""Model types of transformers that make no mask from the positions of packed documents [5.23]."""


class DocumentStarts(NamedTuple):
    """The tokens that separate documents.

    Attributes:
        first: What every document begins with; None where the tokenizer puts nothing there.
        end: What every document ends with.
    """

    first: int | None
    end: int

    @classmethod
    def of(cls, tokenizer: Any) -> DocumentStarts:
        check_end_token(tokenizer)
        first = beginning(tokenizer)
        return cls(first[0] if first else None, tokenizer.eos_token_id)

    def positions(self, ids: Tensor) -> Tensor:
        """Return the position of each token in its document, `[B, T]`, for sequences `[B, T]`.

        A document that a sequence begins within counts from there.
        """
        if self.first is not None:
            starts = ids == self.first
        else:
            starts = torch.zeros_like(ids, dtype=torch.bool)
            starts[:, 1:] = ids[:, :-1] == self.end
        index = torch.arange(ids.shape[1], device=ids.device).expand_as(ids)
        # What stands before the first start counts from the beginning of the sequence
        return index - torch.where(starts, index, 0).cummax(1).values


def check_documents(cut: TextCut, tokenizer: Any, model_type: str) -> None:
    """Check that the documents of a text can be separated once they are packed.

    Raises:
        DataError: For a type of model that would let them attend to each other all the same, and
            for conversations whose chat template ends each turn with the end token, or does
            not begin them as the tokenizer begins a text.
    """
    if model_type.removeprefix("headfold_") in WITHOUT_MASKS:  # or of a converted one
        raise DataError(
            f"train.document_mask: {model_type} makes no mask between packed documents in "
            "transformers; set it to false"
        )
    text = cut.first_document()
    if not isinstance(text, Conversation):
        return
    starts = DocumentStarts.of(tokenizer)
    ids = torch.from_numpy(tokenise([text], tokenizer).ids)[None]
    whole = torch.arange(ids.shape[1])[None]
    if not torch.equal(starts.positions(ids), whole) or starts.first not in (None, int(ids[0, 0])):
        raise DataError(
            f"{cut.source}: with train.document_mask a conversation must begin with the "
            "tokenizer's beginning token, or hold its end token at its end alone; its chat "
            "template writes it otherwise, so set train.document_mask to false"
        )
