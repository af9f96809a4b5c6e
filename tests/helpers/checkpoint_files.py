"""Write the files of a test's training checkpoint, and list the existing ones."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

from trainers.jobs.checkpoints import CheckpointStore


def writing(text: str) -> Callable[[Path], None]:
    def write(folder: Path) -> None:
        (folder / "deep").mkdir()
        (folder / "deep" / "state.pt").write_text(text)

    return write


def steps(store: CheckpointStore) -> list[int]:
    return [saved.step for saved in store.read()[0]]
