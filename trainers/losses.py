"""Losses, all in nats per token.

Legend: B sequences, T tokens, V vocabulary, k logits kept, n = k (k - 1) / 2 pairs of them.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from attention.modeling.losses import divergence, kl, language_modelling, prediction_losses, wide
from attention.modeling.predictions import Final, final, mean_cost
from trainers.loop import CountedLoss, LossFunction

__all__ = [
    "DISTILLATIONS",
    "bild",
    "kl",
    "language_modelling",
    "objective",
    "prediction_losses",
    "stored_kl",
]

DISTILLATIONS = ("none", "kl", "kl_bild")
_NOTHING = -50.0  # logarithm of a probability that adds nothing, instead of -inf


def bild(student: Tensor, teacher: Tensor, k: int = 16) -> Tensor:
    """Return the bi-directional logit-difference loss (Li 2024), mean over tokens.

    Jin 2024 only names it, in the appendix on distillation. Take the k largest logits of one side
    and the other side's logits at the same indices; the differences of all pairs i < j, `[..., n]`
    on each side, pass a softmax; KL(teacher ‖ student) of the two. Once with the teacher choosing
    the indices and once with the student; the sum of both. Decided here: no temperature, and the
    choice of indices is not differentiated.

    Args:
        student: `[..., V]` logits.
        teacher: `[..., V]` logits.
        k: Number of logits.

    Raises:
        ValueError: For a k below 3: two logits have one difference, whose softmax is 1 on both
            sides.
    """
    if not 3 <= k <= student.shape[-1]:
        raise ValueError(f"k must lie between 3 and the vocabulary of {student.shape[-1]}, got {k}")
    student = wide(student)
    teacher = wide(teacher)
    total = torch.zeros((), dtype=student.dtype, device=student.device)
    for leader in (teacher, student.detach()):
        indices = leader.topk(k, dim=-1).indices
        total = total + divergence(
            *(_differences(x.gather(-1, indices)) for x in (student, teacher))
        )
    return total


def _differences(logits: Tensor) -> Tensor:
    first, second = torch.triu_indices(
        logits.shape[-1], logits.shape[-1], offset=1, device=logits.device
    )
    return logits[..., first] - logits[..., second]


def stored_kl(student: Tensor, stored: Tensor) -> Tensor:
    """Mean over tokens of KL(teacher ‖ student) where k of the teacher's probabilities are known.

    The other tokens count as one, with the probability that they have together: a lower bound of
    the whole divergence, and the divergence itself where k is the vocabulary.

    Args:
        student: Logits `[P, V]`.
        stored: `[P, 2 k + 1]`: the k largest log-probabilities of the teacher, their tokens, and
            the logarithm of the remaining probability (`trainers.jobs.teacher_logits`).
    """
    k = (stored.shape[-1] - 1) // 2
    largest, indices, rest = stored.split([k, k, 1], dim=-1)
    indices = indices.long()
    rest = rest.clamp(min=_NOTHING)
    # Perhaps rounded when they were stored: with the rest they are to make 1
    largest = largest + torch.log1p(-rest.exp()) - largest.logsumexp(-1, keepdim=True)
    log_student = wide(student).log_softmax(-1)
    total = largest.exp() * (largest - log_student.gather(-1, indices))
    if k == student.shape[-1]:
        return total.sum(-1).mean()
    student_rest = log_student.scatter(-1, indices, -torch.inf).logsumexp(-1, keepdim=True)
    return (total.sum(-1, keepdim=True) + rest.exp() * (rest - student_rest)).mean()


def objective(
    distillation: str = "none",
    weight: float = 0.5,
    teacher: Any = None,
    positions: Callable[[Tensor], Tensor] | None = None,
    stored: Callable[[Tensor], Final] | None = None,
    answers: Callable[[Tensor], Tensor] | None = None,
) -> LossFunction:
    """Return the training loss as a function for the loop.

    "none": language modelling. "kl": `(1 - weight)` of it and `weight` of KL(teacher ‖ model) on
    the same predictions. "kl_bild": KL + BiLD instead of KL (Jin 2024, Eq. 30; its k is `bild`'s
    default, its weight 1). Of a teacher only the hidden states are computed before the model runs
    (`attention.modeling.predictions`).

    Args:
        positions: Of the tokens of a batch, where documents are kept apart
            (`trainers.text.documents`); both models are given them.
        stored: Stored predictions of the teacher, which replace it (`stored_kl`).
        answers: Which tokens of a batch are counted, where not all are (`trainers.text.answers`).
    """
    if distillation not in DISTILLATIONS:
        raise ValueError(f"distillation must be one of {DISTILLATIONS}, got {distillation!r}")
    if distillation != "none" and teacher is None and stored is None:
        raise ValueError(f"distillation {distillation!r} needs a teacher model, got None")

    def cost(logits: Tensor, labels: Tensor, guide: Tensor | None) -> Tensor:
        if guide is None:
            return language_modelling(logits, labels)
        if stored is not None:
            distance = stored_kl(logits, guide)
        else:
            distance = kl(logits, guide)
            if distillation == "kl_bild":
                distance = distance + bild(logits, guide)
        return weight * distance + (
            (1 - weight) * language_modelling(logits, labels) if weight < 1 else 0
        )

    def loss(model: Any, batch: Tensor, rows: int | None = None) -> Tensor:
        reference = None
        more: dict[str, Any] = {} if positions is None else {"position_ids": positions(batch)}
        if distillation != "none":
            with torch.no_grad():
                if stored is None:
                    reference = final(teacher, batch, **more)
                else:
                    reference = stored(batch)
        counted = None if answers is None else answers(batch)
        return mean_cost(model, batch, cost, reference, rows, counted, **more)

    if answers is None:
        return loss
    return CountedLoss(loss, lambda batch: int(answers(batch)[:, 1:].sum()))
