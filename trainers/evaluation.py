"""Measure a model: held-out loss, distance to the original model, bytes in the cache, speed.

Legend: N sequences, T tokens per sequence, V vocabulary.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from attention.base.products import exact_products
from attention.base.progress import stage
from attention.modeling.grouped import cache_bytes
from attention.modeling.growing_cache import cache_of, next_output
from attention.modeling.predictions import Final, final, in_chunks, mean_cost
from attention.modeling.running import AT_ONCE, batch_of, evaluating
from trainers.losses import kl, prediction_losses
from trainers.out_of_memory import free_memory, is_out_of_memory


@dataclass(frozen=True)
class Evaluation:
    """Losses of a model on held-out text.

    Attributes:
        loss: Mean nats per predicted token.
        kl: KL(teacher ‖ model), mean nats per predicted token; None without a teacher.
        tokens: The number of predictions that these are means of.
        seconds: Wall-clock time.
        notes: On memory that it lacked.
        sequence_losses: Mean loss of each sequence, `[N]` float64; None where workers share the
            sequences.
        token_losses: Loss of each prediction, `[N, T - 1]` float64; None likewise.
    """

    loss: float
    kl: float | None
    tokens: int
    seconds: float
    notes: tuple[str, ...] = ()
    token_losses: Tensor | None = field(default=None, repr=False, compare=False)

    @property
    def sequence_losses(self) -> Tensor | None:
        return None if self.token_losses is None else self.token_losses.mean(1)

    @property
    def noted(self) -> dict[str, list[str]]:
        """The fields of the notes that a record includes: none where there are none."""
        return {"notes": list(self.notes)} if self.notes else {}

    def compared(self, original: Evaluation) -> dict[str, Any]:
        """Return the fields of a record that compare this loss with that of the original.

        Both are on the same sequences.
        """
        return comparison(self.loss, original.loss, self.sequence_losses, original.sequence_losses)


def perplexity(loss: float) -> float:
    """Return the perplexity of a loss in nats per token; infinite where it exceeds a float."""
    return math.exp(loss) if loss < 700 else math.inf


def comparison(
    loss: float, original_loss: float, losses: Tensor | None, original_losses: Tensor | None
) -> dict[str, Any]:
    """Increase of a loss with its standard error, and both perplexities.

    The error is that of the mean difference over the sequences: both models read the same ones, so
    how hard a sequence is for either does not count. None for a single sequence.

    Args:
        losses: Of each sequence, `[N]`.
    """
    error = None
    if losses is not None and original_losses is not None and len(losses) > 1:
        difference = losses.double() - original_losses.double()
        error = float(difference.std() / math.sqrt(len(difference)))
    return {
        "loss_increase": loss - original_loss,
        "loss_increase_stderr": error,
        "perplexity": perplexity(loss),
        "original_perplexity": perplexity(original_loss),
    }


@dataclass(frozen=True)
class Speed:
    """Tokens per second for one sequence, of reading a prompt and of generating with the cache."""

    prefill: float
    decode: float


def evaluate(
    model: Any,
    sequences: Tensor,
    *,
    teacher: Any = None,
    batch_size: int = AT_ONCE,
    rank: int = 0,
    world_size: int = 1,
    reduce: Callable[[Tensor], Any] | None = None,
) -> Evaluation:
    """Score `sequences [N, T]`.

    T - 1 predictions each, summed in float64 and divided once at the end. `model` may be a
    `CachedTeacher`, which then knows these sequences.

    For each batch the teacher's hidden states are computed, then the model's, then the logits of
    both for a part of the positions at a time (`attention.modeling.predictions`).

    With several workers each scores the rows of its rank, in equally many forward passes (in which
    split weights are gathered), and `reduce` must sum a tensor over them in place; every worker
    returns the same means.

    Out of memory, it starts again with half the sequences at once, down to one, and `notes` says
    so; not with `reduce`: a worker that is waited for cannot start again alone.

    Args:
        batch_size: Sequences at once, at most (`attention.modeling.running.batch_of`).
    """
    if sequences.ndim != 2 or sequences.shape[0] < 1 or sequences.shape[1] < 2:
        raise ValueError(
            f"sequences must be [N, T] with N >= 1 and T >= 2, got shape {tuple(sequences.shape)}"
        )
    started = time.perf_counter()
    notes = ()
    most = at_once = min(batch_of(sequences.shape[1], batch_size), len(sequences))
    while True:
        try:
            totals, losses = _totals(
                model, teacher, sequences, _share(len(sequences), at_once, rank, world_size)
            )
            break
        except RuntimeError as error:
            if reduce is not None or at_once == 1 or not is_out_of_memory(error):
                raise
        free_memory()
        at_once //= 2
        notes = (f"out of memory with {most} sequences at once: evaluated with {at_once}",)
    if reduce is not None:
        reduce(totals)
    loss, divergence, tokens = totals.tolist()
    distance = divergence / tokens if teacher is not None else None
    seconds = time.perf_counter() - started
    return Evaluation(
        loss / tokens, distance, int(tokens), seconds, notes, losses if world_size == 1 else None
    )


TEACHER_BYTES = 256 * 2**20
"""Of the hidden states that a `CachedTeacher` stores, at most."""


class CachedTeacher:
    """A teacher that sees each batch once.

    The hidden states that enter its head, `[B, T, D]`, are cached, up to `most` bytes, for the next
    model that is compared with it on the same sequences.
    """

    def __init__(self, model: Any, most: int = TEACHER_BYTES) -> None:
        self.model = model
        self.room = most
        self._known: dict[tuple[torch.Size, bytes], Final] = {}

    def __call__(self, ids: Tensor) -> Final:
        key = (ids.shape, ids.cpu().numpy().tobytes())
        if key in self._known:
            return self._known[key]
        reached = final(self.model, ids)
        if reached.states.nbytes <= self.room:
            self.room -= reached.states.nbytes
            self._known[key] = reached
        return reached


def measure_cache(model: Any, tokens: int) -> int:
    """Return the bytes of the cache (`cache_bytes`) after a prefill of `tokens` tokens, batch 1."""
    ids = torch.zeros(1, tokens, dtype=torch.int64, device=next(model.parameters()).device)
    with evaluating(model):
        return cache_bytes(cache_of(model(ids, use_cache=True)))


def decode_speed(model: Any, prompt: Tensor, new: int) -> Speed:
    """Speed on `prompt [1, T]`, then `new` tokens one at a time, each the likeliest.

    The first token counts as prefill; a run of both that is not timed comes first, so that start-up
    costs are not counted.
    """
    if prompt.ndim != 2 or prompt.shape[0] != 1 or new < 1:
        raise ValueError(
            f"expected a prompt [1, T] and new >= 1, got shape {tuple(prompt.shape)} and {new}"
        )
    prompt = prompt.to(next(model.parameters()).device)
    with evaluating(model):
        _generate(model, prompt, 1)
        prefill, decode = _generate(model, prompt, new)
    return Speed(prompt.shape[1] / prefill, new / decode)


def _generate(model: Any, prompt: Tensor, new: int) -> tuple[float, float]:
    started = _now(prompt)
    output = model(prompt, use_cache=True)
    ready = _now(prompt)
    for _ in range(new):
        token = output.logits[:, -1:].argmax(-1)
        output = next_output(model, token, output)
    return ready - started, _now(prompt) - ready


def _now(like: Tensor) -> float:
    if like.is_cuda:
        # Kernels run on after the call that started them has returned.
        torch.cuda.synchronize(like.device)
    return time.perf_counter()


def _totals(
    model: Any, teacher: Any, sequences: Tensor, share: Iterable[tuple[list[int], int]]
) -> tuple[Tensor, Tensor]:
    """Return the sums of `_score` over batches of rows, and the losses of each counted row."""
    module = model.model if isinstance(model, CachedTeacher) else model
    device = next(module.parameters()).device
    totals = torch.zeros(3, dtype=torch.float64, device=device)
    losses = [torch.zeros(0, sequences.shape[1] - 1, dtype=torch.float64)]
    batches = list(share)
    with (
        evaluating(module),
        exact_products(),
        stage("measuring the loss", len(batches), "batches") as progress,
    ):
        for rows, counted in batches:
            sums, of_rows = _score(model, teacher, sequences[rows].long().to(device), counted)
            totals += sums
            losses.append(of_rows)
            progress.step()
    return totals, torch.cat(losses)


def _score(model: Any, teacher: Any, batch: Tensor, counted: int) -> tuple[Tensor, Tensor]:
    """Return the sums over the first `counted` rows of the batch, and the losses of each row.

    The sums are loss, KL and predictions, `[3]` float64.
    """
    reference = None
    if teacher is not None:
        reference = teacher(batch) if isinstance(teacher, CachedTeacher) else final(teacher, batch)
    costs = PredictionCosts()
    if isinstance(model, CachedTeacher):
        means = in_chunks(model(batch), batch, costs, reference, counted)
    else:
        # Also of no rows: all workers run each pass.
        means = mean_cost(model, batch, costs, reference, counted)
    if not counted:
        return torch.zeros(3, dtype=torch.float64, device=batch.device), torch.zeros(
            0, batch.shape[1] - 1, dtype=torch.float64
        )
    return means * counted * (batch.shape[1] - 1), costs.by_token(counted)


class PredictionCosts:
    """A `Cost` of a batch: loss, KL (0 without a reference), and 1 for each prediction.

    `[3]` float64. It remembers the loss of each prediction, in the order of the positions.
    """

    def __init__(self) -> None:
        self._losses: list[Tensor] = []

    def __call__(self, logits: Tensor, labels: Tensor, reference: Tensor | None) -> Tensor:
        losses = prediction_losses(logits, labels)
        self._losses.append(losses)  # on the device: waits for a GPU only once per batch
        loss = losses.mean()
        divergence = torch.zeros_like(loss) if reference is None else kl(logits, reference).double()
        return torch.stack([loss, divergence, torch.ones_like(loss)])

    def of_rows(self, rows: int) -> Tensor:
        """Return the mean loss of each of the `rows` sequences, `[rows]` float64 on the CPU."""
        return self.by_token(rows).mean(1)

    def by_token(self, rows: int) -> Tensor:
        """Return the loss of each prediction, `[rows, T - 1]` float64 on the CPU."""
        return torch.cat(self._losses).cpu().view(rows, -1)


def _share(
    count: int, batch_size: int, rank: int, world_size: int
) -> Iterator[tuple[list[int], int]]:
    """Batches of row numbers of one worker, and how many rows of each count.

    Workers with fewer rows repeat row 0.
    """
    indices = list(range(rank, count, world_size))
    longest = -(-count // world_size)
    real = len(indices)
    indices += [0] * (longest - real)
    for start in range(0, longest, batch_size):
        rows = indices[start : start + batch_size]
        yield rows, max(0, min(len(rows), real - start))
