"""The training checkpoints of one run, with the digests of their files and the reports that came with them.

    <storage_path>/<run_name>/checkpoints.json     reports so far; checkpoints that are kept, oldest first
    <storage_path>/<run_name>/checkpoint_000024/   what all workers wrote at step 24

`checkpoints.json` names a checkpoint only once all of it is there, and is replaced as a whole, so that a kill at any
moment leaves the checkpoints before. One whose files have changed since is passed over for the one before it.
`storage_path` is a folder that every node sees, or a URI that pyarrow knows (s3://, gs://).

Legend: W workers; all of them make every call together, each with its own rank.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import os
import shutil
import tempfile
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch.distributed as dist
from pyarrow import fs

INDEX = "checkpoints.json"
KEEP = 2  # the newest, and the one before it in case the newest is damaged
BLOCK = 1 << 20


@dataclass(frozen=True)
class Kept:
    """A checkpoint in the index. `digests`: SHA-256 of each file, by its path below the checkpoint."""

    name: str
    step: int
    digests: dict[str, str]


class CheckpointStore:
    """Checkpoints of the run `run_name` under `storage_path`, as worker `rank` of `world_size` sees them."""

    def __init__(self, storage_path: str, run_name: str, rank: int = 0, world_size: int = 1) -> None:
        self.rank, self.world_size = rank, world_size
        self.local = "://" not in storage_path
        self.address = f"{storage_path.rstrip('/')}/{run_name}"
        self._fs, self._root = (fs.LocalFileSystem(), self.address) if self.local else fs.FileSystem.from_uri(
            self.address
        )  # fmt: skip

    def read(self) -> tuple[list[Kept], list[dict[str, Any]]]:
        """Checkpoints and reports of the index, oldest first; both empty before the first. Any process may ask."""
        try:
            with self._fs.open_input_stream(f"{self._root}/{INDEX}") as stream:
                record = json.loads(stream.read())
        except FileNotFoundError:
            return [], []
        return [Kept(**kept) for kept in record["checkpoints"]], record["reports"]

    def save(self, step: int, write: Callable[[Path], None], report: dict[str, Any]) -> str:
        """Keep what `write(folder)` of every worker writes as the checkpoint of `step`; returns its address.

        `report` of rank 0 is kept with it, `checkpoint_path` added.
        """
        name = f"checkpoint_{step:06d}"
        report["checkpoint_path"] = f"{self.address}/{name}"
        with self._scratch(f".{name}-{self.rank}") as scratch:
            write(scratch)
            digests = {
                path.relative_to(scratch).as_posix(): sha256(path) for path in scratch.rglob("*") if path.is_file()
            }
            for file in digests:
                self._move(scratch / file, f"{name}/{file}")
        whole = {file: digest for part in self._gathered(digests) for file, digest in part.items()}
        if self.rank == 0:
            kept, reports = self.read()
            kept = [*(k for k in kept if k.step < step), Kept(name, step, whole)][-KEEP:]
            self._write_index(kept, [*(r for r in reports if r["step"] < step), report])
            self._remove_all_but({k.name for k in kept})
        self._gathered(None)  # nobody goes on before the index says so
        return report["checkpoint_path"]

    def newest_whole(self) -> tuple[Kept | None, list[dict[str, Any]], list[str]]:
        """The newest checkpoint that is as it was written, the reports up to it, and what is wrong with newer ones."""
        kept, reports = self._gathered(self.read() if self.rank == 0 else None)[0]
        damage: list[str] = []
        for candidate in reversed(kept):
            mine = sorted(candidate.digests)[self.rank :: self.world_size]
            wrong = [found for found in self._gathered(self._damage(candidate, mine)) if found]
            if not wrong:
                return candidate, [r for r in reports if r["step"] <= candidate.step], damage
            damage.append(f"checkpoint of step {candidate.step} passed over: {wrong[0]}")
        return None, [], damage

    @contextlib.contextmanager
    def opened(self, kept: Kept) -> Iterator[Path]:
        with as_directory(f"{self.address}/{kept.name}") as folder:
            yield folder

    # ---- files ------------------------------------------------------------------------------------------------

    @contextlib.contextmanager
    def _scratch(self, name: str) -> Iterator[Path]:
        """An empty folder, on the storage's own disk where it has one, so that files are moved by renaming."""
        if not self.local:
            with tempfile.TemporaryDirectory() as folder:
                yield Path(folder)
            return
        folder = Path(self._root) / name
        shutil.rmtree(folder, ignore_errors=True)
        folder.mkdir(parents=True)
        try:
            yield folder
        finally:
            shutil.rmtree(folder, ignore_errors=True)

    def _move(self, source: Path, target: str) -> None:
        place = f"{self._root}/{target}"
        self._fs.create_dir(place.rpartition("/")[0], recursive=True)
        if self.local:
            source.replace(place)
        else:
            fs.copy_files(str(source), place, source_filesystem=fs.LocalFileSystem(), destination_filesystem=self._fs)

    def _damage(self, kept: Kept, files: list[str]) -> str | None:
        """What is wrong with some files of a checkpoint."""
        for file in files:
            try:
                with self._fs.open_input_stream(f"{self._root}/{kept.name}/{file}") as stream:
                    found = _digest(stream.read)
            except OSError as error:
                return f"{file} cannot be read ({error.strerror or type(error).__name__})"
            if found != kept.digests[file]:
                return f"{file} is not what was written (SHA-256 {found[:12]}..., not {kept.digests[file][:12]}...)"
        return None

    def _write_index(self, kept: list[Kept], reports: list[dict[str, Any]]) -> None:
        text = json.dumps({"checkpoints": [asdict(k) for k in kept], "reports": reports}, indent=1).encode()
        if not self.local:
            with self._fs.open_output_stream(f"{self._root}/{INDEX}") as stream:
                stream.write(text)
            return
        fresh = Path(self._root) / f".{INDEX}.new"
        with fresh.open("wb") as stream:
            stream.write(text)
            stream.flush()
            os.fsync(stream.fileno())
        fresh.replace(Path(self._root) / INDEX)

    def _remove_all_but(self, names: set[str]) -> None:
        for found in self._fs.get_file_info(fs.FileSelector(self._root)):
            ours = found.base_name.lstrip(".").startswith("checkpoint_")
            if ours and found.type == fs.FileType.Directory and found.base_name not in names:
                self._fs.delete_dir(found.path)

    def _gathered(self, value: Any) -> list[Any]:
        """The values of all workers, by rank."""
        if self.world_size == 1:
            return [value]
        values: list[Any] = [None] * self.world_size
        dist.all_gather_object(values, value)
        return values


@contextlib.contextmanager
def as_directory(address: str) -> Iterator[Path]:
    """A folder, or what lies at a URI, copied to this machine for as long as the body runs."""
    if "://" not in address:
        yield Path(address)
        return
    with tempfile.TemporaryDirectory() as folder:
        fs.copy_files(address, folder)
        yield Path(folder)


def sha256(file: Path) -> str:
    with file.open("rb") as stream:
        return _digest(stream.read)


def _digest(read: Callable[[int], bytes]) -> str:
    digest = hashlib.sha256()
    while block := read(BLOCK):
        digest.update(block)
    return digest.hexdigest()
