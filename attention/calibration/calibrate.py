"""One pass over tokens -> statistics of each layer; stored by their digest, shared by all trials.

Legend: L layers, H query heads, d head dim, D model dim, B sequences per batch, T tokens per
sequence.

The pass reads two things in each attention module: its input x (a forward pre-hook) and the queries
and keys after RoPE (an attention function of our own, registered with transformers), from which it
has the attention weights. Only a slice of the weights of one head lives at a time, so the memory
grows neither with the tokens nor with the heads. The statistics take
`attention.calibration.sizes.layer_bytes` per layer: of all layers at once in `calibrate`, of one in
`layer_by_layer`, which reads the checkpoint a layer at a time too. While the pass runs, one layer
of one batch adds `4 B T 4 (D + 1)` bytes and three slices of `collecting.SLICE_BYTES` to it and to
the model's own activations.
"""

from __future__ import annotations

import gc
import hashlib
import json
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import torch
from torch import Tensor
from transformers import PretrainedConfig, PreTrainedModel

from attention.base.products import tensor_cores
from attention.base.progress import stage
from attention.calibration.collecting import collecting
from attention.calibration.moments import LayerStatistics
from attention.calibration.sizes import SAMPLE_TOKENS, Mixed
from attention.calibration.store import Calibration
from attention.families import geometry_of
from attention.geometry import HeadGeometry
from attention.io.layers.windows import LazyWeights, advance_rows, embed, open_window, rows_of
from attention.modeling.model_classes import plan_of
from attention.modeling.running import AT_ONCE, batch_of, evaluating


def calibrate(
    model: PreTrainedModel,
    sequences: Tensor,
    *,
    sample_tokens: int = SAMPLE_TOKENS,
    batch_size: int = AT_ONCE,
    mixed: Mixed = "float32",
) -> Calibration:
    """Return the statistics of every layer of `model` over `sequences`, on the CPU.

    The model runs in its own dtype in evaluation mode, without gradients, and is not changed; sums
    are taken in float32 and collected in float64 (the mixed moments in float32, stored in the
    format `mixed`).

    Args:
        model: A stock or Headfold model, without composition.
        sequences: `[N, T]` token ids, no padding.
        sample_tokens: Bound of the stored inputs (whole sequences, from the first on; 0 stores
            none).
        batch_size: Most sequences at once (`attention.modeling.running.batch_of`).
        mixed: How the mixed moments are stored (`attention.calibration.sizes.MIXED`).

    Raises:
        ValueError: If the tokens do not fit the model, for an unsupported and for a composed model.
    """
    check_sequences(sequences, geometry_of(model.config), sample_tokens)
    sampled = min(sample_tokens // sequences.shape[1], len(sequences))
    layers = collect(model, sequences, sampled=sampled, batch_size=batch_size, mixed=mixed)
    weights = weights_of(model)
    digest = calibration_digest(model.config, weights, sequences, sample_tokens, model.dtype, mixed)
    return Calibration(layers, sequences.numel(), digest, weights, mixed)


def collect(
    model: PreTrainedModel,
    sequences: Tensor,
    *,
    sampled: int,
    batch_size: int = AT_ONCE,
    mixed: Mixed = "float32",
    run: Callable[[Tensor], object] | None = None,
) -> tuple[LayerStatistics, ...]:
    """Run the pass of `calibrate` over sequences that fit the model.

    Args:
        model: As in `calibrate`.
        sequences: `[N, T]` token ids.
        sampled: Inputs of the first so many sequences are stored.
        batch_size: Most sequences at once.
        mixed: How the mixed moments are stored.
        run: Takes a batch `[B, T]` through all attention layers; by default through the decoder.
    """
    if plan_of(model).composition is not None:
        raise ValueError(
            "a composed model (dcmha) cannot be calibrated: its attention weights are mixed across "
            "heads; "
            "calibrate the checkpoint that it was converted from"
        )
    geometry = geometry_of(model.config)
    # The decoder alone: logits over the vocabulary are not needed and would be the largest tensor
    # of all.
    run = run or (
        lambda batch: model.get_decoder()(input_ids=batch.to(model.device), use_cache=False)
    )
    with (
        tensor_cores(model.device, model.dtype, model),
        collecting(model, geometry, sampled, mixed) as collectors,
        evaluating(model),
    ):
        with stage("calibrating", len(sequences), "sequences") as progress:
            for batch in sequences.split(batch_of(sequences.shape[1], batch_size)):
                run(batch)
                progress.step(len(batch))
        return tuple(collector.finish() for collector in collectors)


@torch.no_grad()
def layer_by_layer(
    weights: LazyWeights,
    config: PretrainedConfig,
    sequences: Tensor,
    *,
    dtype: torch.dtype,
    device: torch.device,
    sampled: int,
    batch_size: int = 8,
    mixed: Mixed = "float32",
) -> Iterator[LayerStatistics]:
    """Yield the statistics of `calibrate` for a checkpoint on disk, one layer after the other.

    One decoder layer and its sums are in memory at a time, and the hidden states of all sequences
    (`N T D` numbers).

    Args:
        weights: Those of the checkpoint.
        config: That of the checkpoint.
        sequences: `[N, T]` token ids.
        dtype: What the layers run in.
        device: Where they run.
        sampled: Number of sequences whose inputs are stored.
        batch_size: Most sequences at once.
        mixed: How the mixed moments are stored.

    Raises:
        ValueError: As `calibrate`, and for a checkpoint whose layers cannot stand alone
            (`check_windows`).
    """
    geometry = geometry_of(config)
    check_sequences(sequences, geometry)
    streams = embed(weights, config, sequences, dtype, device, batch_size)
    same: dict[str, Any] = {"sampled": sampled, "batch_size": batch_size, "mixed": mixed}
    for layer in range(geometry.num_layers):
        yield one_layer(weights, config, layer, streams, dtype=dtype, device=device, **same)


@torch.no_grad()
def one_layer(
    weights: LazyWeights,
    config: PretrainedConfig,
    layer: int,
    streams: Tensor,
    *,
    dtype: torch.dtype,
    device: torch.device,
    sampled: int,
    batch_size: int,
    mixed: Mixed,
) -> LayerStatistics:
    """Return what `layer_by_layer` yields of one layer.

    Args:
        weights: As in `layer_by_layer`, and so are the others.
        config: That of the checkpoint.
        layer: Its number.
        streams: `[N, T, D]`, what enters the layer; replaced in place by what leaves it.
        dtype: What the layer runs in.
        device: Where it runs.
        sampled: Number of sequences whose inputs are stored.
        batch_size: Most sequences at once.
        mixed: How the mixed moments are stored.
    """
    window = open_window(weights, config, layer, streams, dtype, device)
    run = partial(advance_rows, window, streams)
    (statistics,) = collect(
        window, rows_of(streams), sampled=sampled, batch_size=batch_size, mixed=mixed, run=run
    )
    del window, run
    gc.collect()  # a window and the hooks that feed it know each other
    return statistics


def weights_of(model: PreTrainedModel) -> str:
    """Return the digest of all weights of a model in memory, 16 hex digits.

    Files of a checkpoint have digests without it.
    """
    digest = hashlib.blake2b(digest_size=8)
    for name, tensor in model.named_parameters():
        _add(digest, name, tensor.detach())
    return digest.hexdigest()


def calibration_digest(
    config: PretrainedConfig,
    weights: str,
    sequences: Tensor,
    sample_tokens: int,
    dtype: torch.dtype,
    mixed: Mixed = "float32",
) -> str:
    """Return the digest of all that a calibration depends on, 16 hex digits.

    The batch size is left out: it changes the result by rounding alone.

    Args:
        config: That of the checkpoint.
        weights: Digest of the weights.
        sequences: `[N, T]` token ids.
        sample_tokens: As in `calibrate`.
        dtype: What the model runs in.
        mixed: How the mixed moments are stored.
    """
    digest = hashlib.blake2b(digest_size=8)
    identity = {
        k: v
        for k, v in config.to_diff_dict().items()
        if k not in ("transformers_version", "_name_or_path", "dtype")
    }
    entries = {
        "sample_tokens": sample_tokens,
        "mixed": mixed,
        "dtype": str(dtype),
        "weights": weights,
    }
    settings = entries | {"shape": list(sequences.shape), "config": identity}
    digest.update(json.dumps(settings, sort_keys=True, default=str).encode())
    _add(digest, "tokens", sequences.long())
    return digest.hexdigest()


def _add(digest: Any, name: str, tensor: Tensor) -> None:
    digest.update(f"{name} {tensor.dtype} {tuple(tensor.shape)}".encode())
    digest.update(tensor.cpu().contiguous().flatten().view(torch.uint8).numpy().data)


def check_sequences(sequences: Tensor, geometry: HeadGeometry, sample_tokens: int = 0) -> None:
    """Raise ValueError if `sequences` is not `[N, T]` token ids that the model can take."""
    if (
        sequences.dim() != 2
        or sequences.dtype not in (torch.int64, torch.int32)
        or sequences.numel() == 0
    ):
        raise ValueError(
            f"sequences must be a non-empty [N, T] tensor of token ids, got shape "
            f"{tuple(sequences.shape)} of "
            f"{sequences.dtype}"
        )
    length = sequences.shape[1]
    if length > geometry.max_positions:
        raise ValueError(
            f"sequences of {length} tokens are longer than the model's {geometry.max_positions}; "
            f"pack shorter ones"
        )
    low = int(sequences.min())
    high = int(sequences.max())
    if low < 0 or high >= geometry.vocab_size:
        raise ValueError(
            f"token ids must lie in [0, {geometry.vocab_size - 1}], got {low} to {high}; use the "
            f"model's own tokenizer"
        )
    if sample_tokens < 0 or 0 < sample_tokens < length:
        raise ValueError(
            f"sample_tokens must be 0 or hold a sequence of {length} tokens, got {sample_tokens}"
        )
