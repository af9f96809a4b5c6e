"""A calibration in files.

One safetensors file per layer, mapped into memory when the layer is used and not before.

    calibration-DIGEST/layer-0000.safetensors, ...     `LayerStatistics` of a layer
    calibration-DIGEST/calibration.json                what it is of; SHA-256, size, time of files

The SHA-256 of a file is worked out when it is written. A reader compares size and time of
modification with those in `calibration.json` and hashes only a file that differs (a copy, or a
damaged one); what proves sound is noted there, so that no other process hashes it again.
"""

from __future__ import annotations

import json
import shutil
import sys
import time
from collections.abc import Callable, Iterable, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypedDict, overload

from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file

from attention.calibration.moments import STATISTICS, LayerStatistics
from attention.calibration.sizes import Mixed
from attention.heads import LayerHeads
from attention.io.files import sha256, write_whole, written_whole
from attention.io.replacing import unused

META = "calibration.json"
_FORMAT = 2
_AGAIN = "delete the folder and calibrate again"
ABANDONED = 24 * 3600
"""Seconds without a new layer after which an unfinished calibration is taken for that of a killed
process."""


class LayerEntry(TypedDict):
    """The entry of a layer's file in `calibration.json`; its stamp: size, time in nanoseconds."""

    file: str
    tokens: int
    sha256: str
    stamp: list[int]


class CalibrationError(ValueError):
    """Calibration files that are missing, damaged or of another format."""


@dataclass(frozen=True)
class Calibration:
    """Statistics of all layers.

    Attributes:
        layers: One entry per layer.
        tokens: Number of tokens.
        digest: Of the weights, tokens and settings that the statistics come from.
        weights: Digest of the weights alone.
        mixed: How the mixed moments are stored.
    """

    layers: Sequence[LayerStatistics]
    tokens: int
    digest: str
    weights: str
    mixed: Mixed = "float32"

    def save(self, directory: str | Path) -> Calibration:
        """Write this calibration (`write_calibration`) and return the stored one."""
        return write_calibration(
            directory, self.layers, self.tokens, self.digest, self.weights, self.mixed
        )

    @classmethod
    def load(cls, directory: str | Path) -> Calibration:
        """Open the calibration in a folder; a layer is read when it is used.

        Raises:
            CalibrationError: If files are missing, damaged or of another format.
        """
        source = Path(directory)
        try:
            noted = (source / META).stat().st_mtime_ns
            meta: dict[str, Any] = json.loads((source / META).read_text())
            if meta.get("format") != _FORMAT:
                raise CalibrationError(
                    f"{source}: expected format {_FORMAT}, got {meta.get('format')!r}; calibrate "
                    f"again"
                )
            entries = [dict(entry) for entry in meta["layers"]]
            fresh = [_verified(source / entry["file"], entry, noted) for entry in entries]
            layers = StoredLayers(
                source, tuple((entry["file"], int(entry["tokens"])) for entry in entries)
            )
            calibration = cls(
                layers, meta["tokens"], meta["digest"], meta["weights"], meta["mixed"]
            )
        except (OSError, KeyError, TypeError, json.JSONDecodeError) as error:
            raise CalibrationError(
                f"{source} holds no readable calibration ({error}); calibrate again"
            ) from None
        if any(fresh):
            with suppress(OSError):  # somebody else's folder, to be read only
                write_whole(source / META, json.dumps(meta | {"layers": entries}, indent=1))
        return calibration


def layer_statistics(
    calibration: Calibration | None, layer: int, heads: LayerHeads
) -> LayerStatistics | None:
    """Return a layer's statistics on the device of its heads; None without a calibration.

    All callers that pass statistics to a part of an axis read them here.
    """
    return None if calibration is None else calibration.layers[layer].on(heads.q.device)


@dataclass(frozen=True)
class StoredLayers(Sequence[LayerStatistics]):
    """The layers of a folder, each mapped into memory when it is used.

    Attributes:
        folder: Where the files are.
        files: Name and tokens of each.
    """

    folder: Path
    files: tuple[tuple[str, int], ...]

    def __len__(self) -> int:
        return len(self.files)

    @overload
    def __getitem__(self, index: int) -> LayerStatistics: ...
    @overload
    def __getitem__(self, index: slice) -> StoredLayers: ...
    def __getitem__(self, index: int | slice) -> LayerStatistics | StoredLayers:
        """Raise CalibrationError if the file is not there any more, or is no safetensors file."""
        if isinstance(index, slice):
            return StoredLayers(self.folder, self.files[index])
        name, tokens = self.files[index]
        try:
            with safe_open(self.folder / name, framework="pt") as file:
                return LayerStatistics(
                    tokens, **{name: file.get_tensor(name) for name in STATISTICS}
                )
        except (OSError, SafetensorError) as error:
            raise CalibrationError(
                f"{self.folder / name} cannot be read ({error}); {_AGAIN}"
            ) from None


def folder_of(cache_dir: str | Path, digest: str) -> Path:
    """Return the path of the calibration of a digest."""
    return Path(cache_dir) / f"calibration-{digest}"


def stored_calibration(folder: Path, digest: str) -> Calibration | None:
    """Return the calibration of that digest in a folder.

    Returns:
        None if there is none, or if it cannot be used: a line on stderr then says why.
    """
    if not folder.exists():
        return None
    try:
        calibration = Calibration.load(folder)
    except CalibrationError as error:
        print(f"{error}: calibrating again", file=sys.stderr)
        return None
    if calibration.digest == digest:
        return calibration
    print(
        f"{folder} holds calibration {calibration.digest}, expected {digest}; calibrating again",
        file=sys.stderr,
    )
    return None


def write_calibration(
    directory: str | Path,
    layers: Iterable[LayerStatistics],
    tokens: int,
    digest: str,
    weights: str,
    mixed: Mixed = "float32",
) -> Calibration:
    """Write a calibration, one layer at a time as `layers` yields them, and open it.

    Args:
        directory: The folder.
        layers: Statistics of each layer.
        tokens: Number of tokens.
        digest: Of all that the calibration depends on.
        weights: Digest of the weights alone.
        mixed: How the mixed moments are stored.

    Raises:
        OSError: If it cannot be written.
    """

    def write(folder: Path) -> Iterable[LayerEntry]:
        return (write_layer(folder, number, layer) for number, layer in enumerate(layers))

    return assemble_calibration(directory, write, tokens, digest, weights, mixed)


def assemble_calibration(
    directory: str | Path,
    write: Callable[[Path], Iterable[LayerEntry]],
    tokens: int,
    digest: str,
    weights: str,
    mixed: Mixed = "float32",
) -> Calibration:
    """Make a calibration of layers that are written in any process, and open it.

    The folder is put in place in one step when all is written, so that a kill, a full disk or
    another process that writes the same leave no half of it.

    Args:
        directory: The folder.
        write: Takes the folder that the layers are written into (`write_layer`), and yields their
            entries in order.
        tokens: Number of tokens.
        digest: Of all that the calibration depends on.
        weights: Digest of the weights alone.
        mixed: How the mixed moments are stored.

    Raises:
        OSError: If it cannot be written.
    """
    target = Path(directory)
    target.parent.mkdir(parents=True, exist_ok=True)
    _sweep(target)
    fresh = unused(target)
    fresh.mkdir()
    try:
        entries = list(write(fresh))
        meta = {
            "format": _FORMAT,
            "digest": digest,
            "weights": weights,
            "mixed": mixed,
            "tokens": tokens,
        }
        write_whole(fresh / META, json.dumps(meta | {"layers": entries}, indent=1))
        _replace(fresh, target)
    finally:
        shutil.rmtree(fresh, ignore_errors=True)
    return Calibration.load(target)


def write_layer(folder: Path, number: int, layer: LayerStatistics) -> LayerEntry:
    """Write the statistics of layer `number`; return the entry of their file."""
    path = folder / f"layer-{number:04}.safetensors"
    with written_whole(path) as fresh:
        save_file({name: getattr(layer, name).contiguous() for name in STATISTICS}, fresh)
        checksum = sha256(fresh)
    return {"file": path.name, "tokens": layer.tokens, "sha256": checksum, "stamp": _stamp(path)}


def _stamp(path: Path) -> list[int]:
    """Size and time of modification in nanoseconds."""
    status = path.stat()
    return [status.st_size, status.st_mtime_ns]


def _verified(path: Path, entry: dict[str, Any], noted: int) -> bool:
    """Check a file against its entry.

    True if it had to be hashed, and the entry now has its new stamp.

    A file of the same tick of the clock may have been changed after it.

    Args:
        noted: When the entry was written.
    """
    stamp = _stamp(path)
    if stamp == entry["stamp"] and stamp[1] < noted:
        return False
    if (checksum := sha256(path)) != entry["sha256"]:
        raise CalibrationError(
            f"{path}: expected SHA-256 {entry['sha256'][:16]}..., got {checksum[:16]}...; the file "
            f"is damaged: {_AGAIN}"
        )
    entry["stamp"] = stamp
    return True


def _sweep(target: Path) -> None:
    """Remove what killed writers have left.

    Files of a living writer, here or on another node, are never so old.
    """
    for left in target.parent.glob(f".{target.name}.*.new"):
        with suppress(FileNotFoundError):  # finished just now
            newest = max(path.stat().st_mtime for path in (left, *left.iterdir()))
            if time.time() - newest > ABANDONED:
                shutil.rmtree(left, ignore_errors=True)


def _replace(fresh: Path, target: Path) -> None:
    """Rename a finished folder.

    An existing folder (damaged, or of a former format) is renamed first.
    """
    with suppress(FileNotFoundError):
        target.rename(aside := unused(target))
        shutil.rmtree(aside, ignore_errors=True)
    try:
        fresh.rename(target)
    except OSError:
        if not (
            target / META
        ).is_file():  # otherwise another process has written the same calibration
            raise
