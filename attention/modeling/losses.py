"""What predictions cost, in nats a token; the one place where the loss of a model is written down.

Legend: B sequences, T tokens, V vocabulary.
"""

from __future__ import annotations

from collections.abc import Iterable

import torch
import torch.nn.functional as F
from torch import Tensor
from transformers import PreTrainedModel


def language_modelling(logits: Tensor, labels: Tensor, reduction: str = "mean") -> Tensor:
    """Mean (or sum) cross-entropy of the next token: `logits [B, T, V]` at t are scored on `labels [B, T]` at t + 1.

    Labels of -100 are not scored. Computed in float32 at least, whatever the model's dtype.
    """
    predicted = wide(logits[:, :-1]).flatten(0, 1)
    return F.cross_entropy(predicted, labels[:, 1:].flatten().long(), ignore_index=-100, reduction=reduction)


def kl(student: Tensor, teacher: Tensor) -> Tensor:
    """Mean over tokens of KL(teacher ‖ student) of what they predict; logits `[..., V]`."""
    return divergence(wide(student), wide(teacher))


def divergence(student: Tensor, teacher: Tensor) -> Tensor:
    """Mean over all but the last dim of KL(softmax of teacher ‖ softmax of student)."""
    log_student, log_teacher = student.log_softmax(-1), teacher.log_softmax(-1)
    return F.kl_div(log_student, log_teacher, reduction="none", log_target=True).sum(-1).mean()


def wide(logits: Tensor) -> Tensor:
    return logits if logits.dtype == torch.float64 else logits.float()


def mean_loss(predicted: Iterable[tuple[Tensor, Tensor]]) -> float:
    """Mean next-token loss over batches of (logits `[B, T, V]`, ids `[B, T]`), one batch in memory at a time."""
    total, count = 0.0, 0
    for logits, ids in predicted:
        total += float(language_modelling(logits, ids.to(logits.device), "sum"))
        count += ids[:, 1:].numel()
    return total / count


@torch.no_grad()
def language_loss(model: PreTrainedModel, sequences: Tensor, *, batch_size: int = 8) -> float:
    """Mean next-token loss of `sequences` `[N, T]`, in the mode that the model is in."""
    batches = sequences.split(batch_size)
    return mean_loss((model(batch.to(model.device), use_cache=False).logits, batch) for batch in batches)
