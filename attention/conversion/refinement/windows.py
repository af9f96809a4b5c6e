"""Some positions of a sequence at a time, each with all keys and values before it.

A step of a fit on a window costs what a step on a short sequence does, and yet sees the distances
of a long one.

Legend: B sequences, T tokens per sequence, S tokens up to the end of a window, D model dim.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from typing import Any

import torch
from torch import Tensor, nn
from transformers.cache_utils import DynamicCache

from attention.conversion.refinement.capture import Record
from attention.modeling.growing_cache import CACHE_NAMES, cache_keyword
from attention.modeling.running import entered_by


class _Reached(Exception):
    """Keys and values are made: what comes after them in the attention need not run."""


class _Prefix(DynamicCache):
    """Keys and values of the positions before a window, with gradients.

    The first call with it ends once they are made.
    """

    def __init__(self) -> None:
        super().__init__()
        self.before: tuple[Tensor, Tensor] | None = None

    def update(
        self, key_states: Tensor, value_states: Tensor, *args: Any, **kwargs: Any
    ) -> tuple[Tensor, Tensor]:
        if self.before is None:
            self.before = key_states, value_states
            raise _Reached
        return torch.cat([self.before[0], key_states], 2), torch.cat(
            [self.before[1], value_states], 2
        )


def windows(length: int, positions: int) -> list[tuple[int, int]]:
    """Return (first, end) of equal parts of about `positions` each, of `length` positions."""
    count = max(1, round(length / positions))
    edges = [length * i // count for i in range(count + 1)]
    return list(itertools.pairwise(edges))


def uncached(record: Record) -> dict[str, Any]:
    """Return the record's named arguments, but for a cache."""
    return {name: value for name, value in record.kwargs.items() if name not in CACHE_NAMES} | {
        "use_cache": False
    }


def cache_name(module: nn.Module) -> str | None:
    """By which name the module takes a cache, if it does.

    Composition keeps more than keys and values there: None.
    """
    return None if hasattr(module, "composition") else cache_keyword(module)


def attended(module: nn.Module, record: Record, inputs: Tensor, first: int, end: int) -> Tensor:
    """Return the module's output at some positions, called as in `record`.

    It equals the output for whole sequences, there.

    Args:
        module: The attention module.
        record: A call of it on whole sequences.
        inputs: `[B, T, D]`.
        first: First position.
        end: Position after the last.

    Returns:
        `[B, end - first, D]`.
    """
    length = inputs.shape[1]
    whole = record.args, uncached(record)
    if hasattr(module, "composition"):  # its cache stores more than keys and values
        args, kwargs = entered_by(inputs, *whole)
        return module(*args, **kwargs)[0][:, first:end]
    name = cache_keyword(module)
    prefix = _Prefix()

    def call(begin: int, end: int, cache: _Prefix | None) -> Any:
        args, kwargs = entered_by(
            inputs[:, begin:end], *(_cut(part, length, begin, end) for part in whole)
        )
        mask = record.kwargs.get("attention_mask")
        if mask is not None:
            mask = mask[..., begin:end, :end]
        elif begin > 0:  # causality would be counted from the first position
            mask = torch.ones(1, 1, end - begin, end, dtype=torch.bool, device=inputs.device).tril(
                begin
            )
        cached = {name: cache} if name is not None and cache is not None else {}
        return module(*args, **(kwargs | {"attention_mask": mask} | cached))

    if first == 0:
        output = call(0, end, None)
    else:
        with suppress(_Reached), _without_queries(module):
            call(0, first, prefix)
        output = call(first, end, prefix)
    return output[0] if isinstance(output, tuple) else output


@contextmanager
def _without_queries(module: nn.Module) -> Iterator[None]:
    """Zeros in place of the queries of positions before a window, which are not needed.

    A tenth of a step's time.
    """
    projection = getattr(module, "q_proj", None)
    if not isinstance(projection, nn.Linear):
        yield
        return
    projection.forward = lambda input: input.new_zeros(()).expand(
        *input.shape[:-1], projection.out_features
    )
    try:
        yield
    finally:
        del projection.forward


def _cut(value: Any, length: int, first: int, end: int) -> Any:
    """Return the rows of a window of all tensors in `value` that have `length` rows."""
    if isinstance(value, Tensor):
        shape = value.shape
        if len(shape) > 1 and shape[-2] == length:  # a table of a position embedding
            return value[..., first:end, :]
        # Numbers of positions.
        return value[..., first:end] if shape and shape[-1] == length else value
    if isinstance(value, dict):
        return {name: _cut(item, length, first, end) for name, item in value.items()}
    return (
        type(value)(_cut(item, length, first, end) for item in value)
        if type(value) in (tuple, list)
        else value
    )
