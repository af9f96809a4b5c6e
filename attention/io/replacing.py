"""Folders that are written, and what may be replaced by them.

Only what Headfold has written itself.

Every folder that `checkpoint.write_atomically` writes has `digests.json`, the SHA-256 of every
other file. A folder with any file that the list does not name is never replaced, and no such file
is ever removed.
"""

from __future__ import annotations

import contextlib
import json
import os
import re
import stat
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path

from attention.io.files import names_beside, sha256
from attention.io.sources import check_source, source_name

DIGESTS = "digests.json"
_LONGEST = 64  # characters of a file's name in a checkpoint


class OutputError(ValueError):
    """A place that nothing may be written to.

    The message names it, what is there, and what to do.
    """


def check_folder(
    folder: str | Path,
    *,
    overwrite: bool = False,
    reads: Iterable[str | Path] = (),
    key: str = "out",
) -> Path:
    """Return the absolute path of a folder that is about to be written.

    To be called before any work.

    It must be free or empty; with `overwrite` it may be one that we wrote, unchanged since. Never:
    a file, a link, a mount, the current or the home folder or their parents, one of `reads` (the
    model, where it is a local folder) or its parents, or a folder within a checkpoint. Whether it
    can be written is tested, without a trace.

    Raises:
        OutputError: Whose message starts with `key`.
        TypeError: For a source that is no path.
    """
    sources = list(reads)
    for source in sources:
        check_source(source, "model")
    sources = [*sources, *map(source_name, sources)]  # of a plain copy
    try:
        path = resolved(folder)
        _check_place(path, sources, key)
        if os.path.lexists(path):
            _check_kind(path, key)
        recover(path)
        _check_content(path, overwrite, key)
        _try(path)
    except OutputError:
        raise
    except (OSError, ValueError, RuntimeError) as error:
        raise cannot_write(folder, error, key) from None
    return path


def cannot_write(path: str | Path, error: Exception, key: str) -> OutputError:
    """Return the message for an error of the system.

    No permission, no room, a parent that is a file, a loop.
    """
    why = error.strerror if isinstance(error, OSError) else error
    return OutputError(f"{key}: cannot write to {str(path)!r} ({why}); give another place")


def resolved(path: str | Path) -> Path:
    """Return the absolute path, with links in its parents resolved.

    A link at its end is left as it is.
    """
    path = Path(path)
    return path.resolve() if path.name in ("", "..") else path.parent.resolve() / path.name


def _check_place(path: Path, reads: Iterable[str | Path], key: str) -> None:
    for source in reads:
        if Path(source).exists():
            if _holds(path, source):
                raise OutputError(
                    f"{key}: {str(path)!r} is, or contains, what is read: {str(source)!r}"
                )
            if _holds(source, path):
                raise OutputError(f"{key}: {str(path)!r} is within what is read: {str(source)!r}")
    if (around := checkpoint_around(path)) is not None:
        raise OutputError(
            f"{key}: {str(path)!r} is within a checkpoint, {str(around)!r}; give a place outside"
        )
    for name, where in (("the current folder", Path.cwd), ("your home folder", Path.home)):
        try:
            library = where()
        except (OSError, RuntimeError):
            continue  # there is none
        if _holds(path, library):
            raise OutputError(
                f"{key}: {str(path)!r} is, or contains, {name}; name a new folder within it"
            )


def checkpoint_around(path: Path) -> Path | None:
    """Return the checkpoint that a path is inside of.

    The nearest folder above it with a config and safetensors.
    """
    with contextlib.suppress(OSError):
        for folder in path.parents:
            if (folder / "config.json").is_file() and any(folder.glob("*.safetensors")):
                return folder
    return None


def _holds(folder: str | Path, inside: str | Path) -> bool:
    """Whether `inside` is `folder` or within it, by whichever path either is reached."""
    if not Path(folder).exists():
        return False
    path = Path(inside).resolve()
    return any(p.exists() and p.samefile(folder) for p in (path, *path.parents))


def _check_kind(path: Path, key: str) -> None:
    mode = path.lstat().st_mode
    if stat.S_ISLNK(mode):
        raise OutputError(
            f"{key}: {str(path)!r} is a link to {str(path.readlink())!r}; name a folder itself"
        )
    if not stat.S_ISDIR(mode):
        raise OutputError(f"{key}: {str(path)!r} is a file; name a folder")
    if path.is_mount():
        raise OutputError(f"{key}: {str(path)!r} is a mount point; name a new folder within it")


def _check_content(path: Path, overwrite: bool, key: str) -> None:
    if not path.is_dir() or not any(path.iterdir()):
        return
    if (other := foreign(path)) is not None:
        raise OutputError(
            f"{key}: {str(path)!r} is not empty, and Headfold did not write its {other!r}; nothing "
            f"in it is replaced: "
            "give another folder"
        )
    if not overwrite:
        raise OutputError(
            f"{key}: {str(path)!r} holds what Headfold wrote earlier; to replace it add "
            f"--overwrite (in Python: "
            "overwrite=True), or give another folder"
        )
    if (other := changed(path)) is not None:
        raise OutputError(
            f"{key}: {str(path / other)!r} was changed after Headfold wrote it, and is not "
            f"replaced: give another "
            "folder"
        )
    spare = spare_of(path)
    if os.path.lexists(spare) and not _is_leftover(spare):
        raise OutputError(f"{key}: {str(spare)!r} is in the way; move it, or give another folder")


def digests(folder: Path) -> dict[str, str]:
    """Return what `digests.json` of a folder names, file by SHA-256.

    Empty if there is none that can be read.
    """
    try:
        recorded = json.loads((folder / DIGESTS).read_text(encoding="utf-8"))
    except (OSError, ValueError, RecursionError):
        return {}
    sound = isinstance(recorded, dict) and all(
        re.fullmatch("[0-9a-f]{64}", str(digest)) for digest in recorded.values()
    )
    return recorded if sound else {}


def stranger(folder: Path) -> str | None:
    """Return the first thing in a folder that we did not write.

    A file that the list lacks, a link, an empty folder.
    """
    if folder.is_symlink() or not folder.is_dir():
        return folder.name
    ours = digests(folder)
    expected = ours.keys() | {DIGESTS} if ours else ours.keys()
    for name, mode in entries(folder):
        if stat.S_ISDIR(mode) or not stat.S_ISREG(mode) or name not in expected:
            return name
    return None


def foreign(folder: Path) -> str | None:
    """Return `stranger`, or the list itself where nothing that it names is there.

    It is then somebody's file of that name.
    """
    listed = any((folder / name).exists() for name in digests(folder))
    return stranger(folder) or (None if listed else DIGESTS)


def changed(folder: Path) -> str | None:
    """Return the first file of a folder whose bytes are not those that the list names.

    Reads them all.
    """
    ours = digests(folder)
    return next(
        (
            name
            for name, _ in entries(folder)
            if name in ours and sha256(folder / name) != ours[name]
        ),
        None,
    )


def entries(folder: Path) -> Iterator[tuple[str, int]]:
    """Path and mode of all in a folder, sorted; folders only where they are empty.

    Links are not followed.
    """
    for entry in sorted(folder.iterdir()):
        mode = entry.lstat().st_mode
        empty = True
        for name, kind in entries(entry) if stat.S_ISDIR(mode) else ():
            empty = False
            yield f"{entry.name}/{name}", kind
        if empty:
            yield entry.name, mode


def remove(folder: Path) -> None:
    """Remove the files that a folder's list names, the list last, and the folders left empty.

    Other files stay, and so do the folders that contain them.
    """
    ours = digests(folder)
    names = [name for name, mode in entries(folder) if name in ours and stat.S_ISREG(mode)]
    for name in [*names, *([DIGESTS] if ours else [])]:
        (folder / name).unlink(missing_ok=True)
    above = {
        parent
        for name in names
        for parent in (folder / name).parents
        if folder in (parent, *parent.parents)
    }
    for empty in sorted(above | {folder}, reverse=True):
        with contextlib.suppress(OSError):
            empty.rmdir()


def spare_of(folder: Path) -> Path:
    """Return the path of the old folder while a new one replaces it."""
    return folder.with_name(f".{folder.name}.old")


def recover(folder: Path) -> None:
    """If a save was killed between its two renames, put the old folder back."""
    spare = spare_of(folder)
    if os.path.lexists(folder) or not spare.is_dir():
        return
    if _is_leftover(spare) and all((spare / name).exists() for name in digests(spare)):
        spare.rename(folder)


def _is_leftover(spare: Path) -> bool:
    """Whether a spare folder was left by a killed swap, and is not a user's."""
    return stranger(spare) is None and bool(digests(spare))


def swap(fresh: Path, folder: Path, overwrite: bool = True) -> None:
    """Rename a finished folder to `folder` on the same disk.

    An existing folder is first renamed, then removed.

    Raises:
        OutputError: With nothing changed, if what is there is not ours, or is and must not be
            replaced.
    """
    recover(folder)
    if os.path.lexists(folder):
        _check_kind(folder, "out")
        if any(folder.iterdir()) and (not overwrite or foreign(folder) is not None):
            raise OutputError(
                f"out: {str(folder)!r} is not empty any more; nothing was written: give another "
                f"folder"
            )
    spare = spare_of(folder)
    try:
        if folder.is_dir() and any(folder.iterdir()):
            if os.path.lexists(spare):
                if not _is_leftover(spare):
                    raise OutputError(
                        f"out: {str(spare)!r} is in the way; move it, or give another folder"
                    )
                remove(spare)
            folder.rename(spare)
        fresh.rename(folder)
    except BaseException:
        recover(folder)
        raise
    if spare.is_dir() and _is_leftover(spare):
        remove(spare)


def unused(folder: Path) -> Path:
    """Return an unused name next to `folder`, for a folder that is being written."""
    return next(path for path in names_beside(folder) if not os.path.lexists(path))


@contextmanager
def parents_made(folder: Path, keep: bool = True) -> Iterator[None]:
    """Make the parent folders of `folder`.

    If the body fails, or without `keep`, the new folders that are empty are removed.
    """
    missing = [parent for parent in folder.parents if not parent.exists()]
    done = False
    try:
        for parent in reversed(missing):
            parent.mkdir(exist_ok=True)
        yield
        done = keep
    finally:
        for parent in [] if done else missing:
            with contextlib.suppress(OSError):
                parent.rmdir()


def _try(folder: Path) -> None:
    """Do what writing a folder begins with, and undo it. Raises OSError if any of it fails."""
    with parents_made(folder, keep=False):
        trial = unused(folder)
        if not os.path.lexists(folder):
            folder.mkdir()  # the name itself
            folder.rmdir()
        trial.mkdir()
        try:
            (trial / ("x" * _LONGEST)).touch()
            (trial / ("x" * _LONGEST)).unlink()
        finally:
            trial.rmdir()
