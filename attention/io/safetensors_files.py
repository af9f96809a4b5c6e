"""The safetensors files of a checkpoint folder, read from their headers alone.

The file and the shape of each tensor.

A file that cannot be read is reported by name, with what it is instead and what to do.
"""

from __future__ import annotations

import json
import math
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from safetensors import SafetensorError, safe_open

from attention.io.sources import CONSOLIDATED, CheckpointError

INDEX = "model.safetensors.index.json"
SINGLE = "model.safetensors"
PICKLED = ("*.bin", "*.pt", "*.pth", "*.ckpt")
_AGAIN = "download or copy it again"


class WeightsError(CheckpointError):
    """Weights that are missing, wrong or unreadable.

    The message names the file or the tensor and what to do.
    """


@dataclass(frozen=True)
class Stored:
    """A tensor in a file.

    The file's name, the tensor's name there, its shape, its dtype in safetensors' spelling.
    """

    file: str
    name: str
    shape: tuple[int, ...]
    dtype: str

    @property
    def numbers(self) -> int:
        return math.prod(self.shape)


def listed(names: Iterable[str], most: int = 3) -> str:
    """Return the first names in the order of their numbers and how many more there are."""
    ordered = sorted(names, key=lambda name: [part.zfill(9) for part in name.split(".")])
    more = f" and {len(ordered) - most} more" if len(ordered) > most else ""
    return ", ".join(ordered[:most]) + more


@contextmanager
def open_safetensors(path: Path) -> Iterator[Any]:
    """Open a safetensors file while the body runs.

    Raises:
        WeightsError: Saying what is wrong with the file.
    """
    try:
        with safe_open(path, framework="pt") as file:
            yield file
    except (OSError, SafetensorError) as error:
        raise WeightsError(f"{path} cannot be read: {_diagnosis(path, error)}") from None


def weight_files(folder: Path) -> list[Path]:
    """Return the safetensors files of a folder by name, without a second copy of the weights."""
    files = sorted(folder.glob("*.safetensors"))
    return [file for file in files if not file.match(CONSOLIDATED)] or files


def stored_tensors(folder: Path) -> dict[str, Stored]:
    """All tensors of a checkpoint folder by the names that they have there. No tensor is read.

    The files are those that transformers takes: `model.safetensors`, or else those of the index.

    Raises:
        WeightsError: For files that are not there, cannot be read, or do not hold what the index
            says.
    """
    if (folder / "adapter_config.json").is_file():
        raise WeightsError(
            f"{folder} holds an adapter (adapter_config.json); merge it first: peft's "
            f"`merge_and_unload()`, then "
            "`save_pretrained` into a new folder"
        )
    if (folder / SINGLE).is_file():
        return tensors_of_file(folder, SINGLE)
    if not (folder / INDEX).is_file():
        raise WeightsError(_nothing_in(folder))
    weight_map = _index(folder / INDEX)
    files = sorted(set(weight_map.values()))
    absent = [file for file in files if not (folder / file).is_file()]
    if absent:
        raise WeightsError(
            f"{folder} lacks {len(absent)} of the {len(files)} files that {INDEX} names: "
            f"{listed(absent)}; "
            "download or copy them"
        )
    stored: dict[str, Stored] = {}
    for file in files:
        for name, tensor in tensors_of_file(folder, file).items():
            if name in stored:
                raise WeightsError(
                    f"{folder}: {name} is in both {stored[name].file} and {file}; save the model "
                    f"again"
                )
            stored[name] = tensor
    for name, file in weight_map.items():
        if name not in stored or stored[name].file != file:
            raise WeightsError(
                f"{folder / file} has no tensor {name!r}, which {INDEX} says it has; file and "
                f"index are not of one "
                "model: download or copy both again"
            )
    return stored


def tensors_of_file(folder: Path, file: str) -> dict[str, Stored]:
    """Return the tensors of one file by name. Raises WeightsError if it cannot be read."""
    tensors = {}
    with open_safetensors(folder / file) as weights:
        for name in weights.keys():  # noqa: SIM118 (not a dict)
            part = weights.get_slice(name)
            tensors[name] = Stored(file, name, tuple(part.get_shape()), part.get_dtype())
    return tensors


def _index(path: Path) -> dict[str, str]:
    try:
        weight_map = json.loads(path.read_text(encoding="utf-8"))["weight_map"]
        if weight_map and all(isinstance(file, str) for file in weight_map.values()):
            return weight_map
    except (OSError, ValueError, KeyError, TypeError, AttributeError):
        pass
    raise WeightsError(
        f"{path} is not an index of safetensors files (JSON with a weight_map); {_AGAIN}"
    )


def _nothing_in(folder: Path) -> str:
    """Return what to do with a folder that has neither a single file nor an index."""
    if shards := list(folder.glob("model-*-of-*.safetensors")):
        return (
            f"{folder} has {len(shards)} safetensors shards, but no {INDEX}; download or copy "
            f"it too"
        )
    pickled = sorted(path.name for pattern in PICKLED for path in folder.glob(pattern))
    if pickled:
        return (
            f"{folder} has no safetensors weights, only pickled ones ({listed(pickled)}), which "
            f"can run code when they "
            "are read. If you trust their source, save the weights as safetensors in transformers: "
            f"AutoModelForCausalLM.from_pretrained({str(folder)!r}, "
            f"use_safetensors=False).save_pretrained(NEW_FOLDER)"
        )
    names = listed(path.name for path in folder.glob("*.safetensors"))
    hint = f" (it has {names}, which transformers does not look for)" if names else ""
    return (
        f"{folder} has no safetensors weights: neither {SINGLE} nor {INDEX}{hint}; copy them "
        f"there, or save the "
        "weights as safetensors with save_pretrained"
    )


def _diagnosis(path: Path, error: Exception) -> str:
    """Return what is wrong with a file that safetensors does not read, and what to do."""
    try:
        size = path.stat().st_size
        with path.open("rb") as file:
            start = file.read(64)
            length = int.from_bytes(start[:8], "little")
            file.seek(8)
            header = file.read(length) if length <= size else b""
    except OSError as refused:
        return str(refused)
    if size == 0:
        return f"it is empty; {_AGAIN}"
    if start.startswith(b"version https://git-lfs"):
        return "it is a pointer of Git LFS, not the weights; fetch them with `git lfs pull`"
    if start.lstrip()[:1] == b"<":
        return f"it is a web page, not safetensors; {_AGAIN}"
    if start[:2] == b"PK" or start[:1] == b"\x80":
        return "it is a pickle under the name of safetensors; save the weights with save_pretrained"
    if start[8:9] != b"{":
        return f"it is not safetensors ({error}); {_AGAIN}"
    expected = 8 + length + _data_bytes(header)
    if size < expected:
        return f"it is truncated: {size:,} bytes of at least {expected:,}; {_AGAIN}"
    return f"it is damaged ({error}); {_AGAIN}"


def _data_bytes(header: bytes) -> int:
    """Bytes of tensors that a header promises; 0 if it is itself cut off or damaged."""
    try:
        tensors = [entry for name, entry in json.loads(header).items() if name != "__metadata__"]
        return max(entry["data_offsets"][1] for entry in tensors)
    except (ValueError, KeyError, TypeError, AttributeError, IndexError):
        return 0
