"""Where text comes from, as documents: this interpreter's standard library, local files, a hub data set, or tasks.

A *source* is one of
- `stdlib`: the Python standard library's source, one document a file, without its tests;
- a local file, folder or glob of .txt, .jsonl, .json or .parquet;
- a hub data set, `name`, `name@subset`;
- `synthetic:NAME`: the tasks of Xiao 2024, see `trainers.text.synthetic_corpus`;
and files and data sets may end in `:split`. Text that belongs to no split, or to `train`, is divided by the md5 rule
below; text of any other split (`validation`, `test`) is held out as a whole.
"""

from __future__ import annotations

import glob
import hashlib
import os
import platform
import re
import sysconfig
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

from attention.messages import reason
from trainers.text import synthetic_corpus

Side = Literal["train", "held_out"]

HOLD_OUT = 20  # one document of so many is held out
SHUFFLE_BUFFER = 10_000  # documents in memory while shuffling; a corpus of fewer is shuffled completely
FEW_FILES = 20  # fewer text files than this are cut at blank lines: whole files could not be divided
BUILDERS = {".txt": "text", ".jsonl": "json", ".json": "json", ".parquet": "parquet"}
PLAIN = (".txt", ".jsonl", ".json")  # whose size in bytes bounds the text
LIBRARY = Path(sysconfig.get_paths()["stdlib"])
NOT_LIBRARY = {"test", "tests", "idle_test", "site-packages", "dist-packages", "__pycache__"}


class DataError(ValueError):
    """Text that cannot be used. The message says what was expected, what was found, and what to do."""


def held_out(identity: str) -> bool:
    """True for about one document in HOLD_OUT, by the md5 digest of what identifies it: the same in every process."""
    return int(hashlib.md5(identity.encode()).hexdigest(), 16) % HOLD_OUT == 0


@dataclass(frozen=True)
class Corpus:
    """One source, resolved: `kind` is stdlib, files, hub or synthetic; `fingerprint` changes when the text may have."""

    source: str
    kind: Literal["stdlib", "files", "hub", "synthetic"]
    name: str
    fingerprint: str
    split: str | None = None
    subset: str | None = None
    files: tuple[Path, ...] = field(default=(), repr=False)

    @property
    def wholly_held_out(self) -> bool:
        return self.split not in (None, "train")

    @property
    def most_tokens(self) -> int | None:
        """More tokens cannot be in the text, end tokens included; None where only reading it tells."""
        if self.kind != "stdlib" and not (self.files and self.files[0].suffix in PLAIN):
            return None
        # A token stands for a byte or more, and so does a document, which has one end token
        return 2 * sum(file.stat().st_size for file in self.files)

    def documents(self, side: Side, text_field: str, seed: int | None) -> Iterator[str]:
        """Texts of one side, in the order of the source, or shuffled when a seed is given.

        Raises DataError when the source is missing, has no `text_field`, or is held out and asked to train.
        """
        if side == "train" and self.wholly_held_out:
            raise DataError(
                f"{self.source}: split {self.split!r} is held out and cannot be trained on or calibrated with; "
                f"name {self.name} without it, or its train split"
            )
        if self.kind == "stdlib":
            return self._library(side, seed)
        if self.kind == "synthetic":
            return synthetic_corpus.documents(self.name, side == "train", seed)
        return self._datasets(side, text_field, seed)

    def _library(self, side: Side, seed: int | None) -> Iterator[str]:
        import torch

        files = [f for f in self.files if held_out(f.relative_to(LIBRARY).as_posix()) == (side == "held_out")]
        if seed is not None:
            order = torch.randperm(len(files), generator=torch.Generator().manual_seed(seed)).tolist()
            files = [files[i] for i in order]
        for file in files:
            yield file.read_text(encoding="utf-8", errors="replace")

    def _datasets(self, side: Side, text_field: str, seed: int | None) -> Iterator[str]:
        stream = _open(self)
        if seed is not None:
            stream = stream.shuffle(seed=seed, buffer_size=SHUFFLE_BUFFER)
        wanted = side == "held_out"
        for text in _texts(stream, text_field, self):
            if self.wholly_held_out or held_out(text) == wanted:
                yield text


def resolve(source: str) -> Corpus:
    """The corpus that a source names. Raises DataError when local files are named but missing or of no known type, and
    TypeError for texts themselves."""
    if not isinstance(source, str):
        raise TypeError(
            "data: expected the name of a source of text (str: a local file or folder, a hub data set, or "
            f"'stdlib'), got {type(source).__name__}; write texts to a .jsonl file, one {{\"text\": ...}} object per "
            "line, and pass its path"
        )
    if not source.strip():
        raise DataError("a source of text has no name; give 'stdlib', local text or a hub data set")
    if source == "stdlib":
        files = tuple(library_files())
        return Corpus(source, "stdlib", source, _digest(platform.python_version(), *map(_stamp, files)), files=files)
    if source.startswith(synthetic_corpus.PREFIX):
        name = source.removeprefix(synthetic_corpus.PREFIX)
        try:
            synthetic_corpus.tasks_of(name, True)
        except ValueError as error:
            raise DataError(str(error)) from None
        return Corpus(source, "synthetic", name, _digest(name, synthetic_corpus.fingerprint()))
    name, split = _split_off(source)
    try:
        files = _local_files(name)
    except OSError as error:
        raise DataError(
            f"{source}: cannot be read ({error.strerror}: {error.filename}); name a folder of text"
        ) from None
    if files:
        return Corpus(source, "files", name, _digest(*map(_stamp, files)), split, files=files)
    if Path(name).suffix in BUILDERS or name.startswith((".", "/", "~")) or glob.has_magic(name) or Path(name).exists():
        raise DataError(f"{source}: expected a file, folder or glob of {', '.join(BUILDERS)}; found none there")
    if not re.fullmatch(r"[\w.-]+(/[\w.-]+)?(@[\w.-]+)?", name):
        raise DataError(f"{source!r} is neither 'stdlib', nor local text, nor a hub name like owner/name@subset:split")
    hub_name, _, subset = name.partition("@")
    return Corpus(source, "hub", hub_name, _digest(name, split or "train"), split, subset or None)


def library_files() -> Iterable[Path]:
    """Every .py file of this interpreter's standard library but tests and installed packages, by relative path."""
    files: list[Path] = []
    for folder, below, names in os.walk(LIBRARY):
        below[:] = [name for name in below if name not in NOT_LIBRARY]  # installed packages are most of the tree
        files += [Path(folder, name) for name in names if name.endswith(".py")]
    return sorted(files, key=lambda f: f.relative_to(LIBRARY).as_posix())


def _split_off(source: str) -> tuple[str, str | None]:
    name, colon, split = source.rpartition(":")
    if colon and re.fullmatch(r"\w+", split) and len(name) > 1:  # len: C:\folder keeps its drive
        return name, split
    return source, None


def _local_files(name: str) -> tuple[Path, ...]:
    path = Path(name).expanduser()
    if path.is_file():
        candidates = [path]
    elif path.is_dir():
        candidates = [f for f in path.rglob("*") if f.is_file()]
    else:
        names = glob.glob(str(path), recursive=True)  # noqa: PTH207 - the pattern may be absolute
        candidates = [f for f in map(Path, names) if f.is_file()]
    files = tuple(sorted(f.resolve() for f in candidates if f.suffix in BUILDERS))
    kinds = sorted({BUILDERS[f.suffix] for f in files})
    if len(kinds) > 1:
        raise DataError(f"{name}: expected files of one type, found {kinds}; name one by a glob like '{name}/*.jsonl'")
    return files


def _open(corpus: Corpus) -> Any:
    """The source as a streaming data set, so that its size does not matter."""
    from datasets import disable_progress_bars, load_dataset, logging

    disable_progress_bars()
    logging.set_verbosity(logging.CRITICAL)  # what goes wrong is raised as well, and told once
    try:
        if corpus.kind == "hub":
            return load_dataset(corpus.name, corpus.subset, split=corpus.split or "train", streaming=True)
        builder = BUILDERS[corpus.files[0].suffix]
        options = {}
        if builder == "text":
            options["sample_by"] = "paragraph" if len(corpus.files) < FEW_FILES else "document"
        names = [str(f) for f in corpus.files]
        return load_dataset(builder, data_files={"train": names}, split="train", streaming=True, **options)
    except Exception as error:  # the library raises a dozen types, of its own and of its HTTP client
        if corpus.files and not any(file.stat().st_size for file in corpus.files):
            raise DataError(f"{corpus.source}: expected text, and what it names is empty") from None
        raise DataError(
            f"{corpus.source}: cannot be opened as a data set: {type(error).__name__}: {reason(error)}; "
            "expected 'stdlib', local .txt, .jsonl, .json or .parquet, or a hub name that this machine can reach"
        ) from error


def _texts(stream: Any, text_field: str, corpus: Corpus) -> Iterator[str]:
    try:
        for row in stream:
            if text_field not in row:
                raise DataError(
                    f"{corpus.source}: expected a field {text_field!r}, got {sorted(row)}; "
                    "rename the field, or set data.text_field in a search"
                )
            text = row[text_field]
            if not isinstance(text, str):
                raise DataError(f"{corpus.source}: field {text_field!r} must be text, got {type(text).__name__}")
            if text.strip():
                yield text
    except DataError:
        raise
    except Exception as error:
        raise DataError(f"{corpus.source}: reading failed: {type(error).__name__}: {reason(error)}") from error


def _stamp(file: Path) -> str:
    stat = file.stat()
    return f"{file}|{stat.st_size}|{stat.st_mtime_ns}"


def _digest(*parts: str) -> str:
    return hashlib.sha256("\n".join(parts).encode()).hexdigest()
