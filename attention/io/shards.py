"""A checkpoint that is written piece by piece.

One safetensors file a piece, and an index over all at the end.

An existing piece is complete, so a killed conversion continues after the pieces that it has. Pieces
are the embedding, one per layer, and the modules above the layers.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file
from torch import Tensor
from transformers import AutoModelForCausalLM, PretrainedConfig

from attention.io import checkpoint
from attention.io.experts import published
from attention.io.files import written_whole
from attention.io.layers.windows import LazyWeights, stored_outer_names
from attention.io.precision import STORED
from attention.io.safetensors_files import INDEX, tensors_of_file
from attention.io.stock_files import copy_files, write_both_forms
from attention.modeling.model_classes import headfold_config
from attention.plan import AttentionPlan

_PARTS = "model-*.safetensors"
_BYTES = {"F64": 8, "I64": 8, "F32": 4, "I32": 4, "F16": 2, "BF16": 2, "BOOL": 1, "U8": 1, "I8": 1}


def shard_name(index: int, count: int) -> str:
    """Return the name of a shard, as transformers names the files of a checkpoint."""
    return f"model-{index + 1:05d}-of-{count:05d}.safetensors"


def shard_path(folder: Path, piece: int, layers: int) -> Path:
    """File of a piece: 0 is the embedding, i + 1 layer i, layers + 1 the rest."""
    return folder / shard_name(piece, layers + 2)


def write_shard(path: Path, tensors: Mapping[str, Tensor]) -> None:
    """Write one piece atomically."""
    copies = {name: tensor.detach().cpu().contiguous() for name, tensor in tensors.items()}
    with written_whole(path) as fresh:
        save_file(copies, fresh, {"format": "pt"})


def write_index(folder: Path) -> dict[str, int]:
    """Write the index over all pieces in `folder`.

    Returns:
        `parameters` (floating-point numbers) and `bytes`.
    """
    weight_map: dict[str, str] = {}
    parameters = size = 0
    for path in sorted(folder.glob(_PARTS)):
        for name, tensor in tensors_of_file(folder, path.name).items():
            weight_map[name] = path.name
            parameters += tensor.numbers if tensor.dtype in STORED else 0
            size += tensor.numbers * _BYTES[tensor.dtype]
    record = {
        "metadata": {"total_size": size, "total_parameters": parameters},
        "weight_map": weight_map,
    }
    (folder / INDEX).write_text(
        json.dumps(record, indent=1, sort_keys=True) + "\n", encoding="utf-8"
    )
    return {"parameters": parameters, "bytes": size}


def complete_checkpoint(
    folder: Path,
    weights: LazyWeights,
    config: PretrainedConfig,
    plan: AttentionPlan,
    *,
    plain: bool,
    dtype: torch.dtype,
    record: dict[str, Any] | None = None,
) -> dict[str, int]:
    """Complete a checkpoint in a folder that has the pieces of all layers.

    Weights outside of the layers, the index and the config are added.

    Args:
        folder: The folder.
        weights: Those of the original checkpoint, whose tokenizer files are copied.
        config: That of the original checkpoint.
        plan: The plan of the pieces.
        plain: Whether to write the plain form, which stock transformers loads.
        dtype: What the weights are written in.
        record: Content of the note in the folder.

    Returns:
        `parameters` of the model, and `bytes` of the files.

    Raises:
        ValueError: If the pieces are not those of the plan, or if there is no plain form and
            `plain` requires one.
    """
    for half in folder.glob(".*.new"):  # of a killed conversion
        half.unlink()
    new_config = headfold_config(config, plan)
    if plain:
        lowered = checkpoint.plain_form(new_config, plan)
        if lowered is None:
            raise ValueError(
                "only a uniform GQA plan of a family with grouped heads has a plain form; use "
                "plain=False"
            )
        new_config = lowered
    table, *other_names = stored_outer_names(config)
    write_shard(shard_path(folder, 0, plan.num_layers), {table: weights.one(table, dtype)})
    rest = {name: weights.one(name, dtype) for name in other_names}
    write_shard(shard_path(folder, plan.num_layers + 1, plan.num_layers), rest)
    sizes = write_index(folder)
    parameters = _check_names(folder, new_config)
    new_config.dtype = dtype
    new_config.save_pretrained(folder)
    write_both_forms(folder)
    copy_files(weights.folder, folder)
    checkpoint.write_note(folder, plan, record)
    return {"parameters": parameters, "bytes": sizes["bytes"]}


def _check_names(folder: Path, config: PretrainedConfig) -> int:
    """Complete the config by what its model knows, and compare its tensors with the index.

    Returns:
        The number of parameters of the model: stored buffers are not among them.
    """
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(config)
    listed = set(json.loads((folder / INDEX).read_text(encoding="utf-8"))["weight_map"])
    tied = set(model.all_tied_weights_keys) if config.tie_word_embeddings else set()
    expected = set(
        published(model, {name: t for name, t in model.state_dict().items() if name not in tied})
    )
    if listed != expected:
        raise ValueError(
            f"{folder} must hold the {len(expected)} tensors of {type(model).__name__}; missing "
            f"are "
            f"{sorted(expected - listed)[:3]}, too many {sorted(listed - expected)[:3]}; "
            "remove the folder and convert again"
        )
    config.architectures = [type(model).__name__]
    return sum(parameter.numel() for parameter in model.parameters())
