"""The plain checkpoint of a source that is a GGUF file or quantised safetensors.

Made once, in a cache, and opened by all that reads checkpoints.

The copy is in `CACHE/models/KEY/NAME`; its key is derived from the source's path, size and time.
`source.json` there names the source, which records and cards show instead.
"""

from __future__ import annotations

import hashlib
import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from transformers import PretrainedConfig

from attention.base.cache import cache_folder
from attention.base.messages import reason
from attention.io import checkpoint
from attention.io.file_lock import file_lock
from attention.io.piecewise import SHARD, write_shards
from attention.io.precision import DTYPES
from attention.io.quantised.gguf_file import SUFFIX, GGUFFile
from attention.io.quantised.packed import PlainTensors, method_of
from attention.io.replacing import DIGESTS
from attention.io.sources import CheckpointError, fetched, only_cached, write_source_note
from attention.io.stock_files import GENERATION, TOKENIZER_FILES, copy_files
from attention.io.weights import METHODS

# Of a copy: another one is made anew
_GGUF_FORMAT = 3
_SAFETENSORS_FORMAT = 2
_GIGA = 2.0**30
HEADERS = ["*.json", "*.jinja", "*.model*", "*.txt", "*.tiktoken"]
WEIGHTS = "*.safetensors"


def plain_checkpoint(
    source: str | Path,
    *,
    dequantize: bool = False,
    weights: bool = True,
    cache: Path | None = None,
    report: Callable[[str], None] = print,
) -> str:
    """Return the folder or hub name to open for `source`.

    Itself, unless it is a GGUF file or, with `dequantize`, quantised.

    Then it is the folder of a plain copy, made in `cache` (default: `cache_folder()`) if it is not
    there; `report` takes a line that says so. Without `weights` only config and tokenizer are
    written, for what reads no weights.

    Raises:
        CheckpointError: Or WeightsError for a source that cannot be read, and where the copy finds
            no room.
    """
    path = Path(source)
    cache = cache_folder() if cache is None else cache
    if path.is_dir() and not (path / "config.json").is_file():
        path = _only_gguf(path)
    if path.suffix == SUFFIX and path.is_file():
        return str(_of_gguf(path, cache, weights, report))
    if not dequantize:
        return str(source)
    fields = _config_fields(source)
    settings = fields.get("quantization_config")
    if not settings:
        return str(source)
    if method_of(settings) not in METHODS:
        raise CheckpointError(
            f"{source}: weights of quant_method {method_of(settings)!r} cannot be read as plain "
            f"numbers, only "
            f"{', '.join(METHODS)}; take the model that it was made of"
        )
    return str(_of_safetensors(source, fields, cache, weights, report))


def _only_gguf(folder: Path) -> Path:
    """Return the GGUF file of a folder that has one; the folder itself if it has none."""
    files = sorted(folder.glob(f"*{SUFFIX}"))
    if len(files) > 1:
        raise CheckpointError(
            f"{str(folder)!r} holds {len(files)} GGUF files; name one of them, e.g. "
            f"{str(files[0])!r}"
        )
    return files[0] if files else folder


def _of_gguf(path: Path, cache: Path, weights: bool, report: Callable[[str], None]) -> Path:
    file = GGUFFile(path)
    folder = _place(cache, path.stem, [path], weights, _GGUF_FORMAT)
    rounded = file.rounded
    name = str(file.dtype).removeprefix("torch.")

    def write(fresh: Path) -> None:
        config = file.write_config(fresh)
        if weights:
            write_shards(file.tensors(config, file.dtype), fresh, SHARD)
        else:
            file.check(config)
        write_source_note(fresh, path.resolve(), weights=weights, rounded=rounded)

    about = (
        f"the rounding of {', '.join(rounded)} is in its weights"
        if rounded
        else "no number is rounded"
    )
    _make(
        folder,
        path.name,
        write,
        file.numbers * file.dtype.itemsize * weights,
        f"{name}; {about}",
        report,
    )
    return folder


def _of_safetensors(
    source: str | Path,
    fields: dict[str, Any],
    cache: Path,
    weights: bool,
    report: Callable[[str], None],
) -> Path:
    origin = fetched(source, [*HEADERS, WEIGHTS] if weights else HEADERS, "weights")
    method = method_of(fields["quantization_config"])
    dtype = DTYPES.get(
        str(fields.get("dtype") or fields.get("torch_dtype")).removeprefix("torch."), torch.bfloat16
    )
    patterns = ("config.json", WEIGHTS, *TOKENIZER_FILES, GENERATION)
    files = sorted({file for pattern in patterns for file in origin.glob(pattern)})
    folder = _place(cache, _name_of(source, origin), files, weights, _SAFETENSORS_FORMAT)
    plain = (
        PlainTensors.of(origin, fields["quantization_config"])
        if weights or any(origin.glob(WEIGHTS))
        else None
    )

    def write(fresh: Path) -> None:
        tensors = {
            key: value
            for key, value in fields.items()
            if key != "quantization_config" and key[:1] != "_"
        }
        tensors |= {"dtype": str(dtype).removeprefix("torch.")}
        (fresh / "config.json").write_text(
            json.dumps(tensors, indent=2, sort_keys=True) + "\n", encoding="utf-8"
        )
        copy_files(origin, fresh)
        if weights and plain is not None:
            write_shards(plain.tensors(dtype), fresh, SHARD)
        name = Path(source).resolve() if Path(source).exists() else source
        write_source_note(fresh, name, weights=weights, rounded=[str(method)])

    about = f"{str(dtype).removeprefix('torch.')}; the rounding of {method} is in its weights"
    if plain is not None and plain.unused:
        about += f"; {len(plain.unused)} scales of activations and caches are left out"
    if fields["quantization_config"].get("kv_cache_scheme"):
        about += "; its kv_cache_scheme is left out: calibrate the cache of the result again"
    needed = plain.sizes(dtype) if weights and plain is not None else 0
    _make(folder, str(source), write, needed, about, report)
    return folder


def _config_fields(source: str | Path) -> dict[str, Any]:
    """config.json of a folder or hub name, as it stands. Raises CheckpointError."""
    try:
        cached = only_cached(source)
        fields, _ = PretrainedConfig.get_config_dict(str(source), local_files_only=cached)
    except CheckpointError:
        raise
    except Exception as error:
        raise CheckpointError(f"no checkpoint at {str(source)!r}: {reason(error)}") from None
    return fields


def _name_of(source: str | Path, origin: Path) -> str:
    return origin.resolve().name if Path(source).is_dir() else str(source).rpartition("/")[2]


def _place(cache: Path, name: str, files: list[Path], weights: bool, format: int) -> Path:
    stamps = [[str(file.resolve()), file.stat().st_size, file.stat().st_mtime_ns] for file in files]
    key = hashlib.sha256(json.dumps([format, weights, stamps]).encode()).hexdigest()[:16]
    return cache / "models" / key / name


def _make(
    folder: Path,
    name: str,
    write: Callable[[Path], None],
    needed: int,
    about: str,
    report: Callable[[str], None],
) -> None:
    """Have `write` make `folder`, unless it is there.

    Raises:
        CheckpointError: Where `needed` bytes are not free.
    """
    if (folder / DIGESTS).is_file():
        if needed:
            report(f"{name}: read from its plain copy in {folder} ({about})")
        return
    room = "set HEADFOLD_CACHE to a folder that has the room"
    try:
        folder.parent.mkdir(parents=True, exist_ok=True)
        free = shutil.disk_usage(folder.parent).free
    except OSError as error:
        raise CheckpointError(
            f"no plain copy of {name} can be written to {str(folder)!r} ({error}); {room}"
        ) from None
    if free < needed:
        raise CheckpointError(
            f"a plain copy of {name} takes {needed / _GIGA:.2f} GiB in {str(folder.parent)!r}, "
            f"where {free / _GIGA:.2f} "
            f"GiB are free; {room}"
        )
    if needed:
        report(f"{name}: written as plain numbers to {folder}, {needed / _GIGA:.2f} GiB ({about})")
    note = f"{name}: waits for another process, which writes the same plain copy"
    try:
        with file_lock(folder.parent / ".lock", note=note):
            if not (folder / DIGESTS).is_file():
                checkpoint.write_atomically(folder, write)
    except OSError as error:
        raise CheckpointError(
            f"no plain copy of {name} can be written to {str(folder)!r} ({error}); {room}"
        ) from None
