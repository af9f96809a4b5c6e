"""`attention.conversion.sensitivity.output_metrics` with one decoder layer in memory.

Up through all layers, then down.

Legend: L layers, N sequences of T tokens, D model dim.

The forward pass writes the input streams of each layer to disk; the backward pass runs each layer
again with gradients, from the top. F of layer l is stored as `metric-0000l.safetensors`. The input
streams of a layer (`below-*`) and the gradients of its outputs (`above-*`) are removed once they
are used; until then a killed call is continued from them.
"""

from __future__ import annotations

import gc
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file
from torch import Tensor
from transformers import PretrainedConfig, PreTrainedModel

from attention.conversion.sensitivity import (
    SENSITIVITY_BATCH,
    SummedGradients,
    check_predicts,
    drawn_cost,
)
from attention.families import family_of, geometry_of
from attention.io.layers.windows import (
    LazyWeights,
    OutputHead,
    advance,
    embed,
    open_window,
    rows_of,
    the_layer,
)
from attention.io.shards import write_shard
from attention.modeling.running import batch_of, entering


def metric_file(folder: Path, layer: int) -> Path:
    """Return the file of a layer's metric."""
    return folder / f"metric-{layer:05d}.safetensors"


def _below(folder: Path, layer: int) -> Path:
    return folder / f"below-{layer:05d}.safetensors"


def _above(folder: Path, layer: int) -> Path:
    return folder / f"above-{layer:05d}.safetensors"


def read_metric(folder: Path, layer: int) -> Tensor:
    """F of a layer, `[D, D]` in float32."""
    return load_file(metric_file(folder, layer))["metric"]


def write_metrics(
    weights: LazyWeights,
    config: PretrainedConfig,
    sequences: Tensor,
    dtype: torch.dtype,
    device: torch.device,
    folder: Path,
    progress: Callable[[int, int], None],
) -> None:
    """Write the metrics of all layers to `folder`, from where a killed call has stopped.

    `sequences` `[N, T]`; `dtype`: what is computed in; `progress(done, all)` is called after each
    layer, up and down.

    Raises:
        ValueError: For sequences of one token.
    """
    check_predicts(sequences)
    layers = geometry_of(config).num_layers
    left = [layer for layer in range(layers) if not metric_file(folder, layer).is_file()]
    for layer in set(range(layers)) - {*left}:  # killed between a metric and what it was made of
        _below(folder, layer).unlink(missing_ok=True)
        _above(folder, layer).unlink(missing_ok=True)
    if not left:
        return
    if _above(folder, left[-1]).is_file():
        gradients = load_file(_above(folder, left[-1]))["gradients"]
    else:
        left = list(range(layers))  # former versions did not write gradients
        stream = _forward(weights, config, sequences, dtype, device, folder, progress)
        gradients = _gradients(OutputHead(weights, config, dtype, device), stream)
        write_shard(_above(folder, layers - 1), {"gradients": gradients})
    for layer in reversed(left):
        stream = load_file(_below(folder, layer))["stream"]
        metric = _back(open_window(weights, config, layer, stream, dtype, device), gradients)
        gc.collect()
        if layer:
            write_shard(_above(folder, layer - 1), {"gradients": gradients})
        write_shard(metric_file(folder, layer), {"metric": metric / sequences.numel()})
        _below(folder, layer).unlink()
        _above(folder, layer).unlink()
        progress(2 * layers - layer, 2 * layers)


def _forward(
    weights: LazyWeights,
    config: PretrainedConfig,
    sequences: Tensor,
    dtype: torch.dtype,
    device: torch.device,
    folder: Path,
    progress: Callable[[int, int], None],
) -> Tensor:
    """Write the inputs of each layer, and return the outputs of the last one, `[N, T, D]`."""
    layers = geometry_of(config).num_layers
    batch = batch_of(sequences.shape[1], SENSITIVITY_BATCH)
    there = [layer for layer in range(layers) if _below(folder, layer).is_file()]
    if there:
        stream = load_file(_below(folder, there[-1]))["stream"]
    else:
        stream = embed(weights, config, sequences, dtype, device, batch)
    for layer in range(max(there, default=0), layers):
        write_shard(_below(folder, layer), {"stream": stream})
        advance(open_window(weights, config, layer, stream, dtype, device), stream, batch)
        gc.collect()  # a window and its hooks refer to each other
        progress(layer + 1, 2 * layers)
    return stream


def _gradients(head: OutputHead, streams: Tensor) -> Tensor:
    """Return the gradients of the loss of drawn next tokens by the last layer's outputs.

    They are `[N, T, D]` in float32.
    """
    generator = torch.Generator().manual_seed(0)
    gradients = torch.empty(streams.shape)
    batch = batch_of(streams.shape[1], SENSITIVITY_BATCH)  # as in memory: it draws in this order
    for rows in torch.arange(len(streams)).split(batch):
        entered = streams[rows].to(head.device).requires_grad_(True)
        with torch.enable_grad():
            cost = drawn_cost(head.final(entered), generator)
        gradients[rows] = torch.autograd.grad(cost, entered)[0].to(gradients)
    return gradients


def _back(window: PreTrainedModel, gradients: Tensor) -> Tensor:
    """Return the sum of g g^T over all tokens at the attention of a window.

    `gradients` are those of the layer's outputs, and become those of its inputs, in place.
    """
    attention = family_of(window.config).attention_modules(window)[0]
    layer = the_layer(window)
    caught: dict[str, Tensor] = {}

    def enter(_: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        caught["in"] = entering(args, kwargs).requires_grad_(True)

    def leave(_: Any, __: Any, output: Any) -> None:
        caught["out"] = output[0] if isinstance(output, tuple) else output

    hooks = [
        layer.register_forward_pre_hook(enter, with_kwargs=True),
        layer.register_forward_hook(leave),
    ]
    sums = SummedGradients([attention])
    try:
        with sums.collected(), torch.enable_grad():
            for ids in rows_of(gradients).split(batch_of(gradients.shape[1], SENSITIVITY_BATCH)):
                window.get_decoder()(input_ids=ids.to(window.device), use_cache=False)
                above = gradients[ids[:, 0]].to(caught["out"])
                gradients[ids[:, 0]] = torch.autograd.grad(caught["out"], caught["in"], above)[
                    0
                ].to(gradients)
    finally:
        for hook in hooks:
            hook.remove()
    return sums.of[attention].cpu()
