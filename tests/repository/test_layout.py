"""Tests of a folder are in the same place: `tests/PACKAGE/ROOM/` for `PACKAGE/ROOM/` or `PACKAGE/ROOM.py`."""

from __future__ import annotations

from collections import Counter
from pathlib import Path

REPOSITORY = Path(__file__).resolve().parents[2]
OF_NO_ROOM = {"repository", "honest"}
"""Tests of the repository as a whole, and of what papers claim."""


def misplaced(root: Path) -> list[str]:
    """Return the folders with tests, below `tests/` of `root`, to which no room belongs."""
    folders = {path.parent.relative_to(root / "tests") for path in (root / "tests").rglob("test_*.py")}
    rooms = {folder for folder in folders if not folder.parts or folder.parts[0] not in OF_NO_ROOM}
    return sorted(
        str(room) for room in rooms if not room.parts or not ((root / room).is_dir() or (root / f"{room}.py").is_file())
    )


def test_tests_are_where_the_product_does() -> None:
    assert misplaced(REPOSITORY) == []


def test_no_two_files_of_tests_are_named_alike() -> None:
    """pytest imports them by their name alone."""
    names = Counter(path.name for path in (REPOSITORY / "tests").rglob("*.py") if path.name != "conftest.py")
    assert [name for name, count in names.items() if count > 1] == []


def test_what_is_misplaced_is_found(tmp_path: Path) -> None:
    for name in ("attention/io/a.py", "attention/plan.py"):
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).touch()
    for room in ("attention", "attention/io", "attention/plan", "attention/old", "honest", "."):
        (tmp_path / "tests" / room).mkdir(parents=True, exist_ok=True)
        (tmp_path / "tests" / room / "test_it.py").touch()
    assert misplaced(tmp_path) == [".", "attention/old"]
