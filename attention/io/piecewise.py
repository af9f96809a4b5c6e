"""A checkpoint read and written one tensor at a time, for models that no process holds whole."""

from __future__ import annotations

import copy
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

import torch
from accelerate import init_empty_weights
from safetensors.torch import save_file
from torch import Tensor
from transformers import AutoModelForCausalLM, PreTrainedModel
from transformers.initialization import no_init_weights

from attention.checkpoint import Checkpoint
from attention.io import checkpoint
from attention.io.experts import published
from attention.io.layers.windows import LazyWeights
from attention.io.safetensors_files import SINGLE
from attention.io.shards import shard_name, write_index
from attention.io.sources import fetched
from attention.io.stock_files import copy_files, write_both_forms
from attention.modeling import model_classes

SHARD = 2**29  # bytes of one file, and so of what its writer holds at a time


def outline(source: str | Path, dtype: torch.dtype) -> tuple[PreTrainedModel, LazyWeights]:
    """Return the model of a checkpoint with parameters on the meta device, and its weights.

    The model is in evaluation mode, its buffers are whole; a parameter is read from the weights
    when it is used.

    Args:
        source: Local folder or hub name.
        dtype: What the parameters are read in.

    Raises:
        CheckpointError: As `attention.io.checkpoint.load`.
    """
    config = Checkpoint.open(source).config
    weights = LazyWeights(fetched(source, ["*.json", "*.safetensors"], "weights"), config)
    with no_init_weights(), init_empty_weights(include_buffers=False):
        model: Any = AutoModelForCausalLM.from_config(config, dtype=dtype)
    model.tie_weights()  # registering had separated each pair of tied matrices
    for module in model.modules():  # put a map of heads on the device of its projections
        for name, buffer in module.named_buffers(recurse=False):
            if buffer.is_meta and name not in module._non_persistent_buffers_set:
                setattr(module, name, torch.empty_like(buffer, device="cpu"))
    headfold_format = config.model_type.startswith(model_classes.TYPE_PREFIX)
    if headfold_format:
        model_classes.set_missing_maps(model)
    stored = dict(model.named_buffers()).keys() & model.state_dict().keys()
    weights.read_into({name: model.get_buffer(name) for name in stored})
    if headfold_format:
        model_classes.check_maps(model)
    return model.eval(), weights


def save_as(
    source: str | Path,
    tensors: Iterable[tuple[str, Tensor]],
    folder: str | Path,
    record: dict[str, Any] | None = None,
    *,
    shard: int = SHARD,
) -> Path:
    """Write the model of the checkpoint folder `source` with other weights, atomically.

    `tensors` gives each of its parameters and persistent buffers once, by name, when it is used; at
    most `shard` bytes of them, or one, are in memory at a time. Files have the names of published
    checkpoints: a matrix for each expert.

    Returns:
        Its folder.

    Raises:
        ValueError: If they are not those of the model.
    """
    config = copy.deepcopy(Checkpoint.open(source).config)
    with torch.device("meta"), no_init_weights():
        model: Any = AutoModelForCausalLM.from_config(config)
    tied = set(model.all_tied_weights_keys)
    stored = {name: t for name, t in model.state_dict().items() if name not in tied}
    expected = {name: tuple(t.shape) for name, t in published(model, stored).items()}

    def as_published() -> Iterator[tuple[str, Tensor]]:
        for name, tensor in tensors:
            if name not in tied:
                yield from published(model, {name: tensor}).items()

    def write(fresh: Path) -> None:
        written, dtype = write_shards(as_published(), fresh, shard)
        if written != expected:
            raise ValueError(
                f"expected the tensors of {source}; others are "
                f"{sorted(written.items() ^ expected.items())}"
            )
        config.dtype = dtype
        config.architectures = [type(model).__name__]
        config.save_pretrained(fresh)
        write_both_forms(fresh)
        copy_files(source, fresh)
        checkpoint.write_note(fresh, model_classes.plan_of(model), record)

    return checkpoint.write_atomically(folder, write)


def write_shards(
    tensors: Iterable[tuple[str, Tensor]], folder: Path, shard: int
) -> tuple[dict[str, tuple[int, ...]], torch.dtype]:
    """Write all tensors into files of at most `shard` bytes, named as transformers does.

    Returns:
        The shapes by name, and the dtype of the first that is of floating point.
    """
    shapes: dict[str, tuple[int, ...]] = {}
    dtypes: list[torch.dtype] = []
    files: list[Path] = []
    for piece in _pieces(tensors, shard):
        shapes |= {name: tuple(tensor.shape) for name, tensor in piece.items()}
        dtypes += [tensor.dtype for tensor in piece.values() if tensor.is_floating_point()]
        files.append(folder / f"piece-{len(files)}")
        save_file(piece, files[-1], {"format": "pt"})
    if len(files) == 1:
        files[0].rename(folder / SINGLE)
    else:
        for index, file in enumerate(files):
            file.rename(folder / shard_name(index, len(files)))
        write_index(folder)
    return shapes, dtypes[0]


def _pieces(tensors: Iterable[tuple[str, Tensor]], most: int) -> Iterator[dict[str, Tensor]]:
    """Tensors in groups of at most `most` bytes, or of one tensor."""
    piece: dict[str, Tensor] = {}
    for name, tensor in tensors:
        if piece and sum(t.nbytes for t in piece.values()) + tensor.nbytes > most:
            yield piece
            piece = {}
        piece[name] = tensor.detach().cpu().contiguous()
    yield piece
