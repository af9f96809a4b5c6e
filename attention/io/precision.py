"""The dtype of a checkpoint.

The dtype of a stored checkpoint, and rounding to it once after computing in a wider one.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from attention.io.safetensors_files import WeightsError, tensors_of_file

DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}
"""Dtypes that a checkpoint is worked on and written in, by name."""
# As safetensors calls them.
STORED = {"F64": "float64", "F32": "float32", "F16": "float16", "BF16": "bfloat16"}


class DtypeError(ValueError):
    """A dtype that is unknown, or that nothing says. The message names what is possible."""


def own_dtype(config: Any, source: str | Path) -> torch.dtype:
    """Return the dtype of the checkpoint at `source`.

    The dtype of its config, as transformers reads it, else that of most of its weights.

    Raises:
        DtypeError: If neither is known, or if it is none of DTYPES.
    """
    stated = getattr(config, "dtype", None)
    name = str(stated).removeprefix("torch.") if stated is not None else _most_stored(Path(source))
    if name is None:
        raise DtypeError(
            f"the config of {str(source)!r} says no dtype; name one of {sorted(DTYPES)}"
        )
    if name not in DTYPES:
        raise DtypeError(
            f"{str(source)!r} is stored in {name}; name one of {sorted(DTYPES)} to convert it to"
        )
    return DTYPES[name]


def _most_stored(folder: Path) -> str | None:
    """Return the floating-point dtype of most numbers in a folder's safetensors, or None."""
    counts: Counter[str] = Counter()
    for path in sorted(folder.glob("*.safetensors")):
        with suppress(WeightsError):  # a file that cannot be read is reported when it is loaded
            for tensor in tensors_of_file(folder, path.name).values():
                counts[tensor.dtype] += tensor.numbers
    kinds = [kind for kind, _ in counts.most_common() if kind in STORED]
    return STORED[kinds[0]] if kinds else None


@torch.no_grad()
def cast_weights(model: nn.Module, dtype: torch.dtype) -> None:
    """Give all floating-point weights another dtype, in place.

    Tensors that are not in the checkpoint, and those that transformers reads in float32 whatever
    the dtype, stay unchanged.

    Not `model.to(dtype)`, which would round the frequencies of rotary embeddings too.
    """
    stays = in_float32(model)
    for name, parameter in model.named_parameters():
        if parameter.is_floating_point() and not stays(name):
            parameter.data = parameter.data.to(dtype)
    for module, name in _stored_buffers(model):
        if not stays(name):
            setattr(module, name, getattr(module, name).to(dtype))
    if (config := getattr(model, "config", None)) is not None:
        config.dtype = dtype


def _stored_buffers(model: nn.Module) -> list[tuple[nn.Module, str]]:
    """Return the floating-point buffers that a checkpoint stores, as modules and names."""
    return [
        (module, name)
        for module in model.modules()
        for name, buffer in module.named_buffers(recurse=False)
        if name not in module._non_persistent_buffers_set
        and isinstance(buffer, Tensor)
        and buffer.is_floating_point()
    ]


@torch.no_grad()
def round_weights(model: Any, dtype: torch.dtype) -> None:
    """Round all weights to what `dtype` can hold; the model computes in its own dtype as before.

    Weights that this changes get new memory, so that a model that shares theirs is not changed.
    """
    working = model.dtype
    if working == dtype:
        return
    stays = in_float32(model)
    buffers = [(name, getattr(module, name)) for module, name in _stored_buffers(model)]
    for name, tensor in [*model.named_parameters(), *buffers]:
        rounded = tensor.data.to(dtype).to(tensor.dtype)
        if tensor.is_floating_point() and not stays(name) and not torch.equal(rounded, tensor.data):
            tensor.data = rounded


def in_float32(model: nn.Module | type[nn.Module]) -> Callable[[str], bool]:
    """Return whether a tensor of a name is read in float32 whatever the dtype: those of routers.

    Args:
        model: A model, or its class.
    """
    listed = getattr(model, "_keep_in_fp32_modules_strict", None) or ()
    ends = tuple(f".{name}" for name in {*listed, "e_score_correction_bias"})
    return lambda name: f".{name}".endswith(ends)
