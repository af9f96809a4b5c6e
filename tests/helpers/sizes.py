"""Sizes of a model: parameters, bytes in memory, bytes on disk; and the bytes that a plan must add or save."""

from __future__ import annotations

from pathlib import Path

from torch import nn

from attention.families import geometry_of
from attention.modeling.mlp import block_size, mlp_sites
from attention.plan import AttentionPlan, Composition


def parameters(model: nn.Module) -> int:
    """Parameters of a model; one that serves several places counts once."""
    return sum(parameter.numel() for parameter in model.parameters())


def resident_bytes(model: nn.Module) -> int:
    """Bytes of memory that the parameters and buffers hold; memory that several tensors look at counts once."""
    storages = (t.untyped_storage() for t in (*model.parameters(), *model.buffers()))
    return sum({(storage.device, storage.data_ptr()): storage.nbytes() for storage in storages}.values())


def file_bytes(folder: str | Path) -> int:
    """Bytes of the weight files of a checkpoint folder. Raises ValueError if there are none."""
    files = list(Path(folder).glob("*.safetensors"))
    if not files:
        raise ValueError(f"no safetensors files in {str(folder)!r}")
    return sum(path.stat().st_size for path in files)


def saved_parameters(model: nn.Module, plan: AttentionPlan) -> int:
    """Parameters that the shares of `plan` save in `model`'s architecture, exactly.

    A shared head saves its q, k and v rows with their biases, one whose output is shared its columns of the output
    projection; a shared MLP block its rows of the input projections with their biases and its columns of the output
    projection.
    """
    config = model.config
    geometry = geometry_of(config)
    biases = {"q": geometry.query_bias, "k": geometry.key_bias, "v": geometry.value_bias, "o": False}
    rows = sum(len(plan.shares_of(side)) * (geometry.hidden_size + bias) for side, bias in biases.items())
    saved = geometry.head_dim * rows
    if plan.mlp_shares:
        site = mlp_sites(model)[0]  # type: ignore[arg-type]
        inputs = [site.projection(name) for name in site.inputs]
        neuron = sum(p.in_features + (p.bias is not None) for p in inputs) + site.projection(site.output).out_features
        saved += len(plan.mlp_shares) * block_size(site.neurons, plan.num_heads) * neuron
    return saved


def extra_parameters(settings: Composition, num_layers: int, num_heads: int, hidden_size: int) -> int:
    """Parameters that composition adds to a model, exactly (Xiao 2024, App. E; over 12 D^2: about (2R + 1) / 3d)."""
    inner = 2 * settings.rank * num_heads
    side = settings.projection * (hidden_size * inner + inner * inner // settings.groups)
    side += settings.gate * hidden_size * num_heads
    base = num_heads * num_heads // settings.groups if settings.static_base else 0
    place = (settings.query_side + settings.key_side) * side + base
    places = settings.before_softmax + settings.after_softmax
    return num_layers * (places * place + (num_heads if settings.qk_norm else 0))
