"""Where files are written: for random trees of folders and random targets only Headfold's own files change."""

from __future__ import annotations

import os
import stat
import tempfile
from pathlib import Path
from typing import Any

import pytest
from folder_trees import snapshot
from hypothesis import given, settings
from hypothesis import strategies as st

from attention.io import checkpoint
from attention.io.replacing import OutputError, check_folder
from orchestrator.config.schema import ConfigError
from orchestrator.conversion.curve import check_curve
from orchestrator.conversion.disk_store import layer_folder_of
from orchestrator.conversion.layer_folder import LayerFolder, check_layer_folder
from orchestrator.reporting.pages.page import render_page
from orchestrator.reporting.pages.report_page import write_report
from orchestrator.storage.json_files import write_json
from orchestrator.storage.outputs import check_results, write_page, write_result
from orchestrator.storage.paths import SearchFolder, check_writable


def written(folder: Path, content: bytes = b"old") -> None:
    """A checkpoint's folder as all writers leave it."""

    def write(fresh: Path) -> None:
        (fresh / "model.safetensors").write_bytes(content)
        (fresh / "deep").mkdir()
        (fresh / "deep" / "config.json").write_text("{}")

    checkpoint.write_atomically(folder, write, overwrite=False)


# ---- random trees -------------------------------------------------------------------------------------------------

NAMES = st.sampled_from(["a", "b", "m", "kv-0.5", "curve.json", ".a.old", ".a.layerwise"])
PLACES = st.lists(NAMES, min_size=1, max_size=3).map("/".join)
THINGS = ("file", "empty file", "folder", "link", "ours", "ours and a file", "ours, changed", "json", "page", "list")
WAYS = ("folder", "save", "stage", "curve", "json", "page", "report")
TARGETS = st.one_of(
    PLACES,
    st.sampled_from([".", "..", "m", "m/x", "a/..", "s", "s/search.yaml", "s/report.html", "", "model/config.json"]),
    st.tuples(PLACES, st.sampled_from(["/..", "/.", "/model.safetensors", "/x/y", "/digests.json"])).map("".join),
)


def plant(root: Path, thing: str, place: str, ours: set[str]) -> None:
    """Put something at a place, if it is free; what Headfold's writers made goes into `ours`."""
    path = root / place
    if os.path.lexists(path) or path.parent.resolve() != path.parent:
        return
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
    except OSError:
        return  # its parent is a file
    before = snapshot(root)
    if thing == "folder":
        path.mkdir()
    elif thing == "link":
        path.symlink_to(root / "m" if len(place) % 2 else root / "a", target_is_directory=True)
    elif thing == "json":
        write_json(path, {"loss": 1.0, "written_by": "headfold"})
    elif thing == "page":
        path.write_text(render_page("Headfold: x", "x", "x", []))
    elif thing in ("file", "empty file"):
        path.write_text("mine" if thing == "file" else "")
    elif thing == "list":
        path.mkdir()
        (path / "digests.json").write_text('{"mine.txt": "' + "0" * 64 + '"}')
    else:
        written(path)
    if thing.startswith(("ours", "json", "page")):
        ours |= {name for name in snapshot(root) if name not in before}
    if thing == "ours and a file":
        (path / "deep" / "mine.txt").write_text("mine")
        ours -= {place, f"{place}/deep"}
    if thing == "ours, changed":
        (path / "model.safetensors").write_text("trained on")
        ours -= {place, f"{place}/model.safetensors"}


def run_job(way: str, target: Path, overwrite: bool, root: Path) -> None:
    """One way of writing, as its verb does it: the check, then the real writer."""
    model = root / "m"

    def write(fresh: Path) -> None:
        (fresh / "model.safetensors").write_bytes(b"new")

    if way == "folder":
        checkpoint.write_atomically(
            check_folder(target, overwrite=overwrite, reads=[model]), write, overwrite=overwrite
        )
    elif way == "save":
        checkpoint.write_atomically(target, write, overwrite=overwrite)
    elif way == "stage":
        folder = layer_folder_of(check_folder(target, overwrite=overwrite, reads=[model]))
        check_layer_folder(folder)
        folder.parent.mkdir(parents=True, exist_ok=True)
        LayerFolder.open(folder, {"source": "m"}, overwrite)
    elif way == "curve":
        check_curve(target, model, "gqa", [0.5], overwrite)
        checkpoint.write_atomically(target / "kv-0.5", write, overwrite=overwrite)
        write_result(target / "curve.json", {"points": []}, "out")
    elif way == "json":
        write_result(target, {"loss": 2.0})
    elif way == "page":
        write_page(target, render_page("Headfold: y", "y", "y", []))
    else:
        write_report(root / "s", target)


@pytest.mark.extended
@settings(derandomize=True, max_examples=250, deadline=None)
@given(
    tree=st.lists(st.tuples(st.sampled_from(THINGS), PLACES), max_size=7),
    way=st.sampled_from(WAYS),
    target=TARGETS,
    absolute=st.booleans(),
    overwrite=st.booleans(),
    current=st.sampled_from(["", "s", "a", "a/b"]),
)
def test_nothing_changes_but_what_headfold_wrote(
    tree: list[tuple[str, str]], way: str, target: str, absolute: bool, overwrite: bool, current: str
) -> None:
    with tempfile.TemporaryDirectory() as created, pytest.MonkeyPatch.context() as patch:
        root = Path(created).resolve() / "root"
        ours: set[str] = set()
        root.mkdir()
        (root / "m").mkdir()
        (root / "m" / "config.json").write_text("{}")
        (root / "m" / "model.safetensors").write_bytes(b"weights")
        search = SearchFolder.fresh(root, "s")
        search.snapshot.write_text("name: s\n")
        for thing, place in tree:
            plant(root, thing, place, ours)
        if not (root / current).is_dir():
            current = ""
        patch.chdir(root / current)
        patch.setenv("HOME", str(root / "a"))
        before = snapshot(root.parent)
        ours = {f"root/{name}" for name in ours}
        try:
            run_job(way, root / target if absolute else Path(target), overwrite, root)
        except (OutputError, ConfigError):
            assert snapshot(root.parent) == before
            return
        after = snapshot(root.parent)
        for name, entry in before.items():
            if name not in ours:
                empty = entry == ("folder", None) and not any(other.startswith(f"{name}/") for other in before)
                assert (
                    after.get(name) == entry
                    or (entry == ("file", b"") and after[name][0] == "file")
                    or (empty and after[name][0] == "folder")
                ), f"{name} was changed"
            elif way in ("folder", "save", "stage", "curve") and not overwrite and not name.endswith("curve.json"):
                assert after.get(name) == entry, f"{name} was replaced without --overwrite"
        assert after != before


# ---- one by one ---------------------------------------------------------------------------------------------------


@pytest.fixture
def home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A home with a folder of work, which is the current one."""
    home = tmp_path / "home"
    (home / "work").mkdir(parents=True)
    monkeypatch.setenv("HOME", str(home))
    monkeypatch.chdir(home / "work")
    return home


def test_what_may_never_be_a_folder_to_write(home: Path, tmp_path: Path) -> None:
    model = tmp_path / "models" / "m"
    model.mkdir(parents=True)
    (model / "config.json").write_text("{}")
    (model / "model.safetensors").write_text("")
    (tmp_path / "file").write_text("mine")
    (tmp_path / "link").symlink_to(model, target_is_directory=True)
    (tmp_path / "loop").symlink_to(tmp_path / "loop")
    refused: list[tuple[Path | str, str]] = [
        (model, "is, or contains, what is read"),
        (tmp_path / "models", "is, or contains, what is read"),
        (tmp_path / "models" / "m" / "half", "is within what is read"),
        (tmp_path / "link" / "half", "is within what is read"),
        (tmp_path / "link", "is, or contains, what is read"),
        (".", "the current folder"),
        ("", "the current folder"),
        (home, "current folder"),
        ("/", "is, or contains"),
        (tmp_path / "file", "is a file"),
        (tmp_path / "file" / "x", "cannot write to .*ot a directory"),
        (tmp_path / "loop" / "x", "cannot write"),
        (tmp_path / ("n" * 300), "cannot write to .*too long"),
        (tmp_path / ("n" * 252), "cannot write to .*too long"),
        ("/proc/headfold", "cannot write"),
    ]
    before = snapshot(tmp_path)
    for overwrite in (False, True):
        for place, message in refused:
            with pytest.raises(OutputError, match=message):
                check_folder(place, overwrite=overwrite, reads=[model])
    with pytest.raises(OutputError, match="is a link to"):
        check_folder(tmp_path / "link", reads=["org/name"])
    with pytest.raises(OutputError, match="within a checkpoint"):
        check_folder(model / "half")
    with pytest.raises(OutputError, match="mount"):
        check_folder("/proc")
    assert snapshot(tmp_path) == before
    check_folder(tmp_path / "new" / "deep", reads=[model])
    assert snapshot(tmp_path) == before


def test_only_what_headfold_wrote_and_nobody_changed_is_replaced(home: Path, tmp_path: Path) -> None:
    out = tmp_path / "out"
    written(out)
    with pytest.raises(OutputError, match="wrote earlier; to replace it add --overwrite"):
        check_folder(out)
    check_folder(out, overwrite=True)
    (out / "deep" / "notes.txt").write_text("mine")
    with pytest.raises(OutputError, match="did not write its 'deep/notes.txt'"):
        check_folder(out, overwrite=True)
    (out / "deep" / "notes.txt").unlink()
    (out / "empty").mkdir()
    with pytest.raises(OutputError, match="did not write its 'empty'"):
        check_folder(out, overwrite=True)
    (out / "empty").rmdir()
    (out / "model.safetensors").write_bytes(b"trained on")
    with pytest.raises(OutputError, match=r"model\.safetensors' was changed after"):
        check_folder(out, overwrite=True)


def test_what_came_during_the_work_is_not_replaced(tmp_path: Path) -> None:
    out = check_folder(tmp_path / "out")

    def write(fresh: Path) -> None:
        (fresh / "model.safetensors").write_text("new")
        out.mkdir()
        (out / "mine.txt").write_text("mine")

    with pytest.raises(OutputError, match="not empty any more"):
        checkpoint.write_atomically(out, write)
    assert snapshot(tmp_path) == {"out": ("folder", None), "out/mine.txt": ("file", b"mine")}


def test_an_interrupted_swap_keeps_the_old_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    written(tmp_path / "out")
    before, rename = snapshot(tmp_path), Path.rename

    def interrupted(self: Path, target: Any) -> Any:
        if self.suffix == ".new":
            raise KeyboardInterrupt
        return rename(self, target)

    monkeypatch.setattr(Path, "rename", interrupted)
    with pytest.raises(KeyboardInterrupt):
        checkpoint.write_atomically(tmp_path / "out", lambda fresh: (fresh / "x").touch())
    assert snapshot(tmp_path) == before


def test_results_replace_results_and_nothing_else(tmp_path: Path) -> None:
    file = tmp_path / "deep" / "result.json"
    check_results(file)
    assert not file.parent.exists()
    for loss in (1.0, 2.0):
        write_result(file, {"loss": loss})
    assert b'"loss": 2.0' in file.read_bytes()
    (tmp_path / "empty").touch()
    check_results(tmp_path / "empty")
    (tmp_path / "link").symlink_to(file)
    for name, content in {"a.json": b"{}", "b": b"\xff", "c": b"[" * 100_000, "d": b'{"written_by": "me"}'}.items():
        (tmp_path / name).write_bytes(content)
        with pytest.raises(ConfigError, match="Headfold did not write it"):
            check_results(tmp_path / name)
        with pytest.raises(ConfigError, match="Headfold did not write it"):
            write_result(tmp_path / name, {})
    for wrong, output in {
        tmp_path: "is a folder; name a file, e.g. .*result.json",
        tmp_path / "link": "is a link",
        Path("/dev/null"): "not a regular file",
        file / "x": "cannot write",
        Path("/proc/x"): "cannot write",
        tmp_path / ("n" * 300): "too long",
    }.items():
        with pytest.raises(ConfigError, match=output):
            check_results(wrong)
    assert stat.S_ISCHR(Path("/dev/null").stat().st_mode)
    with pytest.raises(ConfigError, match="is a folder"):
        check_results(page=tmp_path)
    with pytest.raises(ConfigError, match="Headfold did not write it"):
        check_results(page=file)
    for other in (tmp_path / "out", tmp_path / "out" / "deep" / "r.json", tmp_path / "out" / "r.json"):
        with pytest.raises(ConfigError, match="in each other's way"):
            check_results(other, folder=tmp_path / "out")
    with pytest.raises(ConfigError, match="in each other's way"):
        check_results(tmp_path / "out", folder=tmp_path / "out" / "deep")


def test_a_search_stays_out_of_checkpoints_and_of_folders_that_are_not_its_own(tmp_path: Path) -> None:
    model = tmp_path / "m"
    model.mkdir()
    (model / "config.json").write_text("{}")
    (model / "model.safetensors").write_text("")
    (tmp_path / "file").touch()
    for storage in (model, model / "runs"):
        with pytest.raises(ConfigError, match="storage: .* is within a checkpoint"):
            check_writable(storage)
    with pytest.raises(ConfigError, match="storage: cannot write"):
        check_writable(tmp_path / "file")
    (tmp_path / "runs" / "demo").mkdir(parents=True)
    (tmp_path / "runs" / "demo" / "search.yaml").write_text("name: demo\n")
    with pytest.raises(ConfigError, match="no search named 'demo'"):
        SearchFolder.newest(tmp_path / "runs", "demo")
    assert SearchFolder.fresh(tmp_path / "runs", "demo").root.name == "demo-2"
    assert (tmp_path / "runs" / "demo" / "search.yaml").read_text() == "name: demo\n"
