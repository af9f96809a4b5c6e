"""Record the inputs and outputs of one layer's attention in a running model.

Legend: B sequences, T tokens, H query heads, d head dim, D model dim.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from transformers import AttentionInterface, PreTrainedModel
from transformers.masking_utils import AttentionMaskInterface, sdpa_mask

from attention.modeling.grouped import ATTENTION_NAME, grouped_attention
from attention.modeling.running import Streams, entering, run_to

RECORDING = "headfold_recording"
_mixed: dict[nn.Module, Tensor] = {}


@dataclass(frozen=True)
class Record:
    """One batch at one layer.

    The attention module's arguments, its output `[B, T, D]`, the stream entering the layer.

    `mixed [B, T, H·d]` is what the heads hand to the output projection (Headfold models only).
    """

    args: tuple[Any, ...]
    kwargs: dict[str, Any]
    output: Tensor
    stream: Tensor
    mixed: Tensor | None

    @property
    def nbytes(self) -> int:
        """Return the bytes of all tensors, counting shared memory once."""
        tensors = (
            t.untyped_storage()
            for t in _tensors([self.args, self.kwargs, self.output, self.stream, self.mixed])
        )
        return sum({storage.data_ptr(): storage.nbytes() for storage in tensors}.values())


def _tensors(value: Any) -> Iterator[Tensor]:
    if isinstance(value, Tensor):
        yield value
    elif isinstance(value, (list, tuple, dict)):
        for part in value.values() if isinstance(value, dict) else value:
            yield from _tensors(part)


def _recording_attention(module: nn.Module, *args: Any, **kwargs: Any) -> tuple[Tensor, None]:
    out, weights = grouped_attention(module, *args, **kwargs)
    _mixed[module] = out.flatten(2)
    return out, weights


AttentionInterface.register(RECORDING, _recording_attention)
AttentionMaskInterface.register(RECORDING, sdpa_mask)


@contextmanager
def _recording_mixed(model: PreTrainedModel) -> Iterator[None]:
    is_headfold = model.config._attn_implementation == ATTENTION_NAME
    try:
        if is_headfold:
            model.config._attn_implementation = RECORDING
        yield
    finally:
        if is_headfold:
            model.config._attn_implementation = ATTENTION_NAME
        _mixed.clear()


@torch.no_grad()
def recorded(streams: Streams, layer: int) -> Iterator[Record]:
    """Run the batches of `streams` up to and including the attention of `layer`.

    Layers above do not run, and layers below only where `streams` has not run them yet.

    Yields:
        One `Record` per batch.
    """
    entered: list[Tensor] = []

    def enter(_: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        entered.append(entering(args, kwargs))

    module = streams.modules[layer]
    streams.advance(layer)
    for index, batch in enumerate(streams.batches):
        with _recording_mixed(streams.model), streams.entering(index):
            # Sees what enters it so.
            hook = streams.layers[layer].register_forward_pre_hook(enter, with_kwargs=True)
            try:
                call = run_to(streams.model, module, batch)
                record = Record(*call, entered.pop(), _mixed.get(module))
            finally:
                hook.remove()
        yield record


def split_held_out(sequences: Tensor) -> tuple[Tensor, Tensor]:
    """Return sequences to fit on, and sequences to check on: every eighth one, at least one.

    Raises:
        ValueError: For fewer than two sequences.
    """
    if len(sequences) < 2:
        raise ValueError(
            "a fit needs at least two calibration sequences, one of them to check it, got "
            f"{len(sequences)}; give more text or shorter sequences"
        )
    check = torch.zeros(len(sequences), dtype=torch.bool)
    check[7::8] = True
    if not check.any():
        check[-1] = True
    return sequences[~check], sequences[check]
