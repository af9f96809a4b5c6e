"""Losses of a model's predictions, computed for a bounded number of positions at a time.

The logits of a whole batch would be the largest tensor of a training step or an evaluation: 0.5 GB
in float32 for one sequence of 4,096 tokens and a vocabulary of 32,000, several times over. So only
the hidden states are computed for all positions; logits exist for `chunk_bytes` of them, and with
gradients are made again in the backward pass.

Legend: B sequences, T tokens, D model dim, V vocabulary, P positions.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.utils.checkpoint import checkpoint

# Of float32 logits of one model. The C library maps blocks of more than 32 MiB anew each time, and
# on a CPU their page faults take a quarter of a training step.
CHUNK_BYTES = 24 * 2**20
CHUNK_SHARE = 160  # of a GPU's memory: one part in so many
CHUNK_POSITIONS = 1024
"""On a GPU: with fewer at once the head's weights are read, and their gradient added, too often."""
CHUNKS_AT_ONCE = (
    8  # as many bytes at once, at most: logits of two models, logarithms, and what KL makes of them
)
_FLOAT = 4
_NOT_COUNTED = -100  # instead of a label

_Cost = Callable[[Tensor, Tensor, Tensor | None], Tensor]
"""`cost(logits [P, V], labels [P], reference logits [P, V] or None)`: a mean over the P positions,
of any shape."""


_Head = Callable[[Tensor], Tensor]


class Final(NamedTuple):
    """The hidden states that enter an output head `[B, T, D]`, and the head.

    The head makes logits `[P, vocabulary]` of states `[P, D]`.
    """

    states: Tensor
    head: Callable[[Tensor], Tensor]
    vocabulary: int


_agreed: dict[torch.device, int] = {}


def chunk_memory(device: torch.device) -> int:
    """Return the memory of a GPU that `chunk_bytes` goes by, in bytes; 0 for any other device."""
    if device.type != "cuda":
        return 0
    return _agreed.get(device) or torch.cuda.get_device_properties(device).total_memory


def agree_on_chunk_memory(device: torch.device, memory: int) -> None:
    """Have this process compute as many logits at once as workers with GPUs of `memory` bytes."""
    _agreed[device] = memory


def chunk_bytes(vocabulary: int, gpu_memory: int = 0) -> int:
    """Return the bytes of float32 logits of one model that exist at the same time.

    On a GPU they grow with its memory, and are those of `CHUNK_POSITIONS` positions at least,
    unless all that is made of them would take more than an eighth of it.

    Args:
        gpu_memory: Of the device, in bytes; 0 for the host.
    """
    fewest = min(CHUNK_POSITIONS * _FLOAT * vocabulary, gpu_memory // (8 * CHUNKS_AT_ONCE))
    return max(CHUNK_BYTES, gpu_memory // CHUNK_SHARE, fewest)


def positions_at_once(vocabulary: int, gpu_memory: int = 0) -> int:
    """Positions of which the logits of one model exist at the same time (see `chunk_bytes`)."""
    return max(1, chunk_bytes(vocabulary, gpu_memory) // (_FLOAT * vocabulary))


def most_logit_bytes(vocabulary: int, positions: int, gpu_memory: int = 0) -> int:
    """Return the most bytes of all logits, and of what is made of them, for so many positions."""
    at_once = min(positions, positions_at_once(vocabulary, gpu_memory))
    return CHUNKS_AT_ONCE * _FLOAT * vocabulary * at_once


def final(model: Any, ids: Tensor, **more: Any) -> Final:
    """Run `ids [B, T]` up to the output head. `more` arguments of the model."""
    head = model.get_output_embeddings()
    return Final(
        _at_the_head(model, ids, lambda states: states, **more),
        _finishing(model)(head),
        head.out_features,
    )


def mean_cost(
    model: Any,
    ids: Tensor,
    cost: _Cost,
    reference: Final | None = None,
    rows: int | None = None,
    counted: Tensor | None = None,
    **more: Any,
) -> Tensor:
    """Return the mean of `cost` over the next-token predictions of the first `rows` sequences.

    `model` may be a DeepSpeed engine: this is one forward pass of it. With ZeRO 3 the weights of
    the head are whole only while the head is called, and while the backward pass is at that call:
    so all is computed within it.

    Args:
        ids: `[B, T]`.
        rows: By default all sequences.
        counted: Which tokens' predictions are counted, `[B, T]` bool; by default all.
        more: Arguments of the model.
    """
    head = model.get_output_embeddings()
    finish = _finishing(model)

    def of_states(states: Tensor) -> Tensor:
        return in_chunks(
            Final(states, finish(head.forward), head.out_features),
            ids,
            cost,
            reference,
            rows,
            counted,
        )

    return _at_the_head(model, ids, of_states, **more)


def in_chunks(
    predicting: Final,
    ids: Tensor,
    cost: _Cost,
    reference: Final | None = None,
    rows: int | None = None,
    counted: Tensor | None = None,
) -> Tensor:
    """Return the mean of `cost` over the predictions of the first `rows` sequences.

    No gradients flow into the reference. The number of calls of the heads does not depend on
    `rows`, since workers that share a split head must call it together; of no rows the mean is 0.

    Args:
        ids: `[B, T]`, which went into both finals.
        counted: Which tokens' predictions are counted, `[B, T]` bool; by default all.
    """
    labels = ids[:, 1:].flatten()
    last = (len(ids) if rows is None else rows) * (ids.shape[1] - 1)
    number = last
    if counted is not None:
        labels = torch.where(counted[:, 1:].flatten(), labels, _NOT_COUNTED)
        number = max(1, int((labels[:last] != _NOT_COUNTED).sum()))
    size = positions_at_once(predicting.vocabulary, chunk_memory(ids.device))
    parts = [predicting.states[:, :-1].flatten(0, 1).split(size)]
    if reference is not None:
        parts.append(reference.states[:, :-1].flatten(0, 1).split(size))
    # Logits of all positions may be kept where they are few.
    again = torch.is_grad_enabled() and len(parts[0]) > 1

    def share(labels: Tensor, states: Tensor, guide: Tensor | None = None) -> Tensor:
        reference_logits = None
        # Before the other head: a backward pass computes again only what it needs, and without any
        # row that counts this would be nothing after it
        if reference is not None and guide is not None:
            with torch.no_grad():
                reference_logits = reference.head(guide)[: len(labels)]
        logits = predicting.head(states)[: len(labels)]
        if counted is not None:
            chosen = labels != _NOT_COUNTED
            logits = logits[chosen]
            labels = labels[chosen]
            reference_logits = None if reference_logits is None else reference_logits[chosen]
        if not len(labels):
            return logits.sum()  # 0, and part of the graph, as workers run its backward together
        return cost(logits, labels, reference_logits) * (len(labels) / number)

    total: Any = 0
    for index, chunk in enumerate(zip(*parts, strict=True)):
        chunk_labels = labels[index * size : min(last, index * size + size)]
        if again:
            total = total + checkpoint(
                share, chunk_labels, *chunk, use_reentrant=False, preserve_rng_state=False
            )
        else:
            total = total + share(chunk_labels, *chunk)
    return total


AFTER_THE_HEAD = {"logits_scaling": 1.0, "final_logit_softcapping": None}
"""Fields of a config by which some models change the logits that their head makes, and their values
for no change: Granite divides them, Gemma 2 and 3 cap them."""


def _finishing(model: Any) -> Callable[[_Head], _Head]:
    """From an output head, the head with what the model does to its logits."""
    scaling, cap = (getattr(_config(model), name, plain) for name, plain in AFTER_THE_HEAD.items())

    def change(logits: Tensor) -> Tensor:
        logits = logits / scaling
        return logits if cap is None else torch.tanh(logits / cap) * cap

    return (
        (lambda head: head)
        if (scaling, cap) == (1.0, None)
        else lambda head: lambda states: change(head(states))
    )


def _config(model: Any) -> Any:
    return getattr(model, "module", model).config  # of DeepSpeed's engine, `config` is DeepSpeed's


def _at_the_head(
    model: Any, ids: Tensor, instead: Callable[[Tensor], Tensor], **more: Any
) -> Tensor:
    """Run a forward pass in which the output head returns `instead` of its input.

    Nothing follows after the head.
    """
    head = model.get_output_embeddings()

    def once(states: Tensor) -> Tensor:
        # The stock forward, which is shadowed on the instance only, is shown again.
        del head.forward
        return instead(states)

    head.forward = once
    config = _config(model)
    values = {name: getattr(config, name) for name in AFTER_THE_HEAD if hasattr(config, name)}
    try:
        for name in values:
            setattr(config, name, AFTER_THE_HEAD[name])
        return model(input_ids=ids, use_cache=False, **more).logits
    finally:
        head.__dict__.pop("forward", None)
        for name, value in values.items():
            setattr(config, name, value)
