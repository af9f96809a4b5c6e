"""Token sets: sequences of tokens on disk, in shards that are mapped into memory, with an index.

A set is a folder:

    00000.safetensors ...   `sequences` `[S, T]`, uint16 where every token id fits, else uint32
                            (the last may be shorter)
    index.json              the definition of the set, and size and digest of each shard
                            (written last, in one step)
    unfinished.json         until then the same of the finished shards, so that a killed run resumes

Legend: N sequences, T tokens per sequence, S sequences per shard.
"""

from __future__ import annotations

import hashlib
import itertools
import json
from collections import defaultdict
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch
from safetensors import SafetensorError, safe_open
from safetensors.numpy import save_file
from torch import Tensor

from attention.io.files import sha256, write_whole, written_whole
from trainers.text.corpora import DataError

TOKEN_SET_FORMAT = 1
# Tokens of a shard: what a killed run makes again at most, and what its writer holds in memory.
SHARD_TOKENS = 2**21
_INDEX = "index.json"
_UNFINISHED = "unfinished.json"
TENSOR = "sequences"


class TextPosition(NamedTuple):
    """A place in a text: after so many whole documents, and so many `tokens` of the next one."""

    documents: int = 0
    tokens: int = 0


@dataclass(frozen=True)
class Shard:
    """A finished shard.

    `size` of its file in bytes, its SHA-256, and where in the text the next shard begins.
    """

    size: int
    sha256: str
    end: TextPosition

    @classmethod
    def from_dict(cls, record: dict[str, Any]) -> Shard:
        """Read a shard from its record."""
        return cls(int(record["size"]), str(record["sha256"]), TextPosition(*record["end"]))


@dataclass(frozen=True)
class Layout:
    """The shape of a set: N `sequences` of T tokens, S of them per shard.

    `dtype` of the ids; `made_of`: plain values.
    """

    sequences: int
    sequence_length: int
    sequences_per_shard: int
    dtype: str
    made_of: dict[str, Any]

    @classmethod
    def of(
        cls,
        sequences: int,
        length: int,
        largest_id: int,
        shard_tokens: int,
        made_of: dict[str, Any],
    ) -> Layout:
        dtype = "uint16" if largest_id < 2**16 else "uint32"
        return cls(sequences, length, max(1, shard_tokens // length), dtype, made_of)

    @property
    def shards(self) -> int:
        return -(-self.sequences // self.sequences_per_shard)

    def rows(self, number: int) -> int:
        """Sequences of one shard."""
        return min(self.sequences_per_shard, self.sequences - number * self.sequences_per_shard)


class TokenSequences:
    """The sequences of a finished set, `[N, T]`.

    Rows are read from disk when they are used, and not cached, so that memory does not grow with
    the number of tokens. `digest`: of all tokens and their shape.
    """

    def __init__(self, folder: str | Path) -> None:
        """Raise DataError if there is no finished set in `folder`."""
        self.folder = Path(folder)
        index = _read(self.folder / _INDEX)
        if index is None:
            raise DataError(
                f"expected a set of token sequences, found none at {self.folder}; build it with "
                f"token_set()"
            )
        self._per_shard = int(index["layout"]["sequences_per_shard"])
        self.shape = (int(index["layout"]["sequences"]), int(index["layout"]["sequence_length"]))
        self.digest = str(index["digest"])

    def __len__(self) -> int:
        return self.shape[0]

    def __getitem__(self, rows: slice | Sequence[int]) -> Tensor:
        """Return some sequences, `[rows, T]` int64.

        Raises:
            DataError: If a shard is missing or damaged.
        """
        numbers = range(len(self))[rows] if isinstance(rows, slice) else rows
        result = np.empty((len(numbers), self.shape[1]), dtype=np.int64)
        rows_by_shard: dict[int, list[tuple[int, int]]] = defaultdict(list)
        for position, row in enumerate(numbers):
            if not 0 <= row < len(self):
                raise IndexError(f"row {row} of {len(self)} sequences")
            rows_by_shard[row // self._per_shard].append((position, row % self._per_shard))
        for number, positions in rows_by_shard.items():
            file = shard_file(self.folder, number)
            try:
                # Opened anew each time: a mapping that stays would count every page ever read as
                # this process's memory
                with safe_open(file, "numpy") as shard:
                    sequences = shard.get_slice(TENSOR)
                    for position, row in positions:
                        result[position] = sequences[row : row + 1][0]
            except (OSError, SafetensorError) as error:
                raise DataError(
                    f"{file} cannot be read: {error}; start again, and it is made again"
                ) from None
        return torch.from_numpy(result)


class TokenSetWriter:
    """Writes the shards of a set but those that an earlier run has left whole."""

    def __init__(self, folder: str | Path, layout: Layout) -> None:
        self._folder = Path(folder)
        self.layout = layout
        state = _read(self._folder / _UNFINISHED) or _read(self._folder / _INDEX) or {}
        self._shards: dict[int, Shard] = {}
        if state.get("layout") == json.loads(json.dumps(asdict(layout))):
            self._shards = {
                int(number): Shard.from_dict(shard) for number, shard in state["shards"].items()
            }
        self._whole = {
            number for number, shard in self._shards.items() if self._intact(number, shard)
        }

    def missing(self) -> list[list[int]]:
        """Shards that are still to be written, in runs of neighbours."""
        numbers = [number for number in range(self.layout.shards) if number not in self._whole]
        runs = itertools.groupby(enumerate(numbers), key=lambda pair: pair[1] - pair[0])
        return [[number for _, number in run] for _, run in runs]

    def start(self, number: int) -> TextPosition:
        """Return the offset in the text where a shard begins, after the previous one is written."""
        return self._shards[number - 1].end if number else TextPosition()

    def write(self, number: int, sequences: np.ndarray, end: TextPosition) -> None:
        """Write a shard.

        Args:
            number: Of the shard.
            sequences: Token ids `[rows, T]`.
            end: Where in the text the next shard begins.

        Raises:
            ValueError: For a token id that the set's type cannot hold.
        """
        if sequences.max() > np.iinfo(self.layout.dtype).max:
            raise ValueError(f"token ids must fit {self.layout.dtype}, got {sequences.max()}")
        with written_whole(shard_file(self._folder, number)) as fresh:
            save_file({TENSOR: np.ascontiguousarray(sequences, dtype=self.layout.dtype)}, fresh)
            self._shards[number] = Shard(fresh.stat().st_size, sha256(fresh), end)
        self._whole.add(number)
        self._write(_UNFINISHED)

    def finish(self) -> None:
        """Write the index: from now on the set is there."""
        self._write(_INDEX)
        (self._folder / _UNFINISHED).unlink(missing_ok=True)

    def _intact(self, number: int, shard: Shard) -> bool:
        file = shard_file(self._folder, number)
        return file.is_file() and file.stat().st_size == shard.size and sha256(file) == shard.sha256

    def _write(self, name: str) -> None:
        record: dict[str, Any] = {"format": TOKEN_SET_FORMAT, "layout": asdict(self.layout)}
        record["shards"] = {number: asdict(shard) for number, shard in sorted(self._shards.items())}
        if name == _INDEX:
            cut = [self.layout.sequences, self.layout.sequence_length]
            content = json.dumps(
                [cut, [self._shards[number].sha256 for number in range(self.layout.shards)]]
            )
            record["digest"] = hashlib.sha256(content.encode()).hexdigest()
        write_whole(self._folder / name, json.dumps(record, indent=1) + "\n")


def read_sequences(folder: str | Path) -> TokenSequences:
    """Return the sequences of a set by `write_sequences` or `trainers.text.data.token_set`.

    Raises:
        DataError: If there is none.
    """
    return TokenSequences(folder)


def same_text(first: str | Path, second: str | Path) -> bool:
    """Return whether two token sets have the same tokens; of one that is gone, whether it is it."""
    if str(first) == str(second):
        return True
    if not is_complete(first) or not is_complete(second):
        return False
    return read_sequences(first).digest == read_sequences(second).digest


def write_sequences(
    sequences: Tensor,
    folder: str | Path,
    *,
    largest_id: int | None = None,
    shard_tokens: int = SHARD_TOKENS,
    made_of: dict[str, Any] | None = None,
) -> None:
    """Write `[N, T]` token ids that are in memory.

    Args:
        largest_id: Of the vocabulary (None: of the sequences).
    """
    count, length = sequences.shape
    largest = int(sequences.max()) if largest_id is None else largest_id
    layout = Layout.of(count, length, largest, shard_tokens, made_of or {})
    writer = TokenSetWriter(folder, layout)
    for number in range(layout.shards):
        first = number * layout.sequences_per_shard
        writer.write(number, sequences[first : first + layout.rows(number)].numpy(), TextPosition())
    writer.finish()


def is_complete(folder: str | Path) -> bool:
    """Whether a set exists, with every shard of the size that it was written with."""
    folder = Path(folder)
    index = _read(folder / _INDEX)
    if index is None or (folder / _UNFINISHED).exists():
        return False
    files = {
        shard_file(folder, int(number)): shard["size"] for number, shard in index["shards"].items()
    }
    return all(file.is_file() and file.stat().st_size == size for file, size in files.items())


def shard_file(folder: Path, number: int) -> Path:
    """Return the path of a shard."""
    return folder / f"{number:05d}.safetensors"


def _read(file: Path) -> dict[str, Any] | None:
    """Return an index of this format.

    None if it is not there, was cut by a full disk, or is of another format.
    """
    try:
        record = json.loads(file.read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return None
    return record if isinstance(record, dict) and record.get("format") == TOKEN_SET_FORMAT else None
