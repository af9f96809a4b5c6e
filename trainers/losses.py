"""Losses, all in nats a token.

Legend: B sequences, T tokens, V vocabulary, k logits kept, n = k (k - 1) / 2 pairs of them.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

DISTILLATIONS = ("none", "kl", "kl_bild")


def language_modelling(logits: Tensor, labels: Tensor) -> Tensor:
    """Mean cross-entropy of the next token: `logits [B, T, V]` at t are scored on `labels [B, T]` at t + 1.

    Labels of -100 are not scored. Computed in float32 at least, whatever the model's dtype.
    """
    predicted = _wide(logits[:, :-1]).flatten(0, 1)
    return F.cross_entropy(predicted, labels[:, 1:].flatten().long(), ignore_index=-100)


def kl(student: Tensor, teacher: Tensor, mask: Tensor | None = None) -> Tensor:
    """Mean over tokens of KL(teacher ‖ student) of what they predict; logits `[..., V]`, mask `[...]` bool."""
    log_student = _wide(student).log_softmax(-1)
    log_teacher = _wide(teacher).log_softmax(-1)
    return _mean(F.kl_div(log_student, log_teacher, reduction="none", log_target=True).sum(-1), mask)


def bild(student: Tensor, teacher: Tensor, k: int = 16, mask: Tensor | None = None) -> Tensor:
    """Bi-directional logit-difference loss (Li 2024, named by paper 001, appendix on distillation), mean over tokens.

    Take the k largest logits of one side and the other side's logits at the same places; the differences of all
    pairs i < j, `[..., n]` on each side, pass a softmax; KL(teacher ‖ student) of the two. Once with the teacher
    choosing the places and once with the student; the sum of both. Logits `[..., V]`, mask `[...]` bool.

    Paper 001 only names the loss. Decided here: no temperature, and the choice of places is not differentiated.
    Raises ValueError for a k below 3: two logits have one difference, whose softmax is 1 on both sides.
    """
    if not 3 <= k <= student.shape[-1]:
        raise ValueError(f"k must lie between 3 and the vocabulary of {student.shape[-1]}, got {k}")
    student, teacher = _wide(student), _wide(teacher)
    total = torch.zeros((), dtype=student.dtype, device=student.device)
    for leader in (teacher, student.detach()):
        places = leader.topk(k, dim=-1).indices
        log_student, log_teacher = (_differences(x.gather(-1, places)).log_softmax(-1) for x in (student, teacher))
        total = total + _mean(F.kl_div(log_student, log_teacher, reduction="none", log_target=True).sum(-1), mask)
    return total


def _differences(logits: Tensor) -> Tensor:
    first, second = torch.triu_indices(logits.shape[-1], logits.shape[-1], offset=1, device=logits.device)
    return logits[..., first] - logits[..., second]


def _wide(logits: Tensor) -> Tensor:
    return logits if logits.dtype == torch.float64 else logits.float()


def _mean(values: Tensor, mask: Tensor | None) -> Tensor:
    if mask is None:
        return values.mean()
    return (values * mask).sum() / mask.sum()


def objective(distillation: str = "none", weight: float = 0.5, teacher: Any = None) -> Callable[[Any, Tensor], Tensor]:
    """The training loss as the loop wants it, `f(model, batch [B, T]) -> scalar`.

    "none": language modelling. "kl": `(1 - weight)` of it and `weight` of KL(teacher ‖ model) on the same predictions.
    "kl_bild": KL + BiLD in the place of KL (paper 001, Eq. 30; its k is `bild`'s default, its weight 1).
    """
    if distillation not in DISTILLATIONS:
        raise ValueError(f"distillation must be one of {DISTILLATIONS}, got {distillation!r}")
    if distillation != "none" and teacher is None:
        raise ValueError(f"distillation {distillation!r} needs a teacher model, got None")

    def language(model: Any, batch: Tensor) -> Tensor:
        return language_modelling(model(input_ids=batch, use_cache=False).logits, batch)

    def distilled(model: Any, batch: Tensor) -> Tensor:
        logits = model(input_ids=batch, use_cache=False).logits
        with torch.no_grad():
            reference = teacher(input_ids=batch, use_cache=False).logits
        student, guide = logits[:, :-1], reference[:, :-1]
        distance = kl(student, guide) + (bild(student, guide) if distillation == "kl_bild" else 0)
        return weight * distance + ((1 - weight) * language_modelling(logits, batch) if weight < 1 else 0)

    return language if distillation == "none" else distilled
