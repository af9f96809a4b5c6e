"""What a model is worth: held-out loss, distance to the original model, bytes in the cache, speed.

Legend: N sequences, T tokens a sequence, V vocabulary.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from attention.modeling.grouped import cache_bytes
from attention.modeling.predictions import Final, final, in_chunks, mean_cost
from attention.modeling.running import batch_of, evaluating
from attention.progress import stage
from trainers.losses import kl, language_modelling
from trainers.shortage import give_back, is_shortage


@dataclass(frozen=True)
class Evaluation:
    """Held-out `loss` and `kl` = KL(teacher ‖ model), mean nats a predicted token (`kl` None without a teacher);
    `tokens`: how many predictions they are means of; `seconds`: wall-clock time; `notes`: of memory that it lacked."""

    loss: float
    kl: float | None
    tokens: int
    seconds: float
    notes: tuple[str, ...] = ()

    @property
    def noted(self) -> dict[str, list[str]]:
        """What a record takes over of the notes: nothing where there are none."""
        return {"notes": list(self.notes)} if self.notes else {}


@dataclass(frozen=True)
class Speed:
    """Tokens a second of reading a prompt (`prefill`) and of generating with the cache (`decode`), one sequence."""

    prefill: float
    decode: float


def evaluate(
    model: Any,
    sequences: Tensor,
    *,
    teacher: Any = None,
    batch_size: int = 8,
    rank: int = 0,
    world_size: int = 1,
    reduce: Callable[[Tensor], Any] | None = None,
) -> Evaluation:
    """Score `sequences [N, T]`: T - 1 predictions each, summed in float64 and divided once at the end. `model` may be a
    `CachedTeacher`, which then knows these sequences.

    Of each batch the teacher's hidden states are computed, then the model's, then the logits of both for a part of the
    positions at a time (`attention.modeling.predictions`).

    With several workers each scores the rows of its rank, in equally many forward passes (in which split weights are
    gathered), and `reduce` must sum a tensor over them in place; every worker returns the same means.

    Out of memory, it starts again with half the sequences at once, down to one, and `notes` says so; not with
    `reduce`: a worker that is waited for cannot start again alone.
    """
    if sequences.ndim != 2 or sequences.shape[0] < 1 or sequences.shape[1] < 2:
        raise ValueError(f"sequences must be [N, T] with N >= 1 and T >= 2, got shape {tuple(sequences.shape)}")
    started, notes = time.perf_counter(), ()
    at_once = min(batch_of(sequences.shape[1], batch_size), len(sequences))
    while True:
        try:
            totals = _totals(model, teacher, sequences, _share(len(sequences), at_once, rank, world_size))
            break
        except RuntimeError as error:
            if reduce is not None or at_once == 1 or not is_shortage(error):
                raise
        give_back()
        at_once //= 2
        notes = (f"out of memory with {batch_size} sequences at once: evaluated with {at_once}",)
    if reduce is not None:
        reduce(totals)
    loss, divergence, tokens = totals.tolist()
    distance = divergence / tokens if teacher is not None else None
    return Evaluation(loss / tokens, distance, int(tokens), time.perf_counter() - started, notes)


TEACHER_BYTES = 256 * 2**20
"""Of hidden states that a `CachedTeacher` keeps."""


class CachedTeacher:
    """A teacher that sees each batch once: the hidden states that enter its head, `[B, T, D]`, are kept, up to `most`
    bytes, for the next model that is compared with it on the same sequences."""

    def __init__(self, model: Any, most: int = TEACHER_BYTES) -> None:
        self.model, self.room = model, most
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
    """Bytes that the cache really holds after a prefill of `tokens` tokens, batch 1 (see `cache_bytes`)."""
    ids = torch.zeros(1, tokens, dtype=torch.int64, device=next(model.parameters()).device)
    with evaluating(model):
        return cache_bytes(model(ids, use_cache=True).past_key_values)


def decode_speed(model: Any, prompt: Tensor, new: int) -> Speed:
    """Speed on `prompt [1, T]`, then `new` tokens one at a time, each the likeliest. The first token counts as
    prefill; a run of both that is not timed comes first, so that start-up costs are not counted."""
    if prompt.ndim != 2 or prompt.shape[0] != 1 or new < 1:
        raise ValueError(f"expected a prompt [1, T] and new >= 1, got shape {tuple(prompt.shape)} and {new}")
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
        output = model(token, past_key_values=output.past_key_values, use_cache=True)
    return ready - started, _now(prompt) - ready


def _now(like: Tensor) -> float:
    if like.is_cuda:
        torch.cuda.synchronize(like.device)  # kernels run on after the call that started them has returned
    return time.perf_counter()


def _totals(model: Any, teacher: Any, sequences: Tensor, share: Iterable[tuple[list[int], int]]) -> Tensor:
    """The sums of `_score` over batches of row numbers."""
    module = model.model if isinstance(model, CachedTeacher) else model
    device = next(module.parameters()).device
    totals = torch.zeros(3, dtype=torch.float64, device=device)
    batches = list(share)
    with evaluating(module), stage("measuring the loss", len(batches), "batches") as told:
        for rows, counted in batches:
            totals += _score(model, teacher, sequences[rows].long().to(device), counted)
            told.step()
    return totals


def _score(model: Any, teacher: Any, batch: Tensor, counted: int) -> Tensor:
    """Sums over the first `counted` rows of the batch: loss, KL, predictions; `[3]` float64."""
    reference = None
    if teacher is not None:
        reference = teacher(batch) if isinstance(teacher, CachedTeacher) else final(teacher, batch)
    if isinstance(model, CachedTeacher):
        means = in_chunks(model(batch), batch, _costs, reference, counted)
    else:
        means = mean_cost(model, batch, _costs, reference, counted)  # also of no rows: all workers run each pass
    if not counted:
        return torch.zeros(3, dtype=torch.float64, device=batch.device)
    return means * counted * (batch.shape[1] - 1)


def _costs(logits: Tensor, labels: Tensor, reference: Tensor | None) -> Tensor:
    """Loss, KL (0 without a reference), and 1 for each prediction; `[3]` float64."""
    loss = language_modelling(logits, labels).double()
    divergence = torch.zeros_like(loss) if reference is None else kl(logits, reference).double()
    return torch.stack([loss, divergence, torch.ones_like(loss)])


def _share(count: int, batch_size: int, rank: int, world_size: int) -> Iterator[tuple[list[int], int]]:
    """Batches of row numbers of one worker, and how many rows of each count; workers with fewer rows repeat row 0."""
    mine = list(range(rank, count, world_size))
    longest = -(-count // world_size)
    real = len(mine)
    mine += [0] * (longest - real)
    for start in range(0, longest, batch_size):
        rows = mine[start : start + batch_size]
        yield rows, max(0, min(len(rows), real - start))
