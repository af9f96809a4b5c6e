"""Losses of predictions, in nats per token.

The one place where the loss of a model is written down.

Legend: B sequences, T tokens, V vocabulary, P positions.
"""

from __future__ import annotations

from collections.abc import Iterable

import torch
import torch.nn.functional as F
from torch import Tensor
from transformers import PreTrainedModel

from attention.modeling.predictions import mean_cost
from attention.modeling.running import AT_ONCE, batch_of


def language_modelling(logits: Tensor, labels: Tensor, _: Tensor | None = None) -> Tensor:
    """Mean cross-entropy of the tokens that come next, `labels [P]`, under `logits [P, V]`.

    A `Cost`.

    Computed in float32 at least, in any dtype of the model.
    """
    return F.cross_entropy(wide(logits), labels.long())


def prediction_losses(logits: Tensor, labels: Tensor) -> Tensor:
    """Return the same of each token, `[P]` float64, for means over parts of them."""
    return F.cross_entropy(wide(logits), labels.long(), reduction="none").double()


def kl(student: Tensor, teacher: Tensor) -> Tensor:
    """Mean over tokens of KL(teacher ‖ student) of what they predict; logits `[..., V]`."""
    return divergence(wide(student), wide(teacher))


def divergence(student: Tensor, teacher: Tensor) -> Tensor:
    """Mean over all but the last dim of KL(softmax of teacher ‖ softmax of student)."""
    log_student = student.log_softmax(-1)
    log_teacher = teacher.log_softmax(-1)
    if torch.is_grad_enabled():
        return F.kl_div(log_student, log_teacher, reduction="none", log_target=True).sum(-1).mean()
    # In place: on a CPU new memory for so many numbers takes longer than computing them
    difference = log_teacher - log_student
    return log_teacher.exp_().mul_(difference).sum(-1).mean()


def wide(logits: Tensor) -> Tensor:
    """Return logits in float32 at least."""
    return logits if logits.dtype == torch.float64 else logits.float()


def mean_loss(losses: Iterable[tuple[Tensor, Tensor]]) -> float:
    """Mean next-token loss over batches of (mean loss of the batch, its ids `[B, T]`)."""
    total = torch.zeros((), dtype=torch.float64)
    count = 0
    for loss, ids in losses:  # nothing here waits for a GPU
        total = total + loss.double() * ids[:, 1:].numel()
        count += ids[:, 1:].numel()
    return float(total) / count


@torch.no_grad()
def language_loss(model: PreTrainedModel, sequences: Tensor, *, batch_size: int = AT_ONCE) -> float:
    """Mean next-token loss of `sequences` `[N, T]`, in the mode that the model is in."""
    batches = sequences.split(batch_of(sequences.shape[1], batch_size))
    return mean_loss(
        (mean_cost(model, batch.to(model.device), language_modelling), batch) for batch in batches
    )
