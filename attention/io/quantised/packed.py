"""Quantised safetensors as plain numbers: FP8 blocks, compressed-tensors, MXFP4.

One tensor at a time.

Every number is the product that the format defines, computed in float32 and rounded once to the
requested dtype. The scales of a weight may be in another file than the weight.

Legend: N rows and K columns of a matrix, E experts, G groups of a row.
"""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from attention.io.safetensors_files import (
    Stored,
    WeightsError,
    listed,
    open_safetensors,
    stored_tensors,
)
from attention.io.weights import METHODS

FORMATS = ("float-quantized", "int-quantized", "naive-quantized", "pack-quantized", "dense")
"""Formats of compressed-tensors that can be read."""
FP4 = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0, -0.0, -0.5, -1.0, -1.5, -2.0, -3.0, -4.0, -6.0)
"""The numbers of four bits that MXFP4 knows, by their code."""
_NARROW = ("F8_E4M3", "F8_E5M2", "I8", "U8", "I32")
# Scales of activations and of the KV cache: of no use for weights in plain numbers.
UNUSED = re.compile(
    r"\.(input_scale|activation_scale|input_zero_point|input_global_scale|[kvq]_scale|output_scale)$"
)


def method_of(settings: Any) -> str | None:
    """Return the `quant_method` of a `quantization_config`; None where there is none."""
    return settings.get("quant_method") if isinstance(settings, Mapping) else None


@dataclass(frozen=True)
class _PlainTensor:
    """How one plain tensor is computed from stored ones.

    Attributes:
        shape: That of the plain tensor.
        sources: The stored tensors, by their part in `make`.
        make: Makes the plain tensor.
    """

    shape: tuple[int, ...]
    sources: Mapping[str, Stored]
    make: Callable[[Mapping[str, Tensor]], Tensor]


@dataclass(frozen=True)
class PlainTensors:
    """The plain tensors of a quantised checkpoint folder. No tensor is read before it is used.

    Attributes:
        copied: Tensors that are stored as plain numbers already.
        recipes: How the others are made, by name.
        unused: Stored scales of activations and caches, which are left out.
    """

    folder: Path
    copied: Mapping[str, Stored]
    recipes: Mapping[str, _PlainTensor]
    unused: tuple[str, ...]

    @classmethod
    def of(cls, folder: Path, settings: Mapping[str, Any]) -> PlainTensors:
        """Read the headers of a folder with this `quantization_config`.

        Raises:
            WeightsError: For a method or format that cannot be read, and for a weight without its
                scales.
        """
        stored = stored_tensors(folder)
        unused = tuple(sorted(name for name in stored if UNUSED.search(name)))
        left = {name: tensor for name, tensor in stored.items() if name not in unused}
        method = method_of(settings)
        make: dict[
            str,
            Callable[
                [str, Mapping[str, Stored], Mapping[str, Any]], tuple[str, _PlainTensor] | None
            ],
        ] = {
            "fp8": _fp8,
            "compressed-tensors": _compressed,
            "mxfp4": _mxfp4,
        }
        if method not in make:
            raise WeightsError(
                f"{folder}: weights of {method} cannot be read as plain numbers, only {METHODS}"
            )
        if method == "compressed-tensors":
            _check_formats(folder, settings)
        recipes: dict[str, _PlainTensor] = {}
        for name in left:
            try:
                result = make[method](name, left, settings)
            except ValueError as error:
                raise WeightsError(f"{folder}: {error}") from None
            if result is not None:
                recipes[result[0]] = result[1]
        used = {tensor.name for recipe in recipes.values() for tensor in recipe.sources.values()}
        copied = {name: tensor for name, tensor in left.items() if name not in used}
        if odd := [name for name, tensor in copied.items() if tensor.dtype in _NARROW]:
            kinds = sorted({copied[name].dtype for name in odd})
            raise WeightsError(
                f"{folder}: {len(odd)} tensors of {', '.join(kinds)} have no scales that belong to "
                f"them: "
                f"{listed(odd)}; download or copy the checkpoint again"
            )
        return cls(folder, copied, recipes, unused)

    def sizes(self, dtype: torch.dtype) -> int:
        """Bytes of all plain tensors, those that are made in `dtype`."""
        decoded_bytes = (
            sum(math.prod(recipe.shape) for recipe in self.recipes.values()) * dtype.itemsize
        )
        return decoded_bytes + sum(
            tensor.numbers * (4 if tensor.dtype == "F32" else 2) for tensor in self.copied.values()
        )

    def tensors(self, dtype: torch.dtype) -> Iterator[tuple[str, Tensor]]:
        """All plain tensors by name, made ones in `dtype`; the others as they are stored."""
        for name, stored in self.copied.items():
            yield name, self._read(stored)
        for name, recipe in self.recipes.items():
            tensor = recipe.make(
                {part: self._read(stored) for part, stored in recipe.sources.items()}
            )
            if tuple(tensor.shape) != recipe.shape:
                raise WeightsError(
                    f"{self.folder}: {name} is {list(tensor.shape)}, expected {list(recipe.shape)}"
                )
            yield name, tensor.to(dtype)

    def _read(self, tensor: Stored) -> Tensor:
        with open_safetensors(self.folder / tensor.file) as file:
            return file.get_tensor(tensor.name).clone()


# ---- FP8 --------------------------------------------------------------------------------------


def _fp8(
    name: str, stored: Mapping[str, Stored], settings: Mapping[str, Any]
) -> tuple[str, _PlainTensor] | None:
    """Return a weight of eight bits with factors, `NAME_scale_inv` (of blocks) or `NAME_scale`."""
    tensor = stored[name]
    if tensor.dtype not in ("F8_E4M3", "F8_E5M2"):
        return None
    scale = next((stored[n] for n in (f"{name}_scale_inv", f"{name}_scale") if n in stored), None)
    if scale is None:
        raise ValueError(
            f"{name} is of {tensor.dtype} and has neither {name}_scale_inv nor {name}_scale"
        )
    block = settings.get("weight_block_size")

    def make(parts: Mapping[str, Tensor]) -> Tensor:
        return scaled(parts["weight"], parts["scale"], block)

    return name, _PlainTensor(tensor.shape, {"weight": tensor, "scale": scale}, make)


def scaled(weight: Tensor, scale: Tensor, block: Any = None) -> Tensor:
    """Return `weight` `[..., N, K]` times its factors, in float32.

    Args:
        scale: One number, one of each row, of each row's group of columns `[..., N, G]`, or of each
            block of `block` rows and columns `[..., ceil(N / rows), ceil(K / columns)]`.

    Raises:
        ValueError: For another shape.
    """
    rows, columns = weight.shape[-2:]
    factors = scale.float()
    if factors.numel() == 1:
        return weight.float() * factors.reshape(())
    if factors.dim() == weight.dim() - 1 and factors.shape[-1] == rows:
        factors = factors.unsqueeze(-1)
    if factors.dim() != weight.dim():
        raise ValueError(
            f"scales of shape {list(scale.shape)} do not belong to a weight of {list(weight.shape)}"
        )
    height, width = (
        (int(size) for size in block) if block else (1, math.ceil(columns / factors.shape[-1]))
    )
    if factors.shape[-2] == 1 and not block:
        height = rows
    expected = (math.ceil(rows / height), math.ceil(columns / width))
    if tuple(factors.shape[-2:]) != expected:
        raise ValueError(
            f"scales of shape {list(scale.shape)} do not belong to a weight of "
            f"{list(weight.shape)} in blocks of "
            f"{height} by {width}"
        )
    result = weight.float()
    if height == 1 and columns % width == 0:  # groups within each row
        return (result.unflatten(-1, (-1, width)) * factors[..., None]).flatten(-2)
    # A strip of rows at a time, so that no factor is ever repeated for each number.
    for index in range(expected[0]):
        strip = slice(index * height, min(rows, (index + 1) * height))
        wide = factors[..., index : index + 1, :].repeat_interleave(width, dim=-1)[..., :columns]
        result[..., strip, :] *= wide
    return result


# ---- compressed-tensors -----------------------------------------------------------------------


def _check_formats(folder: Path, settings: Mapping[str, Any]) -> None:
    groups = settings.get("config_groups") or {}
    formats = {
        settings.get("format"),
        *(g.get("format") for g in groups.values() if isinstance(g, Mapping)),
    } - {None}
    formats.discard("mixed-precision")  # says only that each group has its own format
    if other := sorted(str(name) for name in formats - set(FORMATS)):
        raise WeightsError(
            f"{folder}: compressed-tensors of format {', '.join(other)} cannot be read as plain "
            f"numbers, only "
            f"{', '.join(FORMATS)}; take the model that it was made of"
        )
    if settings.get("transform_config"):
        raise WeightsError(
            f"{folder}: its weights are rotated (transform_config of compressed-tensors), and are "
            f"of use only with "
            "the rotations; take the model that it was made of"
        )


def _weights_of(name: str, settings: Mapping[str, Any]) -> Mapping[str, Any]:
    """Return the settings of the group that a module's weights belong to.

    The only one, or the one that names it, or else that of all linear modules.
    """
    groups = [
        group
        for group in (settings.get("config_groups") or {}).values()
        if isinstance(group, Mapping)
    ]
    if len(groups) > 1:
        module = name.rpartition(".")[0]
        for group in groups:
            for target in group.get("targets") or ():
                if (
                    re.match(target[3:], module)
                    if target.startswith("re:")
                    else module.endswith(target)
                ):
                    return group.get("weights") or {}
    of_all = [group for group in groups if "Linear" in (group.get("targets") or ())]
    return next((group.get("weights") for group in (*of_all, *groups)), None) or {}


def _compressed(
    name: str, stored: Mapping[str, Stored], settings: Mapping[str, Any]
) -> tuple[str, _PlainTensor] | None:
    """Return a weight of eight bits with its scales, or packed integers.

    The latter are `weight_packed` and `weight_shape`.
    """
    tensor = stored[name]
    weights = _weights_of(name, settings)
    stem, _, last = name.rpartition(".")
    if last == "weight_packed":
        return f"{stem}.weight", _unpacked(stem, stored, weights)
    if last != "weight" or tensor.dtype not in ("F8_E4M3", "F8_E5M2", "I8"):
        return None
    sources = {"weight": tensor, "scale": _companion(stored, f"{stem}.weight_scale", name)}
    if (zero := stored.get(f"{stem}.weight_zero_point")) is not None:
        sources["zero"] = zero
    block = weights.get("block_structure")

    def make(parts: Mapping[str, Tensor]) -> Tensor:
        weight = parts["weight"].float()
        if "zero" in parts and parts["zero"].any():
            ones = torch.ones_like(weight)
            weight -= scaled(ones, parts["zero"], block)
        return scaled(weight, parts["scale"], block)

    return name, _PlainTensor(tensor.shape, sources, make)


def _companion(stored: Mapping[str, Stored], name: str, of: str) -> Stored:
    if name not in stored:
        raise ValueError(f"{of} has no {name}; download or copy the checkpoint again")
    return stored[name]


def _unpacked(stem: str, stored: Mapping[str, Stored], weights: Mapping[str, Any]) -> _PlainTensor:
    """Return integers of `num_bits` that are packed into 32 bits, lowest first.

    They have an offset of half their range and a scale per group.
    """
    packed = stored[f"{stem}.weight_packed"]
    bits = int(weights.get("num_bits") or 4)
    if bits not in (2, 4, 8) or packed.dtype != "I32":
        raise ValueError(
            f"{packed.name}: integers of {bits} bits in {packed.dtype} cannot be read, only 2, 4 "
            f"and 8"
        )
    scale = _companion(stored, f"{stem}.weight_scale", packed.name)
    shape = _companion(stored, f"{stem}.weight_shape", packed.name)
    sources = {"packed": packed, "scale": scale, "shape": shape}
    for part, last in (("zero", "weight_zero_point"), ("order", "weight_g_idx")):
        if (tensor := stored.get(f"{stem}.{last}")) is not None:
            sources[part] = tensor
    per_group = int(weights.get("group_size") or 0)
    columns = per_group * scale.shape[-1] if per_group > 0 else packed.shape[-1] * 32 // bits

    def make(parts: Mapping[str, Tensor]) -> Tensor:
        rows, width = (int(size) for size in parts["shape"].tolist())
        whole = unpack(parts["packed"], bits, width).float()
        factors = parts["scale"].float()
        zero = parts.get("zero")
        if zero is not None and zero.dtype == torch.int32:  # packed too, along the rows
            zero = unpack(zero.T, bits, rows).T
        order = parts.get("order")
        if order is not None and bool((order >= 0).all()):
            columns_of = order.long()
        else:
            columns_of = torch.arange(width) // (per_group if per_group > 0 else width)
        if zero is not None:
            whole -= zero.float()[:, columns_of] if zero.shape[-1] > 1 else zero.float()
        return whole * (factors[:, columns_of] if factors.shape[-1] > 1 else factors)

    return _PlainTensor((packed.shape[0], columns), sources, make)


def unpack(packed: Tensor, bits: int, width: int) -> Tensor:
    """Signed integers `[N, width]` of 32-bit words `[N, ceil(width * bits / 32)]`."""
    shifts = torch.arange(0, 32, bits, dtype=torch.int32)
    codes = (packed[..., None] >> shifts) & (2**bits - 1)
    return codes.flatten(-2)[..., :width] - 2 ** (bits - 1)


# ---- MXFP4 ------------------------------------------------------------------------------------


def _mxfp4(
    name: str, stored: Mapping[str, Stored], settings: Mapping[str, Any]
) -> tuple[str, _PlainTensor] | None:
    """Experts as gpt-oss is published.

    `NAME_blocks` `[E, N, G, 16]` of two numbers a byte, `NAME_scales` `[E, N, G]` of powers of two.
    The plain tensor is `[E, 32 G, N]`.
    """
    if not name.endswith("_blocks"):
        return None
    stem = name.removesuffix("_blocks")
    blocks = stored[name]
    scales = _companion(stored, f"{stem}_scales", name)
    experts, rows, groups, half = blocks.shape

    def make(parts: Mapping[str, Tensor]) -> Tensor:
        experts = [four_bits(b, s) for b, s in zip(parts["blocks"], parts["scales"], strict=True)]
        return torch.stack(experts).transpose(1, 2).contiguous()

    return stem, _PlainTensor(
        (experts, groups * half * 2, rows), {"blocks": blocks, "scales": scales}, make
    )


def four_bits(blocks: Tensor, scales: Tensor) -> Tensor:
    """Decode numbers of four bits, two per byte, the lower half first, in bfloat16.

    Args:
        blocks: `[N, G, 16]` bytes.
        scales: `[N, G]`; numbers are multiplied by 2 to the power of `scales - 127`.

    Returns:
        `[N, 32 G]`.
    """
    values = torch.tensor(FP4, dtype=torch.bfloat16)
    pairs = torch.stack([values[(blocks & 15).int()], values[(blocks >> 4).int()]], dim=-1).flatten(
        -2
    )
    return torch.ldexp(pairs, (scales.int() - 127)[..., None]).flatten(-2)
