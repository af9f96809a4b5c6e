"""A working folder and its copy at an address: on a file system of pyarrow's, of fsspec's, and on a small S3 server."""

from __future__ import annotations

import re
import sqlite3
import time
from collections.abc import Callable, Iterator
from contextlib import closing
from pathlib import Path
from typing import Any

import fsspec
import pytest
from buckets import bucket
from fsspec.implementations.local import LocalFileSystem
from pyarrow import fs

from orchestrator.config.schema import ConfigError
from orchestrator.storage.mirror import Mirror, check_address, mirrored, open_address
from orchestrator.storage.paths import storage_path


def write(root: Path, **files: str) -> None:
    for name, text in files.items():
        path = root / name.replace("__", "/")
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)


@pytest.fixture
def work(tmp_path: Path) -> Path:
    """A search with a record, a checkpoint and what must not travel."""
    root = tmp_path / "work"
    write(root, demo__search_yaml="name: demo", demo__trials__a__weights="aa", demo__trials_json="[a]")
    write(root, **{"demo__.original.json.7.new": "half", "demo__driver.lock": "me"})
    (root / "exported").symlink_to(root / "demo" / "trials")
    return root


@pytest.fixture
def mirror(work: Path, tmp_path: Path) -> Mirror:
    return Mirror(fs.LocalFileSystem(), str(tmp_path / "bucket"), work)


def test_only_what_has_changed_is_sent_and_what_is_gone_is_dropped(mirror: Mirror, work: Path) -> None:
    assert mirror.push() == 3
    assert mirror.names() == ["demo/search_yaml", "demo/trials/a/weights", "demo/trials_json"]
    assert mirror.push() == 0
    write(work, demo__trials__b__weights="bb", demo__trials_json="[a, b]")
    (work / "demo" / "trials" / "a" / "weights").unlink()
    assert mirror.push() == 2
    assert mirror.names() == ["demo/search_yaml", "demo/trials/b/weights", "demo/trials_json"]
    assert Path(mirror.root, "demo", "trials_json").read_text() == "[a, b]"


def test_what_workers_send_and_read_themselves_is_not_fetched(mirror: Mirror, tmp_path: Path) -> None:
    states = ("checkpoint_000004/engine/state.pt", "checkpoints.json")
    own = {f"demo/train/t0001/{at}{name}": "x" for at in ("", "relaxation/stage-0/states/") for name in states}
    others = {f"demo/{name}": "x" for name in ("train/t0001/curve.jsonl", "trials/t/trained.relaxed/stage-0/states/x")}
    write(Path(mirror.root), **own, **others)
    assert mirror.pull() == len(others)
    assert all((mirror.local / name).exists() for name in others)
    write(mirror.local, demo__trials_json="[b]")
    write(mirror.local, **dict.fromkeys(own, "stale"))  # of a former version
    mirror.push()
    assert set(own) < set(mirror.names()), "nor is it dropped"
    assert {Path(mirror.root, name).read_text() for name in own} == {"x"}, "nor replaced"


def test_an_empty_folder_is_filled(mirror: Mirror, tmp_path: Path) -> None:
    mirror.push()
    other = Mirror(mirror.filesystem, mirror.root, tmp_path / "new-head")
    assert other.pull() == 3
    assert (other.local / "demo" / "trials" / "a" / "weights").read_text() == "aa"
    assert {p.parent.name for p in other.local.rglob("*") if p.name.startswith(".")} == {"new-head"}


class Recording(LocalFileSystem):
    """An fsspec file system that notes what is written, and may do something before a file is."""

    cachable = False

    def __init__(self) -> None:
        super().__init__()
        self.written: list[str] = []
        self.before: Callable[[str], None] = lambda path: None

    def open(self, path: str, mode: str = "rb", **options: Any) -> Any:
        if "w" in mode:
            self.before(path)
            self.written.append(path)
        return super().open(path, mode, **options)


def test_no_record_comes_before_the_files_that_it_names(work: Path, tmp_path: Path) -> None:
    """A kill between any two writes leaves a copy in which each trial of the records has its weights."""
    address, bucket = Recording(), tmp_path / "bucket"
    mirror = Mirror(fs.PyFileSystem(fs.FSSpecHandler(address)), str(bucket), work)
    mirror.push()
    assert address.written.index(f"{bucket}/demo/trials/a/weights") < address.written.index(
        f"{bucket}/demo/trials_json"
    )

    def meanwhile(path: str) -> None:
        if path.endswith("b/weights"):
            write(work, demo__trials__c__weights="cc", demo__trials_json="[a, b, c]")

    write(work, demo__trials__b__weights="bb", demo__trials_json="[a, b]")
    address.before = meanwhile
    mirror.push()
    assert (bucket / "demo" / "trials_json").read_text() == "[a, b]"
    mirror.push()
    assert (bucket / "demo" / "trials_json").read_text() == "[a, b, c]"
    assert (bucket / "demo" / "trials" / "c" / "weights").read_text() == "cc"


def test_a_database_in_use_is_sent_whole(mirror: Mirror, work: Path, tmp_path: Path) -> None:
    with closing(sqlite3.connect(work / "mlflow.db")) as store:
        store.execute("pragma journal_mode=wal")
        store.execute("create table runs (id)")
        store.executemany("insert into runs values (?)", [(i,) for i in range(100)])
        store.commit()
        mirror.push()  # the rows are in the log next to the database, which stays open
        other = Mirror(mirror.filesystem, mirror.root, tmp_path / "new-head")
        other.pull()
    with closing(sqlite3.connect(tmp_path / "new-head" / "mlflow.db")) as copy:
        assert copy.execute("select count(*) from runs").fetchone() == (100,)


def test_an_address_outside_pyarrow_goes_through_fsspec(work: Path) -> None:
    storage = f"memory://headfold{work}"
    try:
        with mirrored(storage, work, seconds=60):
            pass
        result = sorted(fsspec.filesystem("memory").find(f"/headfold{work}"))
        names = [Path(f).name for f in result]
        assert names == ["holder.json", "manifest.json", "search_yaml", "weights", "trials_json"]
        back = Mirror.of(storage, work.parent / "again")
        assert back.pull() == 3
    finally:
        fsspec.filesystem("memory").rm("/headfold", recursive=True)


def test_the_copy_is_kept_up_to_date_while_the_search_runs(work: Path, tmp_path: Path) -> None:
    storage = f"memory://headfold{work}-live"
    memory = fsspec.filesystem("memory")
    try:
        with mirrored(storage, work, seconds=0.05) as mirror:
            assert mirror is not None
            write(work, demo__promotion_json="{}")
            deadline = time.monotonic() + 20
            while not any(n.endswith("promotion_json") for n in mirror.names()) and time.monotonic() < deadline:
                time.sleep(0.05)
            assert "demo/promotion_json" in mirror.names()
    finally:
        memory.rm("/headfold", recursive=True)


def test_an_address_that_goes_away_is_reported_once_and_the_search_continues(
    work: Path, caplog: pytest.LogCaptureFixture
) -> None:
    storage, address = f"memory://headfold{work}-away", Recording()

    def away(path: str) -> None:
        raise OSError("the bucket is away")

    address.before = away
    with mirrored(storage, work, seconds=0.02) as mirror:
        assert mirror is not None
        mirror.push()
        there, mirror.filesystem = mirror.filesystem, fs.PyFileSystem(fs.FSSpecHandler(address))
        caplog.clear()
        write(work, demo__trials_json="[a, d]")
        deadline = time.monotonic() + 20
        while "the bucket is away" not in caplog.text and time.monotonic() < deadline:
            time.sleep(0.05)
        time.sleep(0.2)
        assert caplog.text.count("the bucket is away") == 1
        mirror.filesystem = there


def test_the_working_folder_is_the_same_for_the_same_address(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("HEADFOLD_HOME", str(tmp_path))
    one = storage_path("s3://bucket/runs?region=eu-west-1")
    assert one == storage_path("s3://bucket/runs/") and one.parent == tmp_path
    assert one != storage_path("s3://bucket/runs2") and "bucket" in one.name
    assert storage_path("s3://bucket/../../etc").parent == tmp_path


@pytest.mark.parametrize(
    "address",
    [
        "s3://key:hidden@bucket/x",
        "s3://bucket/x?secret_key=hidden",
        "s3://hidden@bucket/x",
        "az://container/x?sig=hidden",
        "abfs://container/x?client_secret=hidden",
        "abfss://container:hidden@account.dfs.core.windows.net/x",
    ],
)
def test_credentials_in_an_address_are_refused_and_not_repeated(address: str) -> None:
    for refuse in (check_address, open_address, storage_path):
        with pytest.raises(ConfigError, match="contains credentials") as caught:
            refuse(address)
        assert "hidden" not in str(caught.value)


def test_the_container_of_an_azure_address_is_no_secret() -> None:
    check_address("abfss://container@account.dfs.core.windows.net/runs")


# ---- a small S3 server ------------------------------------------------------------------------------------------


@pytest.fixture
def s3(monkeypatch: pytest.MonkeyPatch) -> Iterator[str]:
    with bucket(monkeypatch) as address:
        yield address


@pytest.mark.slow
def test_a_lost_machine_is_replaced_from_a_bucket(s3: str, work: Path, tmp_path: Path) -> None:
    with mirrored(s3, work, seconds=60):
        write(work, demo__trials_json="[a, b]", demo__trials__b__weights="b" * 9_000_000)
    with mirrored(s3, tmp_path / "new-head", seconds=60) as mirror:
        assert mirror is not None
        assert (tmp_path / "new-head" / "demo" / "trials_json").read_text() == "[a, b]"
        assert mirror.fetch_search("demo", ["b"]) == 1, "weights come for what is open"
        assert (tmp_path / "new-head" / "demo" / "trials" / "b" / "weights").stat().st_size == 9_000_000
        assert (tmp_path / "new-head" / "demo" / "driver.lock").exists() is False
        (tmp_path / "new-head" / "demo" / "trials" / "a" / "weights").unlink()


@pytest.mark.slow
def test_a_bucket_that_cannot_be_written_is_refused(s3: str, tmp_path: Path) -> None:
    missing = s3.replace("headfold-test", "headfold-none").replace("&allow_bucket_creation=true", "")
    with pytest.raises(ConfigError, match=re.escape(f"cannot write to {missing.partition('?')[0]}: ")):
        Mirror.of(missing, tmp_path)
