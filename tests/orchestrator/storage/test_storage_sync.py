"""A working folder and an address that have gone on apart from each other, and two drivers at one address."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
import uuid
from collections.abc import Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from threading import Thread
from typing import Any
from urllib.parse import parse_qs, unquote, urlparse

import fsspec
import pytest
from buckets import bucket
from pyarrow import fs

from orchestrator.config.schema import ConfigError
from orchestrator.storage.conditional import (
    ComparedObjects,
    GcsObjects,
    S3Objects,
    WriteConflictError,
    conditional_objects,
)
from orchestrator.storage.journal import Journal, read_events
from orchestrator.storage.lease import AddressTakenError
from orchestrator.storage.manifest import SyncSide
from orchestrator.storage.mirror import Mirror, mirrored, open_address

BEAT = 0.05
CONFIG = {"recipe": "gqa", "kv_ratio": 0.5, "learning_rate": 1e-3, "choices": {}}


@pytest.fixture(scope="module")
def s3() -> Iterator[str]:
    with pytest.MonkeyPatch.context() as patch, bucket(patch) as address:
        yield address


@pytest.fixture(params=["memory", pytest.param("s3", marks=pytest.mark.slow)])
def address(request: pytest.FixtureRequest) -> Iterator[str]:
    """Once with a store without conditional writes, and once with them."""
    if request.param == "s3":
        result: str = request.getfixturevalue("s3")
        yield result.replace("/runs", f"/{uuid.uuid4().hex}")
        return
    yield f"memory://headfold-{uuid.uuid4().hex}/runs"
    memory = fsspec.filesystem("memory")
    memory.store.clear()


@contextmanager
def driver(address: str, folder: Path, side: SyncSide | None = None, seconds: float = BEAT) -> Iterator[Mirror]:
    with mirrored(address, folder, seconds=seconds, side=side) as mirror:
        assert mirror is not None
        yield mirror


def search_in(folder: Path, events: int, name: str = "demo") -> Journal:
    root = folder / name
    root.mkdir(parents=True, exist_ok=True)
    (root / "search.yaml").write_text("name: demo\n")
    journal = Journal(root / "journal.jsonl")
    journal.begin(2)
    for number in range(events):
        journal.append("trial", trial=f"t{len(journal.history.configs)}", config=CONFIG)
        (root / "trials" / f"t{number}").mkdir(parents=True, exist_ok=True)
        (root / "trials" / f"t{number}" / "weights").write_text(f"{number}")
    return journal


def trials_in(folder: Path, name: str = "demo") -> list[Any]:
    return [e["trial"] for e in read_events(folder / name / "journal.jsonl") if e["event"] == "trial"]


def killed(mirror: Mirror) -> None:
    """Leave folder and lease as a driver that was killed."""
    assert mirror.lease is not None
    mirror._users.close()
    mirror._users = None


def test_a_folder_that_lags_behind_is_brought_up_to_date(address: str, tmp_path: Path) -> None:
    """And overwrites nothing: head A, head B with a new disk, then A again."""
    with driver(address, tmp_path / "a"):
        search_in(tmp_path / "a", 2)
        (tmp_path / "a" / "demo" / "state.json").write_text('{"started": "x"}')
    with driver(address, tmp_path / "b"):
        search_in(tmp_path / "b", 2)
        (tmp_path / "b" / "demo" / "state.json").write_text('{"started": "x", "ended": "done"}')
        (tmp_path / "b" / "demo" / "trials" / "t0" / "weights").write_text("newer")
        (tmp_path / "b" / "demo" / "trials" / "t1" / "weights").unlink()
    with driver(address, tmp_path / "a"):
        assert trials_in(tmp_path / "a") == ["t0", "t1", "t2", "t3"]
        assert "ended" in (tmp_path / "a" / "demo" / "state.json").read_text()
        assert (tmp_path / "a" / "demo" / "trials" / "t0" / "weights").read_text() == "newer"
        assert not (tmp_path / "a" / "demo" / "trials" / "t1" / "weights").exists()
    with driver(address, tmp_path / "c"):
        assert trials_in(tmp_path / "c") == ["t0", "t1", "t2", "t3"]


@pytest.mark.parametrize("side", ["address", "folder"])
def test_where_both_have_gone_on_somebody_must_choose(address: str, tmp_path: Path, side: SyncSide) -> None:
    with driver(address, tmp_path / "a"):
        search_in(tmp_path / "a", 1)
    with driver(address, tmp_path / "b"):
        search_in(tmp_path / "b", 2)
    search_in(tmp_path / "a", 1)  # what a driver had written before it was killed, and had not sent
    with pytest.raises(ConfigError) as caught, driver(address, tmp_path / "a"):
        pass
    report = str(caught.value)
    assert "have both changed since they last agreed" in report and "demo: journal.jsonl differ" in report
    assert "in the folder:  3 events" in report and "at the address: 4 events" in report
    assert f"process {os.getpid()} on" in report
    assert "--sync-from address" in report and "--sync-from folder" in report
    assert trials_in(tmp_path / "a") == ["t0", "t1"], "nothing has changed yet"
    with driver(address, tmp_path / "a", side=side):
        expected = ["t0", "t1", "t2"] if side == "address" else ["t0", "t1"]
        assert trials_in(tmp_path / "a") == expected
    with driver(address, tmp_path / "c") as mirror:
        assert trials_in(tmp_path / "c") == expected
        filesystem, root = mirror.filesystem, mirror.root
    if side == "address":
        (aside,) = (tmp_path / "a" / ".headfold" / "replaced").rglob("journal.jsonl")
        assert len(read_events(aside)) == 3
    else:
        result = filesystem.get_file_info(fs.FileSelector(f"{root}/.headfold/replaced", recursive=True))
        assert [info.base_name for info in result if info.base_name == "journal.jsonl"]


def test_what_was_not_sent_before_a_kill_is_sent_by_the_next_start(address: str, tmp_path: Path) -> None:
    with driver(address, tmp_path / "a"):
        search_in(tmp_path / "a", 1)
    search_in(tmp_path / "a", 1)
    with driver(address, tmp_path / "a"):
        assert trials_in(tmp_path / "a") == ["t0", "t1"]
    with driver(address, tmp_path / "b"):
        assert trials_in(tmp_path / "b") == ["t0", "t1"]


def test_a_folder_that_cannot_be_read_removes_nothing_at_the_address(
    address: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A disk that fails is no reason to remove the copy of its files."""
    search_in(tmp_path / "a", 2)
    with driver(address, tmp_path / "a", seconds=60) as mirror:
        scan = os.scandir

        def failing(path: Any = ".") -> Any:
            if Path(path).name == "t1":
                raise PermissionError(13, "not now", str(path))
            return scan(path)

        with monkeypatch.context() as patch:
            patch.setattr(os, "scandir", failing)
            with pytest.raises(PermissionError):
                mirror.push()
        shutil.rmtree(tmp_path / "a" / "demo" / "trials" / "t0")
        mirror.push()
    with driver(address, tmp_path / "b"):
        assert (tmp_path / "b" / "demo" / "trials" / "t1" / "weights").read_text() == "1"
        assert not (tmp_path / "b" / "demo" / "trials" / "t0" / "weights").exists()


def test_a_second_driver_with_a_separate_folder_is_refused(address: str, tmp_path: Path) -> None:
    with driver(address, tmp_path / "a", seconds=1.0) as mirror:
        search_in(tmp_path / "a", 1)
        with (
            pytest.raises(ConfigError, match=rf"is being used by process {os.getpid()} on .*its own working folder"),
            driver(address, tmp_path / "b"),
        ):
            pass
        with driver(address, tmp_path / "a"):
            pass  # another search of the same storage on the same machines
        assert mirror.lease is not None
        mirror.lease.verify()
        search_in(tmp_path / "a", 1)
    with driver(address, tmp_path / "b"):
        assert trials_in(tmp_path / "b") == ["t0", "t1"]


def test_a_driver_that_was_taken_over_sends_nothing_more(address: str, tmp_path: Path) -> None:
    first = Mirror.of(address, tmp_path / "a")
    first.claim(BEAT)
    first.pull()
    journal = search_in(tmp_path / "a", 1)
    first.push()
    tag = first.remote["files"]["demo/journal.jsonl"].get("tag") if first.remote else None
    with driver(address, tmp_path / "b") as second:  # the first stands still for longer than its beats may
        assert second.lease is not None and second.lease.epoch == 2
        search_in(tmp_path / "b", 2)
        second.push()
        journal.append("trial", trial="late", config=CONFIG)
        with pytest.raises(AddressTakenError, match="was taken over by process"):
            first.push()
        with pytest.raises(AddressTakenError):
            first.check()
        if first.objects.atomic:  # also where it was suspended between its read and its write
            with pytest.raises(WriteConflictError):
                first.objects.write(f"{first.root}/demo/journal.jsonl", b"", tag)
        assert first.lease is not None
        first.lease.beat()
        first.release()
        second.check()
    with driver(address, tmp_path / "c"):
        assert trials_in(tmp_path / "c") == ["t0", "t1", "t2"]


def test_a_late_record_of_a_driver_that_was_taken_over_is_replaced(address: str, tmp_path: Path) -> None:
    """It was being sent when the other took over, which has not written that record yet."""
    first = Mirror.of(address, tmp_path / "a")
    first.claim(BEAT)
    journal = search_in(tmp_path / "a", 1)
    first.push()
    with driver(address, tmp_path / "b") as second:
        first.filesystem.open_output_stream(f"{first.root}/demo/journal.jsonl").close()
        search_in(tmp_path / "b", 2)
        second.push()
    killed(first)
    with driver(address, tmp_path / "c"):
        assert trials_in(tmp_path / "c") == ["t0", "t1", "t2"]
    assert journal.failed is None


def test_a_copy_of_a_working_folder_is_another_one(tmp_path: Path) -> None:
    mirror = Mirror(fs.LocalFileSystem(), str(tmp_path / "bucket"), tmp_path / "a")
    mirror.local.mkdir()
    one = mirror._identity()
    assert mirror._identity() == one
    shutil.copytree(tmp_path / "a", tmp_path / "b")
    assert Mirror(fs.LocalFileSystem(), mirror.root, tmp_path / "b")._identity() != one


# ---- nothing twice ----------------------------------------------------------------------------------------------


class Traffic:
    """pyarrow's local file system, with the files that were read and written through it."""

    def __init__(self) -> None:
        self._inner = fs.LocalFileSystem()
        self.read: list[str] = []
        self.written: list[str] = []

    def open_input_stream(self, path: str) -> Any:
        self.read.append(path)
        return self._inner.open_input_stream(path)

    def open_output_stream(self, path: str) -> Any:
        self.written.append(path)
        return self._inner.open_output_stream(path)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._inner, name)

    def files(self) -> tuple[list[str], list[str]]:
        """Files read and written since the last call, without the manifest."""
        result = (self.read, self.written)
        self.read, self.written = [], []
        return tuple([p for p in paths if ".headfold" not in p] for paths in result)  # type: ignore[return-value]


def test_nothing_is_sent_or_fetched_twice(tmp_path: Path) -> None:
    traffic = Traffic()

    def started(folder: str) -> Mirror:
        mirror = Mirror(traffic, str(tmp_path / "bucket"), tmp_path / folder)
        mirror.claim(BEAT)
        mirror.pull()
        return mirror

    first = started("a")
    search_in(tmp_path / "a", 2)
    assert first.push() == 4
    first.release()
    traffic.files()
    again = started("a")
    assert again.push() == 0
    assert traffic.files() == ([], []), "a driver that starts again"
    os.utime(tmp_path / "a" / "demo" / "trials" / "t0" / "weights", (1, 1))
    assert again.push() == 0, "a file that was touched"
    again.release()
    refilled = started("b")
    assert len(traffic.files()[0]) == 4
    assert refilled.push() == 0
    assert traffic.files() == ([], []), "after a refill"
    refilled.release()
    (tmp_path / "b" / ".headfold" / "manifest.json").unlink()
    forgetful = started("b")
    assert forgetful.push() == 0
    _, written = traffic.files()
    assert written == [], "where nothing is known of the last time, contents are compared"


def test_weights_are_fetched_for_what_is_open(tmp_path: Path) -> None:
    mirror = Mirror(fs.LocalFileSystem(), str(tmp_path / "bucket"), tmp_path / "a")
    search_in(tmp_path / "a", 2)
    for trial in ("t0", "t1"):
        (tmp_path / "a" / "demo" / "trials" / trial / "model.safetensors").write_bytes(bytes(2 << 20))
    (tmp_path / "a" / "demo" / "data").mkdir()
    (tmp_path / "a" / "demo" / "data" / "tokens.bin").write_bytes(bytes(2 << 20))
    (tmp_path / "a" / "demo" / "tune").mkdir()
    (tmp_path / "a" / "demo" / "tune" / "snapshot.pkl").write_bytes(bytes(2 << 20))
    mirror.push()
    other = Mirror(mirror.filesystem, mirror.root, tmp_path / "b")
    assert other.pull() == 4
    assert not list((tmp_path / "b").rglob("*.safetensors"))
    assert other.push() == 0
    assert other.fetch_search("demo", ["t1"]) == 2
    assert [p.parent.name for p in (tmp_path / "b").rglob("*.safetensors")] == ["t1"]
    assert (tmp_path / "b" / "demo" / "data" / "tokens.bin").exists()
    assert other.fetch_search("demo", ["t1"]) == 0
    assert other.push() == 0
    assert "demo/trials/t0/model.safetensors" in other.names(), "what was not fetched is not dropped there"
    assert other.fetch_search("demo", ["t0", "t1"]) == 1


def test_an_address_of_a_former_version_is_resumed(tmp_path: Path) -> None:
    """A folder without a manifest: its additional files are sent, missing ones are fetched."""
    search_in(tmp_path / "bucket", 1)
    shutil.copytree(tmp_path / "bucket", tmp_path / "ahead")
    search_in(tmp_path / "ahead", 1)
    shutil.copytree(tmp_path / "bucket", tmp_path / "behind")
    mirror = Mirror(fs.LocalFileSystem(), str(tmp_path / "bucket"), tmp_path / "ahead")
    mirror.claim(BEAT)
    mirror.pull()
    mirror.push()
    mirror.release()
    assert trials_in(tmp_path / "bucket") == trials_in(tmp_path / "ahead") == ["t0", "t1"]
    other = Mirror(fs.LocalFileSystem(), str(tmp_path / "bucket"), tmp_path / "behind")
    other.claim(BEAT)
    other.pull()
    assert trials_in(tmp_path / "behind") == ["t0", "t1"]


def test_a_manifest_that_is_none_is_reported(tmp_path: Path) -> None:
    (tmp_path / "bucket" / ".headfold").mkdir(parents=True)
    (tmp_path / "bucket" / ".headfold" / "manifest.json").write_text('{"format": 1, "gen')
    mirror = Mirror(fs.LocalFileSystem(), str(tmp_path / "bucket"), tmp_path / "a")
    with pytest.raises(ConfigError, match=r"manifest.json is not what was written there: expected a JSON object"):
        mirror.pull()


# ---- two processes ----------------------------------------------------------------------------------------------

DRIVE = """
import sys, time
from pathlib import Path
from orchestrator.storage.mirror import mirrored
with mirrored(sys.argv[1], Path(sys.argv[2]), seconds=1.0):
    print("runs", flush=True)
    time.sleep(60)
"""


@pytest.mark.extended
def test_of_two_machines_at_one_bucket_the_second_is_refused_until_the_first_is_dead(s3: str, tmp_path: Path) -> None:
    address = s3.replace("/runs", "/machines")
    search_in(tmp_path / "a", 1)
    command = [sys.executable, "-c", DRIVE, address, str(tmp_path / "a")]
    first = subprocess.Popen(command, stdout=subprocess.PIPE, text=True)
    assert first.stdout is not None and first.stdout.readline() == "runs\n"
    with pytest.raises(ConfigError, match=f"is being used by process {first.pid}"), driver(address, tmp_path / "b"):
        pass
    first.kill()
    first.wait()
    with driver(address, tmp_path / "b", side="address"):
        search_in(tmp_path / "b", 1, "another")
    with driver(address, tmp_path / "a"):
        assert trials_in(tmp_path / "a") == trials_in(tmp_path / "a", "another") == ["t0"]


# ---- stores with conditional writes -----------------------------------------------------------------------------


def check_objects(objects: Any, path: str) -> None:
    """The contract of every store of conditional objects."""
    assert objects.read(path) is None
    first = objects.write(path, b"1", None)
    assert objects.read(path) == (b"1", first)
    for wrong in (None, "1234567890"):
        with pytest.raises(WriteConflictError):
            objects.write(path, b"x", wrong)
    second = objects.write(path, b"2", first)
    with pytest.raises(WriteConflictError):
        objects.write(path, b"x", first)
    assert objects.read(path) == (b"2", second)
    with pytest.raises(WriteConflictError):
        objects.write(f"{path}-none", b"x", first)


@pytest.mark.slow
def test_s3_refuses_a_write_to_an_object_that_has_changed(s3: str) -> None:
    address = s3.replace("/runs", "/objects")
    filesystem, root = open_address(address)
    objects = conditional_objects(filesystem, root, address)
    assert isinstance(objects, S3Objects), "recognised by what the store does"
    check_objects(objects, f"{root}/a record.json")


def test_other_file_systems_are_compared(tmp_path: Path) -> None:
    filesystem = fs.LocalFileSystem()
    objects = conditional_objects(filesystem, str(tmp_path), str(tmp_path))
    assert isinstance(objects, ComparedObjects)
    check_objects(objects, f"{tmp_path}/record")


class FakeGcs(BaseHTTPRequestHandler):
    """A fake of the two requests of Google's JSON interface that are used, since there is no cloud here."""

    objects: dict[str, tuple[int, bytes]]

    def do_GET(self) -> None:
        name = unquote(urlparse(self.path).path.rpartition("/o/")[2])
        if name not in self.objects:
            return self._answer(404, b"")
        generation, content = self.objects[name]
        return self._answer(200, content, generation)

    def do_POST(self) -> None:
        query = parse_qs(urlparse(self.path).query)
        content = self.rfile.read(int(self.headers["Content-Length"]))
        name = query["name"][0]
        generation = self.objects.get(name, (0, b""))[0]
        if query["ifGenerationMatch"] != [str(generation)]:
            return self._answer(412, b"")
        self.objects[name] = (generation + 1, content)
        return self._answer(200, json.dumps({"generation": str(generation + 1)}).encode())

    def _answer(self, status: int, content: bytes, generation: int = 0) -> None:
        self.send_response(status)
        self.send_header("x-goog-generation", str(generation))
        self.send_header("Content-Length", str(len(content)))
        self.end_headers()
        self.wfile.write(content)

    def log_message(self, format: str, *args: object) -> None:
        """Say nothing."""


def test_gcs_refuses_a_write_to_another_generation() -> None:
    FakeGcs.objects = {}
    server = ThreadingHTTPServer(("127.0.0.1", 0), FakeGcs)
    Thread(target=server.serve_forever, daemon=True).start()
    try:
        host = f"127.0.0.1:{server.server_port}"
        address = f"gs://anonymous@bucket/runs?scheme=http&endpoint_override={host}"
        check_objects(GcsObjects(address), "bucket/runs/a record.json")
    finally:
        server.shutdown()
        server.server_close()
