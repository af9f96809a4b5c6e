"""Requirements of a training on its text, checked before anything is tokenised."""

from __future__ import annotations

from typing import Any

from trainers.settings import TrainSettings
from trainers.text.answers import check_answers
from trainers.text.data import TextCut
from trainers.text.documents import check_documents


def check_packing(settings: TrainSettings, cut: TextCut, tokenizer: Any, model_type: str) -> None:
    """Check that documents, and answers, are found in packed sequences where a training needs them.

    Raises:
        DataError: For a model, text or tokenizer with which they are not.
    """
    if settings.document_mask:
        check_documents(cut, tokenizer, model_type)
    if settings.assistant_only_loss:
        check_answers(cut, tokenizer)
